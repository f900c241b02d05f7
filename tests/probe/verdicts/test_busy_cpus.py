"""Four nodes with busy CPUs, where any collective may take ten times as long as on idle ones: a
slow link among them, and a node whose network has a tenth of the usual rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dshealthd.probe.observation import (
    Observation,
    Outcome,
    Part,
    RoundKind,
    Stage,
    Suspect,
    Timing,
)
from dshealthd.probe.verdicts.planner import Confirmation
from tests.probe.verdicts.test_light_rounds import KNOWN, PAIR, SLOW, Company

TIMES = {8: 0.0004, 1024: 0.0006, 65536: 0.0007}
"""Usual seconds of an all-reduce by bytes, as measured with four agents on two cores."""
LARGE, SLOWED = 65536, 0.0373
BUSY, WAIT = 0.3, 0.001
"""Share of timings prolonged by a wait for a CPU, and the mean of that wait in seconds."""
TRIALS, RIGHT = 12, 7
RATE = 12.5e6
"""Bytes per second of 100 Mbit/s."""


class BusyCompany(Company):
    """The agents, with collectives that both ends time."""

    def _round(
        self, leader: str, member: str, epoch: int, _asker: str = ""
    ) -> Iterator[tuple[str, Confirmation]]:
        self.now += 0.02
        ends = leader, member
        timings = tuple(self._timings({*ends}, epoch))
        observation = Observation(
            epoch, RoundKind.PAIR, "gloo", ends, Outcome.OK, Stage.DONE, timings, at=self.now
        )
        told = {name: self._detectors[name].report() for name in ends}
        for name, other in (ends, ends[::-1]):
            for extra in self._detectors[name].observe(replace(observation, told=told[other])):
                yield name, extra

    def _timings(self, ends: set[str], _epoch: int) -> Iterator[Timing]:
        for size, usual in TIMES.items():
            slow = self.slow_pair and ends == PAIR and size == LARGE
            seconds = (SLOWED if slow else usual) * (1 + 0.15 * self._draws.random())
            if self._draws.random() < BUSY:
                seconds += self._draws.expovariate(1 / WAIT)
            yield Timing("all_reduce", size, seconds, 0.0)


def told(start: int) -> list[set[Suspect]]:
    """Return who is accused by anybody in each of the first 15 epochs with the slow link."""
    company = BusyCompany(start)
    company.told(KNOWN)
    company.slow_pair = True
    return company.told(15)


def test_slow_link_is_named_although_all_are_slow() -> None:
    """A link that is slower by far than busy CPUs make others is the only one accused in 7 of 12
    trials, and seldom called ambiguous. In the other trials, one end finds itself slow, or it takes
    longer.
    """
    right = Suspect(Part.LINK, "--".join(sorted(PAIR)), "slow")
    trials = [told(1000 * number) for number in range(1, TRIALS + 1)]
    alone = [all(found <= {right} for found in one) and right in one[-1] for one in trials]
    assert sum(alone) >= RIGHT
    ambiguous = [any(s.reason == "ambiguous" for found in one for s in found) for one in trials]
    assert sum(ambiguous) <= 1


class LimitedCompany(BusyCompany):
    """The agents, whose CPUs are less busy; one may have a tenth of the rate of the others."""

    limited = False

    def _timings(self, ends: set[str], epoch: int) -> Iterator[Timing]:
        large = {4 << 20: 0.012} if max(epoch, 0) % 12 < 2 else {}
        for size, usual in ({8: 0.0004, 1024: 0.0006, 65536: 0.0012} | large).items():
            seconds = usual * (1 + 0.15 * self._draws.random())
            if self._draws.random() < BUSY / 3:
                seconds += self._draws.expovariate(1 / WAIT)
            if self.limited and SLOW in ends:
                seconds += size / RATE
            yield Timing("all_reduce", size, seconds, 0.0)


@pytest.mark.parametrize("start", [7_000, 13_000, 17_000, 22_000, 24_000])
def test_a_tenth_of_the_rate_is_of_one_node(start: int) -> None:
    """The node is named, and neither the fabric nor anybody else: that the times of others vary by
    more than the tolerance does not make them as slow as it.
    """
    company = LimitedCompany(start)
    company.told(KNOWN)
    company.limited = True
    found = company.told(20)
    assert set().union(*found) == {Suspect(Part.NODE, SLOW, "slow")}
