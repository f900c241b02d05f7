"""How soon, how surely and how falsely probes accuse.

The real schedule and verdicts, and a simulated network.

    python -m bench.probe_simulator [--nodes 128] [--jitter 1.5 3] [--spikes 0.5 2] [--trials 20]
    [--days 0.1] [--seed 1]

Every node has its own `Detector`, which sees its own rounds and what its peers tell in them. A
round times one 64 MiB all-reduce on each of eight rails: usual time x (1 + jitter) x a spike (of
1.2 to 3, by chance and per timing) x congestion (a leaf's way out, 1.2 to 2, for exponentially
distributed seconds) x the fault, of the slower end. A slow part takes 1.3 or 1.15 times its usual
time. Everything printed is simulated: no network, no GPU. What is usual is known from 64 rounds
before the start, as after a quarter of an hour of running.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from dshealthd.core import schema
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
from dshealthd.probe.verdicts.baseline import Baselines, TimingClass
from dshealthd.probe.verdicts.detector import INTERMITTENT, Detector
from dshealthd.probe.verdicts.planner import Confirmation

RAILS = 8
SIZE = 64 << 20
OP, LOCAL_OP = "all_reduce", "matrix_product"
NEAR, FAR, LOCAL = 0.003, 0.0034, 0.002
"""Usual seconds on one leaf, across leaves, and of the matrix product."""
ROUND = 1.5
"""Seconds of a round; extra rounds are run one after the other, between the scheduled ones."""
DEADLINE = 3.0
"""Seconds until a node that does not answer is called unreachable."""
ECHO, ECHO_DEADLINE = 0.1, 2.0
"""The same of an echo between agents, which needs no workers."""
LOCAL_EVERY = 60
"""Epochs between the scheduled local rounds of a node."""
EPOCH_0 = 1_000_000


@dataclass(frozen=True)
class Conditions:
    """What the network is like when nothing is wrong."""

    jitter: float = 0.015
    spikes: float = 0.005
    bursts_per_leaf_day: float = 24.0
    burst_seconds: float = 3.0
    """Mean of the exponential distribution."""
    period: float = 10.0


@dataclass(frozen=True)
class Fault:
    """What is wrong; `node` (and `peer` of a link) by number, `factor` on times, infinite where it
    is dead or cut.
    """

    part: Part
    factor: float
    node: int = 0
    peer: int = 0
    rail: int = 0
    outcome: Outcome = Outcome.OK
    """How rounds end, where it is more than slow."""
    share: float = 1.0
    """Share of the rounds that end so, at random; the others are as usual."""
    more: frozenset[int] = frozenset()
    """Further nodes with the same fault, where they are dead."""

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes with this fault."""
        return self.more | {self.node}

    @property
    def reasons(self) -> frozenset[str]:
        """The reasons that an accusation may give."""
        if self.outcome is Outcome.OK:
            return frozenset({"slow"})
        return frozenset({str(self.outcome), *([INTERMITTENT] if self.share < 1 else [])})


@dataclass
class RoundMetrics:
    """What happened in the trials of one fault."""

    trials: int = 0
    right: int = 0
    """Named, and nothing else was accused."""
    ambiguous: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    cleared: list[float] = field(default_factory=list)


