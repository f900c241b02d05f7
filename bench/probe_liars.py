"""What members that lie can make the others say.

    python -m bench.probe_liars [--minutes 10] [--seeds 3] [--sizes 4 8 32]

The nodes, schedule and verdicts of `probe_simulator`, some nodes of which lie with valid
credentials. A liar decides how its own rounds end, for its partner too; it says of itself and of
its rounds with others what it likes; it leads as many rounds as its victim has time for, as many
as it likes with the number of the current slot. It cannot speak for others: every member gives its
result itself.

One that slanders waits for a fault: a link between two others is cut, and it reports that it
cannot call its ends either.

An accusation is wrong where an honest agent names what neither a liar nor the cut link has a share
in. What the liars' own agents export is theirs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.probe_simulator import EPOCH_0, Cluster, Conditions, Fault, heading
from dshealthd.probe.observation import Kind, Observation, Outcome, Part, Stage, Suspect

if TYPE_CHECKING:
    from collections.abc import Sequence

FORGED = 3
"""Rounds that a liar leads in an epoch, beside the scheduled one: what a victim has time for."""
TURN = 6
"""Epochs after which a liar changes its ways."""
WAYS = ("hung", "slow", "corrupted", "failed", "unreachable", "well")
FAST = 0.15
"""How little of its usual time a poisoned timing has."""
MANY = 32
"""Nodes from which on two liars are tried."""
CREEP = 1.06
"""The same for one that is slowed by less than what is flagged."""


class LiarCluster(Cluster):
    """A cluster in which some members lie."""

    def __init__(
        self,
        nodes: int,
        leaf_size: int,
        seed: int,
        strategy: str,
        liars: Sequence[int],
        victims: Sequence[int],
    ) -> None:
        super().__init__(nodes, leaf_size, Conditions(), seed)
        self.strategy, self.liars, self.victims = strategy, frozenset(liars), tuple(victims)
        self.forged = 0

    @property
    def way(self) -> str:
        """How a liar that frames ends its rounds now."""
        return WAYS[self.epoch // TURN % len(WAYS)]

    def _run(self, members: tuple[int, ...], epoch: int, kind: Kind) -> tuple[Observation, float]:
        observation, seconds = super()._run(members, epoch, kind)
        if self.liars.isdisjoint(members) or kind is Kind.LOCAL:
            return observation, seconds
        return self._lie(observation, members), seconds

    def _lie(self, truth: Observation, members: tuple[int, ...]) -> Observation:
        """Return what the honest members of a round with a liar see."""
        said = self._said(members)
        told = replace(truth, scores=said)
        liars = tuple(self.names[member] for member in members if member in self.liars)
        honest = [member for member in members if member not in self.liars]
        match self.strategy:
            case "poison":
                factor = FAST if self.epoch % 2 else CREEP
                return replace(
                    told,
                    timings=tuple(replace(t, seconds=t.seconds * factor) for t in told.timings),
                )
            case "silence" if honest and (honest[0] + self.epoch // 2) % 2:
                return _ended(told, Outcome.UNREACHABLE, Stage.INVITE, liars, scores=())
            case "slander" if members[0] in self.victims and self.epoch // TURN % 2:
                # It refuses to be called, and calls others itself.
                return _ended(told, Outcome.UNREACHABLE, Stage.INVITE, liars, scores=())
            case "frame" | "collude" if set(honest) & set(self.victims):
                match self.way:
                    case "hung":
                        # Told late by one that says it has come further.
                        return _ended(told, Outcome.HUNG, Stage.SIZES, truth.members[-1:])
                    case "slow":
                        return replace(
                            told,
                            timings=tuple(
                                replace(t, seconds=t.seconds * 1.3) for t in told.timings
                            ),
                        )
                    case "corrupted":
                        return _ended(told, Outcome.CORRUPTED, Stage.VERIFY, ())
                    case "failed":
                        return _ended(told, Outcome.FAILED, Stage.INIT, ())
                    case "unreachable":
                        return _ended(told, Outcome.UNREACHABLE, Stage.INVITE, liars, scores=())
        return told

    def _said(self, members: tuple[int, ...]) -> tuple[tuple[str, float], ...]:
        """Return what the members of a round say: the honest ones the truth."""
        said: list[tuple[str, float]] = []
        for member in members:
            if member not in self.liars or self.strategy in {"poison", "silence"}:
                said += self.judges[member].scores()
                continue
            me = self.names[member]
            said.append((me, 1.0))
            for other, name in enumerate(self.names):
                if other != member:
                    value = 1000.0 if other in self.victims else 1.0
                    said += [(f"{me}--{name}", value), (f"{me}->{name}", value)]
            if self.epoch // TURN % 2:
                said += [(f"{me}/leaf", 1.3), (f"{me}/3", 1.3)]
        return tuple(said)

    def step(self) -> None:
        """Run one epoch, and let the liars lead rounds of their own in it."""
        super().step()
        if self.strategy == "silence":
            return
        for liar in sorted(self.liars):
            for turn in range(FORGED):
                victim = self.victims[turn % len(self.victims)]
                number = EPOCH_0 + self.epoch - 1 if turn % 2 == 0 else -1
                observation, _ = self._run((liar, victim), number, Kind.RAIL)
                self.forged += 1
                self._told(observation)

    def wrong(self) -> set[tuple[str, Suspect]]:
        """Return who has accused what has nothing to do with a liar, at any time so far."""
        liars = {self.names[number] for number in self.liars}
        cut = self.component(self.fault) if self.fault else ""
        return {
            (self.names[node], suspect)
            for _, began, suspect, node in self.log
            if began
            and node not in self.liars
            and not liars & _nodes(suspect)
            and suspect.component != cut
        }


def _ended(
    truth: Observation,
    outcome: Outcome,
    stage: Stage,
    late: tuple[str, ...],
    scores: tuple[tuple[str, float], ...] | None = None,
) -> Observation:
    return replace(
        truth,
        outcome=outcome,
        stage=stage,
        timings=(),
        late=late,
        scores=truth.scores if scores is None else scores,
    )


def _nodes(suspect: Suspect) -> set[str]:
    """Return the nodes that an accusation names; none for a leaf."""
    if suspect.part is Part.LEAF:
        return set()
    return (
        set(suspect.component.split("--"))
        if suspect.part is Part.LINK
        else {suspect.component.partition("/")[0]}
    )


CASES = {
    "frame": 1,
    "poison": 1,
    "silence": 1,
    "slander": 1,
    "collude": 2,
    "poison in pairs": 2,
    "silence in pairs": 2,
    "slander in pairs": 2,
}
"""Strategies, and how many lie together."""


def play(nodes: int, name: str, minutes: float, seed: int) -> LiarCluster:
    """Return a cluster after so many minutes of lies; the liars change with the seed."""
    leaf = max(2, nodes // 4)
    count = CASES[name]
    first = seed * 7 % nodes
    liars = [(first + step) % nodes for step in range(count)]
    victims = [(first + count) % nodes] if seed % 2 else [(first + nodes // 2) % nodes]
    strategy = name.partition(" ")[0]
    if strategy == "slander":
        victims.append((victims[0] + 1) % nodes)
    made = LiarCluster(nodes, leaf, seed, strategy, liars, victims)
    if strategy == "slander":
        made.fault = Fault(
            Part.LINK, float("inf"), victims[0], victims[1], outcome=Outcome.UNREACHABLE
        )
    while made.epoch * made.conditions.period < minutes * 60:
        made.step()
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=1, help="liars and victims that are tried")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 32])
    arguments = parser.parse_args()
    print(f"Simulated: {arguments.minutes:g} minutes each, seeds 1 to {arguments.seeds}.\n")
    heading("nodes", "liars", "strategy", "trials", "forged rounds", "accused wrongly", "which")
    for nodes in arguments.sizes:
        for name, count in CASES.items():
            if count > 1 and nodes < MANY:
                continue
            wrong: set[tuple[str, Suspect]] = set()
            forged = 0
            for seed in range(1, arguments.seeds + 1):
                made = play(nodes, name, arguments.minutes, seed)
                wrong |= made.wrong()
                forged += made.forged
            which = sorted({f"{s.part} {s.component} {s.reason}" for _, s in wrong})
            print(
                f"| {nodes} | {count} | {name} | {arguments.seeds} | {forged} | {len(wrong)} "
                f"| {', '.join(which[:4]) or '-'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
