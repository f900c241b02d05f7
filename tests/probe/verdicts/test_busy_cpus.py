"""A slow link among four nodes with busy CPUs, where any collective may take ten times as long as
on idle ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.probe.observation import Kind, Observation, Outcome, Part, Stage, Suspect, Timing
from tests.probe.verdicts.test_light_rounds import KNOWN, PAIR, Company

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.probe.verdicts.detector import Confirmation

TIMES = {8: 0.0004, 1024: 0.0006, 65536: 0.0007}
"""Usual seconds of an all-reduce by bytes, as measured with four agents on two cores."""
LARGE, SLOWED = 65536, 0.0373
BUSY, WAIT = 0.3, 0.001
"""Share of timings prolonged by a wait for a CPU, and the mean of that wait in seconds."""
TRIALS, RIGHT = 24, 15


class BusyCompany(Company):
    """The agents, with collectives that both ends time."""

    def _round(
        self, leader: str, member: str, epoch: int, _asker: str = ""
    ) -> Iterator[tuple[str, Confirmation]]:
        self.now += 0.02
        timings = tuple(self._timing(size, of_pair={leader, member} == PAIR) for size in TIMES)
        ends = leader, member
        scores = tuple(score for name in ends for score in self._detectors[name].scores())
        observation = Observation(
            epoch,
            Kind.PAIR,
            "gloo",
            ends,
            Outcome.OK,
            Stage.DONE,
            timings,
            scores=scores,
            at=self.now,
        )
        for name in ends:
            for extra in self._detectors[name].observe(observation):
                yield name, extra

    def _timing(self, size: int, *, of_pair: bool) -> Timing:
        slow = self.slow_pair and of_pair and size == LARGE
        seconds = (SLOWED if slow else TIMES[size]) * (1 + 0.15 * self._draws.random())
        if self._draws.random() < BUSY:
            seconds += self._draws.expovariate(1 / WAIT)
        return Timing("all_reduce", size, seconds, 0.0)


def told(start: int) -> list[set[Suspect]]:
    """Return who is accused by anybody in each of the first 15 epochs with the slow link."""
    company = BusyCompany(start)
    for _ in range(KNOWN):
        company.step()
    company.slow_pair = True
    return company.told(15)


def test_slow_link_is_named_although_all_are_slow() -> None:
    """A link that is slower by far than busy CPUs make others is the only one accused in 15 of 24
    trials, and seldom called ambiguous. In the other trials, one end finds itself slow, or it takes
    longer.
    """
    right = Suspect(Part.LINK, "--".join(sorted(PAIR)), "slow")
    trials = [told(1000 * number) for number in range(1, TRIALS + 1)]
    alone = [all(found <= {right} for found in one) and right in one[-1] for one in trials]
    assert sum(alone) >= RIGHT
    ambiguous = [any(s.reason == "ambiguous" for found in one for s in found) for one in trials]
    assert sum(ambiguous) <= 1