class Cluster:
    """Nodes, their judges, and the network between them; time is in seconds since the start."""

    def __init__(
        self,
        nodes: int,
        leaf_size: int,
        conditions: Conditions,
        seed: int,
        *,
        baseline: BaselineOptions | None = None,
    ) -> None:
        self.conditions = conditions
        self.random = random.Random(seed)
        self.names = [f"node-{number:04}" for number in range(nodes)]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.leaf = [number // leaf_size for number in range(nodes)]
        self.leaves = {name: f"leaf-{self.leaf[number]}" for number, name in enumerate(self.names)}
        self.timetable = Timetable(self.names, self.leaves)
        self.time = 0.0
        self.epoch = 0
        self.fault: Fault | None = None
        self.standing: dict[int, frozenset[Suspect]] = {}
        self.log: list[tuple[float, bool, Suspect, int]] = []
        """Time, whether it began or ended, the accusation, and the number of the node that exports
        it.
        """
        self.extra = self.rounds = 0
        self._bursts: dict[int, tuple[float, float, float]] = dict.fromkeys(
            set(self.leaf), (0.0, 0.0, 1.0)
        )
        self._free = [0.0] * nodes
        self._events: list[tuple[float, int, Observation | Confirmation, int]] = []
        """What is yet to happen, by time: the last rounds of an epoch may end in the next one."""
        self._order = itertools.count()
        options = baseline or BaselineOptions()
        usual = schema.document(self._usual(options).document())
        self.judges = []
        for name in self.names:
            baselines = Baselines(options)
            baselines.restore(usual)
            self.judges.append(Detector(name, self.leaves, baselines, lambda: self.time))

    def _usual(self, options: BaselineOptions) -> Baselines:
        """Return what a node knows after a while."""
        known = Baselines(options)
        for turn, rail in itertools.product(range(64), range(RAILS)):
            for far in (False, True):
                seconds = (FAR if far else NEAR) * self.random.gauss(1, self.conditions.jitter)
                known.update(
                    TimingClass(RoundKind.RAIL, "nccl", OP, SIZE, str(rail), far),
                    seconds,
                    turn - 3600.0,
                )
            seconds = LOCAL * self.random.gauss(1, self.conditions.jitter)
            known.update(
                TimingClass(RoundKind.LOCAL, "nccl", LOCAL_OP, 8192, str(rail), far=False),
                seconds,
                turn - 3600.0,
            )
        return known

    # The network

    def _congestion(self, leaf: int) -> float:
        start, end, factor = self._bursts[leaf]
        while self.time >= end:
            start = end + self.random.expovariate(self.conditions.bursts_per_leaf_day / 86400)
            end, factor = (
                start + self.random.expovariate(1 / self.conditions.burst_seconds),
                self.random.uniform(1.2, 2),
            )
            self._bursts[leaf] = start, end, factor
        return factor if self.time >= start else 1.0

    def slowness(self, a: int, b: int, rail: int) -> float:
        """Return how many times as long a rail takes between two nodes because of the fault."""
        match self.fault:
            case Fault(Part.NIC | Part.GPU, factor, node, _, slow) if slow == rail and node in {
                a,
                b,
            }:
                return factor
            case Fault(Part.NODE, factor, node) if node in {a, b}:
                return factor
            case Fault(Part.LEAF, factor, node) if self.leaf[node] in {self.leaf[a], self.leaf[b]}:
                return factor
            case Fault(Part.LINK, factor, node, peer) if {node, peer} == {a, b}:
                return factor
        return 1.0

    def _timings(self, a: int, b: int) -> Iterator[Timing]:
        draw, conditions = self.random, self.conditions
        near = self.leaf[a] == self.leaf[b]
        usual = (
            NEAR
            if near
            else FAR * max(self._congestion(self.leaf[a]), self._congestion(self.leaf[b]))
        )
        for rail in range(RAILS):
            seconds = usual * draw.gauss(1, conditions.jitter)
            if draw.random() < conditions.spikes:
                seconds *= draw.uniform(1.2, 3)
            if self.fault:
                seconds *= self.slowness(a, b, rail)
            yield Timing(OP, SIZE, seconds, SIZE / seconds, str(rail))

    def _run(
        self, members: tuple[int, ...], epoch: int, kind: RoundKind
    ) -> tuple[Observation, float]:
        """Return what a round told, and how long it took; `self.time` is its start."""
        names = tuple(self.names[member] for member in members)
        fault = self.fault
        if fault and self._ends_badly(fault, members, kind):
            unreached = fault.outcome is Outcome.UNREACHABLE
            light = kind is RoundKind.LIGHT
            end = self.time + (
                (ECHO_DEADLINE if light else DEADLINE) if unreached else (ECHO if light else ROUND)
            )
            stage = Stage.INVITE if unreached else Stage.VERIFY
            return Observation(
                epoch, kind, "nccl", names, fault.outcome, stage, at=end
            ), end - self.time
        if kind is RoundKind.LOCAL:
            slow = (
                fault.factor
                if fault and fault.part is Part.GPU and fault.node == members[0]
                else 1.0
            )
            timings = []
            for gpu in range(RAILS):
                seconds = (
                    LOCAL
                    * self.random.gauss(1, self.conditions.jitter)
                    * (slow if fault and gpu == fault.rail else 1.0)
                )
                timings.append(Timing(LOCAL_OP, 8192, seconds, 0.0, str(gpu)))
            return Observation(
                epoch,
                kind,
                "nccl",
                names,
                Outcome.OK,
                Stage.DONE,
                tuple(timings),
                at=self.time + ROUND,
            ), ROUND
        timings = [] if kind is RoundKind.LIGHT else list(self._timings(*members))
        seconds = ECHO if kind is RoundKind.LIGHT else ROUND
        return Observation(
            epoch,
            kind,
            "nccl",
            names,
            Outcome.OK,
            Stage.DONE,
            tuple(timings),
            (),
            "",
            at=self.time + seconds,
        ), seconds

    def _ends_badly(self, fault: Fault, members: tuple[int, ...], kind: RoundKind) -> bool:
        if fault.outcome is Outcome.OK or (
            fault.outcome is Outcome.CORRUPTED and kind is not RoundKind.RAIL
        ):
            return False
        met = (
            {fault.node, fault.peer} == set(members)
            if fault.part is Part.LINK
            else not fault.nodes.isdisjoint(members)
        )
        if fault.share < 1 and met:
            # Packets of a network: what a node does by itself goes well.
            return kind is not RoundKind.LOCAL and self.random.random() < fault.share
        return met

    # The agents

    def step(self) -> None:
        """Run one epoch: the scheduled rounds, and the extra ones that follow from them."""
        start = self.epoch * self.conditions.period
        end = start + self.conditions.period
        self.time = start
        number = EPOCH_0 + self.epoch
        events, order = self._events, self._order
        for pair in self.timetable.groups(number):
            a, b = (self.numbers[name] for name in root_order(pair, number))
            begin = max(start, self._free[a], self._free[b])
            self.time = begin
            observation, seconds = self._run((a, b), number, RoundKind.RAIL)
            self._free[a] = self._free[b] = begin + seconds
            self.rounds += 1
            heapq.heappush(events, (begin + seconds, next(order), observation, -1))
        for node in range(number % LOCAL_EVERY, len(self.names), LOCAL_EVERY):
            if not self._dead(node):
                self.time = self._free[node]
                observation, seconds = self._run((node,), number, RoundKind.LOCAL)
                self._free[node] += seconds
                heapq.heappush(events, (self.time + seconds, next(order), observation, -1))
        while events and events[0][0] < end + ROUND:
            self.time, _, event, node = heapq.heappop(events)
            if isinstance(event, Observation):
                for at, asked, asker in self._told(event, node):
                    heapq.heappush(events, (at, next(order), asked, asker))
                continue
            members = tuple(self.numbers[name] for name in event.members)
            if node not in members and self._is_cut_off(node, members[0]):
                self._decline(event, node)
                continue
            # Whoever calls a dead node does not wait for others that call it.
            free = max(self._free[member] for member in members if not self._dead(member))
            seconds = ECHO if event.kind is RoundKind.LIGHT else ROUND
            if free > self.time or self._dead(node):
                if free + seconds <= end and not self._dead(node):
                    heapq.heappush(events, (free, next(order), event, node))
                else:
                    self._decline(event, node)
                continue
            if self.time + seconds > end:
                self._decline(event, node)
                continue
            self.extra += 1
            observation, seconds = self._run(members, -1, event.kind)
            for member in members:
                self._free[member] = self.time + seconds
            asker = -1 if node in members else node
            heapq.heappush(events, (self.time + seconds, next(order), observation, asker))
        self.epoch += 1

    def _decline(self, asked: Confirmation, node: int) -> None:
        """There is no time left in this epoch; the next round asks again."""
        if not self._dead(node):
            self.judges[node].withdraw(asked)

    def _is_cut_off(self, node: int, other: int) -> bool:
        """Tell whether a node cannot ask another to call a third."""
        fault = self.fault
        return fault is not None and self._ends_badly(fault, (node, other), RoundKind.LIGHT)

    def _dead(self, node: int) -> bool:
        return (
            self.fault is not None
            and self.fault.factor == float("inf")
            and self.fault.part is Part.NODE
            and node in self.fault.nodes
        )

    def _told(
        self, observation: Observation, asker: int
    ) -> Iterable[tuple[float, Confirmation, int]]:
        """Let all members of a round see it, and the node that asked one of them for it, if any."""
        asked = []
        # What could not be reached has reported nothing.
        met = () if observation.outcome is Outcome.UNREACHABLE else observation.members
        reports = {name: self.judges[self.numbers[name]].report() for name in met}
        for name in (*observation.members, *([self.names[asker]] if asker >= 0 else [])):
            node = self.numbers[name]
            if self._dead(node):
                continue
            detector = self.judges[node]
            seen = observation
            # Each has called the other one itself.
            if observation.outcome is Outcome.UNREACHABLE and name in observation.members:
                others = tuple(other for other in observation.members if other != name)
                seen = replace(observation, members=(name, *others), late=others)
            other = next((one for one in reversed(met) if one != name), "")
            seen = replace(seen, told=reports.get(other))
            extra = detector.observe(seen, requested=asker >= 0)
            asked += [(self.time, confirmation, node) for confirmation in extra]
            suspects = frozenset(detector.suspects())
            before = self.standing.get(node, frozenset())
            if suspects != before:
                self.standing[node] = suspects
                self.log += [(self.time, True, suspect, node) for suspect in suspects - before]
                self.log += [(self.time, False, suspect, node) for suspect in before - suspects]
        return asked

    def accused(self) -> set[Suspect]:
        """Return all that is exported anywhere; a dead node exports nothing."""
        return {
            suspect
            for node, suspects in self.standing.items()
            if not self._dead(node)
            for suspect in suspects
        }

    def component(self, fault: Fault) -> str:
        """Return what an accusation must name."""
        node = self.names[fault.node]
        return {
            Part.NODE: node,
            Part.NIC: f"{node}/nic{fault.rail}",
            Part.GPU: f"{node}/gpu{fault.rail}",
            Part.LINK: "--".join(sorted((node, self.names[fault.peer]))),
            Part.LEAF: self.leaves[node],
        }[fault.part]


def trial(
    cluster: Cluster, fault: Fault, metrics: RoundMetrics, *, epochs: int = 12, rest: int = 12
) -> None:
    """Inject a fault for some epochs, see what is accused, and let it end."""
    period = cluster.conditions.period
    target = cluster.component(fault)
    offset = cluster.random.uniform(
        0, period
    )  # when in the period it begins; the next round is the first that can see it
    began = cluster.epoch * period - offset
    cluster.fault, mark = fault, len(cluster.log)
    for _ in range(epochs):
        cluster.step()
    cluster.fault, ended = None, cluster.epoch * period
    log = cluster.log[mark:]
    right = [
        at
        for at, on, suspect, _ in log
        if on
        and (suspect.part, suspect.component) == (fault.part, target)
        and suspect.reason != "ambiguous"
    ]
    meant = {Suspect(fault.part, target, reason) for reason in fault.reasons}
    wrong = {
        suspect
        for _, on, suspect, _ in log
        if on and suspect not in meant and suspect.reason != "ambiguous"
    }
    metrics.trials += 1
    metrics.right += bool(right) and not wrong
    metrics.ambiguous += any(suspect.reason == "ambiguous" for _, on, suspect, _ in log if on)
    metrics.wrong.update(str(suspect.part) for suspect in wrong)
    metrics.seconds += [right[0] - began] if right else [float("inf")]
    for _ in range(rest):
        cluster.step()
    last = max(
        (at for at, on, suspect, _ in cluster.log[mark:] if not on and suspect.component == target),
        default=ended,
    )
    metrics.cleared.append(float("inf") if cluster.accused() else max(0.0, last - ended))


def quiet(cluster: Cluster, days: float) -> tuple[int, int]:
    """Run without a fault; return how many accusations there were, and how many stood for a minute,
    and so could page.
    """
    mark, before = len(cluster.log), cluster.epoch
    while (cluster.epoch - before) * cluster.conditions.period < days * 86400:
        cluster.step()
    began: dict[tuple[Suspect, int], float] = {}
    lasted = []
    for at, on, suspect, node in cluster.log[mark:]:
        if on:
            began[suspect, node] = at
        elif (suspect, node) in began:
            lasted.append(at - began.pop((suspect, node)))
    lasted += [cluster.time - at for at in began.values()]
    return len(lasted), sum(seconds >= 60 for seconds in lasted)


def faults(cluster: Cluster) -> dict[str, Fault]:
    """Return one fault of each sort, at a place of chance."""
    draw = cluster.random
    node, peer = draw.sample(range(len(cluster.names)), 2)
    met = {
        pair
        for pair in cluster.timetable.groups(EPOCH_0 + cluster.epoch)
        if cluster.names[node] in pair
    }
    for pair in (
        met
    ):  # a link is seen when its ends meet: the wait for that is the schedule's, not the verdict's
        node, peer = (cluster.numbers[name] for name in pair)
    rail = draw.randrange(RAILS)
    return {
        "node 30 % slow": Fault(Part.NODE, 1.3, node),
        "node 15 % slow": Fault(Part.NODE, 1.15, node),
        "NIC 30 % slow": Fault(Part.NIC, 1.3, node, rail=rail),
        "NIC 15 % slow": Fault(Part.NIC, 1.15, node, rail=rail),
        "GPU 30 % slow": Fault(Part.GPU, 1.3, node, rail=rail),
        "leaf 30 % slow": Fault(Part.LEAF, 1.3, node),
        "link 30 % slow": Fault(Part.LINK, 1.3, node, peer),
        "link cut": Fault(Part.LINK, float("inf"), node, peer, outcome=Outcome.UNREACHABLE),
        "node dead": Fault(Part.NODE, float("inf"), node, outcome=Outcome.UNREACHABLE),
        "node with wrong data": Fault(Part.NODE, 1.0, node, outcome=Outcome.CORRUPTED),
    }


def lossy(cluster: Cluster, share: float) -> Fault:
    """Return a node of chance that loses packets, so that this share of its rounds fails."""
    node = cluster.random.randrange(len(cluster.names))
    return Fault(Part.NODE, 1.0, node, outcome=Outcome.UNREACHABLE, share=share)


LOSSES = {"node loses 50 %": 0.5, "node loses 70 %": 0.7}
"""Rows of the table, and the share of the node's rounds that fails.

Apart from `faults`: what comes and goes takes longer to be told from chance.
"""


def quantile(values: list[float], share: float) -> float:
    """Return the value below which so large a share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def heading(*columns: str) -> None:
    """Print the head of a table."""
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="How soon, surely and falsely probes accuse.")
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--leaf-size", type=int, default=16)
    parser.add_argument("--jitter", type=float, nargs="+", default=[1.5, 3.0], help="per cent")
    parser.add_argument(
        "--spikes", type=float, nargs="+", default=[0.5, 2.0], help="per cent of the timings"
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--days", type=float, default=0.1)
    parser.add_argument("--burst-seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(
        f"Simulated: {arguments.nodes} nodes of {RAILS} GPUs in leaves of "
        f"{arguments.leaf_size}, a round in 10 s, seed {arguments.seed}.\n"
    )
    quiet_rows = []
    print(
        (
            "| jitter | spikes | fault | named right | p50 s | p95 s | missed | wrong too | said "
            "ambiguous | cleared p95 s |\n|"
        )
        + "---|" * 10
    )
    for jitter, spikes in itertools.product(arguments.jitter, arguments.spikes):
        conditions = Conditions(jitter / 100, spikes / 100, burst_seconds=arguments.burst_seconds)
        cluster = Cluster(arguments.nodes, arguments.leaf_size, conditions, arguments.seed)
        for _ in range(6):
            cluster.step()
        for name in (*faults(cluster), *LOSSES) if arguments.trials else ():
            metrics = RoundMetrics()
            for _ in range(arguments.trials):
                fault = lossy(cluster, LOSSES[name]) if name in LOSSES else faults(cluster)[name]
                trial(cluster, fault, metrics)
            missed = sum(seconds == float("inf") for seconds in metrics.seconds)
            print(
                f"| {jitter:g} % | {spikes:g} % | {name} | {metrics.right / metrics.trials:.1%} "
                f"| {quantile(metrics.seconds, 0.5):.0f} "
                f"| {quantile(metrics.seconds, 0.95):.0f} | {missed} | "
                f"{dict(metrics.wrong) or '-'} "
                f"| {metrics.ambiguous} "
                f"| {quantile(metrics.cleared, 0.95):.0f} |",
                flush=True,
            )
        if arguments.days:
            cluster = Cluster(arguments.nodes, arguments.leaf_size, conditions, arguments.seed + 1)
            begun = time.process_time()
            accused, paging = quiet(cluster, arguments.days)
            names = Counter(
                f"{suspect.part} {suspect.reason}" for _, on, suspect, _ in cluster.log if on
            )
            quiet_rows.append(
                f"| {jitter:g} % | {spikes:g} % | {arguments.days:g} | {cluster.rounds} | "
                f"{cluster.extra / cluster.rounds:.1%} | {accused} "
                f"| {accused / arguments.days:.2g} | {paging} | {dict(names) or '-'} | "
                f"{time.process_time() - begun:.0f} |"
            )
    print()
    heading(
        "jitter",
        "spikes",
        "days",
        "rounds",
        "extra rounds",
        "accusations",
        "a day",
        "lasting 60 s",
        "which",
        "CPU s",
    )
    print(*quiet_rows, sep="\n")
    print(
        "\nSimulated: of a real fabric this says nothing beyond what it shares with these "
        "conditions."
    )


if __name__ == "__main__":
    main()
