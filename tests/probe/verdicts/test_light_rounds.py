"""What four agents conclude together from light rounds, which one of two leads and times."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dshealthd.probe.members.schedule import Timetable, root_order
from dshealthd.probe.observation import (
    Observation,
    Outcome,
    Part,
    RoundKind,
    Stage,
    Suspect,
    Timing,
)
from dshealthd.probe.options import BaselineOptions
from dshealthd.probe.verdicts.baseline import Baselines
from dshealthd.probe.verdicts.detector import Detector
from dshealthd.probe.verdicts.planner import Confirmation

NAMES = ("n0", "n1", "n2", "n3")
NO_LEAVES = dict.fromkeys(NAMES, "")
SLOW = SHUT = "n1"
PAIR = frozenset({"n0", "n1"})
EMPTY, PAYLOAD = 0, 47872
USUAL, SLOWED = 0.001, 0.1
KNOWN = 60
"""Epochs after which each node knows what is usual."""
STARTS = [10_000 * number for number in range(1, 9)]
"""Epochs to begin with: who leads whom is drawn from the number of the epoch."""
FEW_STARTS = STARTS[:3]
NAMED = 15
"""Epochs until a slow node is accused: it has to have two rounds, and to confirm them."""
EXTRAS = 20
"""Maximum extra rounds per epoch."""


class Company:
    """The agents and their rounds; `start` is the epoch with which they begin."""

    def __init__(self, start: int) -> None:
        self.epoch, self.now = start, 10.0 * start
        self.slow = False
        self.slow_pair = False
        self.shut = False
        """Whether nobody can call the node SHUT, which calls others itself."""
        self.cut = False
        """Whether the two of PAIR cannot call each other."""
        self.untimed = 0.0
        """Share of times that do not count because an agent waited for a CPU."""
        self._draws = random.Random(start)
        self._timetable = Timetable(NAMES, NO_LEAVES)
        self._detectors = {
            name: Detector(name, NO_LEAVES, Baselines(BaselineOptions()), lambda: self.now)
            for name in NAMES
        }

    def step(self) -> None:
        """Run the rounds of an epoch and the extra ones that they ask for."""
        self.epoch += 1
        self.now = 10.0 * self.epoch
        groups = {frozenset(self._timetable.group_of(name, self.epoch)) for name in NAMES}
        asked: list[tuple[str, Confirmation]] = []
        for group in sorted(map(sorted, groups)):
            leader, member = root_order(group, self.epoch)
            asked += self._round(leader, member, self.epoch)
        for _ in range(EXTRAS):
            if not asked:
                return
            asker, extra = asked.pop(0)
            leader, member = extra.members
            if leader != asker and self._is_shut(asker, leader):
                self._detectors[asker].withdraw(extra)
            else:
                asked += self._round(leader, member, -1, asker)
        for name, extra in asked:
            self._detectors[name].withdraw(extra)

    def told(self, epochs: int) -> list[set[Suspect]]:
        """Return who is accused by anybody after each of the next epochs."""
        found = []
        for _ in range(epochs):
            self.step()
            found.append(self.suspects())
        return found

    def suspects(self) -> set[Suspect]:
        """Return who is accused by anybody."""
        return {found for detector in self._detectors.values() for found in detector.suspects()}

    def _is_shut(self, leader: str, member: str) -> bool:
        """Tell whether a call is refused."""
        return (self.shut and member == SHUT) or (self.cut and {leader, member} == PAIR)

    def _round(
        self, leader: str, member: str, epoch: int, asker: str = ""
    ) -> Iterator[tuple[str, Confirmation]]:
        self.now += 0.02
        ends = leader, member
        observation = Observation(
            epoch, RoundKind.LIGHT, "agent", ends, Outcome.OK, Stage.DONE, at=self.now
        )
        seen = {leader, member, asker or leader}
        if self._is_shut(leader, member):
            observation = replace(
                observation, outcome=Outcome.REFUSED, stage=Stage.INVITE, late=(member,)
            )
            seen -= {member}
        else:
            observation = replace(observation, timings=tuple(self._times({*ends})))
        reports = {name: self._detectors[name].report() for name in ends}
        for name in sorted(seen):
            if member in seen:
                told = reports[leader if name == member else member]
                observation = replace(observation, told=told)
            requested = bool(asker) and asker not in ends
            for extra in self._detectors[name].observe(observation, requested=requested):
                yield name, extra

    def _times(self, ends: set[str]) -> Iterator[Timing]:
        slow = (self.slow and SLOW in ends) or (self.slow_pair and ends == PAIR)
        for size, usual in (
            (EMPTY, SLOWED if self.slow and slow else USUAL),
            (PAYLOAD, SLOWED if slow else USUAL),
        ):
            seconds = usual * (1 + 0.2 * self._draws.random())
            if self._draws.random() >= self.untimed:
                yield Timing("echo", size, seconds, 0.0)


def known(start: int, epochs: int = KNOWN) -> Company:
    """Return agents that have met for so many epochs, and accuse nobody."""
    company = Company(start)
    assert not any(company.told(epochs))
    return company


def named(company: Company, epochs: int, *suspect: str) -> None:
    """Require that in the end this suspect is accused, and nothing else before or beside it."""
    part, component, reason = suspect
    told, right = company.told(epochs), {Suspect(Part(part), component, reason)}
    assert all(found <= right for found in told), told
    assert told[-1] == right


@pytest.mark.parametrize("start", STARTS)
def test_slow_node_is_named_whoever_leads(start: int) -> None:
    """A node whose echoes are all slow is accused, and none of its links, and cleared
    afterwards.
    """
    company = known(start)
    company.slow = True
    named(company, NAMED, "node", SLOW, "slow")
    company.slow = False
    assert not company.told(4 * NAMED)[-1]


@pytest.mark.parametrize("untimed", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("start", FEW_STARTS)
def test_slow_link_is_named_whoever_leads_and_times(start: int, untimed: float) -> None:
    """A link that is slow for large payloads is accused, even if one end leads all of its first
    meetings and most times do not count, as agents wait for a CPU.
    """
    company = known(start)
    company.slow_pair, company.untimed = True, untimed
    named(company, 4 * NAMED, "link", "n0--n1", "slow")


@pytest.mark.parametrize("start", FEW_STARTS)
def test_nodes_without_a_cpu_are_not_slow(start: int) -> None:
    """While few times count, nobody is accused, and the baselines do not change."""
    company = known(start)
    company.untimed = 0.95
    assert not any(company.told(4 * NAMED))
    company.untimed, company.slow_pair = 0.0, True
    assert company.told(NAMED)[-1] == {Suspect(Part.LINK, "n0--n1", "slow")}


@pytest.mark.parametrize("start", STARTS)
def test_node_that_nobody_can_call_is_named_whoever_leads(start: int) -> None:
    """A node that refuses all calls while it calls others is accused, and no link to it, though the
    schedule may not have others call it for many epochs: others that are asked do.
    """
    company = known(start, KNOWN // 10)
    company.shut = True
    named(company, NAMED, "node", SHUT, "refused")


@pytest.mark.parametrize("start", STARTS)
def test_cut_link_is_named_whoever_leads(start: int) -> None:
    """If two nodes refuse only each other's calls, their link is accused."""
    company = known(start, KNOWN // 10)
    company.cut = True
    named(company, 2 * NAMED, "link", "n0--n1", "refused")
