"""The probes' metrics: counts and timings of rounds, and the last rounds for the status page."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from dshealthd.core.collector import Buckets, Sample, counter, gauge, histogram
from dshealthd.linux.starvation import STARVED
from dshealthd.probe.observation import Outcome, RoundKind, Suspect, Timing, slowest
from dshealthd.probe.peers.protocol import Rejection
from dshealthd.probe.rounds.active_round import DISAGREEMENTS, RoundReport
from dshealthd.probe.rounds.plan import PAYLOAD
from dshealthd.probe.workers.job import BANDWIDTH as LARGE
from dshealthd.probe.workers.job import GLOO_BANDWIDTH, LATENCY, Checksum, RankResult

ROUNDS = counter(
    "dshealthd_probe_rounds_total",
    "Probe rounds that this node led or took part in, by outcome.",
    "kind",
    "outcome",
)
SKIPS = counter(
    "dshealthd_probe_skips_total",
    "Rounds that were due to use GPUs but did not, by reason; most ran as light rounds instead.",
    "reason",
)
STARVED_ROUNDS = counter(
    "dshealthd_probe_starved_rounds_total",
    "Inconclusive rounds: a member got too little CPU to decide which member was late.",
)
UNTIMED_ROUNDS = counter(
    "dshealthd_probe_untimed_rounds_total",
    "Successful light rounds led by this node whose time is unusable, because an agent waited "
    "for a CPU.",
)
DURATION = histogram(
    "dshealthd_probe_duration_seconds", "Duration of a round from invitation to conclusion.", "kind"
)
BANDWIDTH = gauge(
    "dshealthd_probe_bus_bandwidth_bytes_per_second",
    "Bus bandwidth, as defined by nccl-tests, of the slowest part in the last round with this "
    "operation. size: payload bytes.",
    *("kind", "backend", "op", "size"),
)
OPERATION = gauge(
    "dshealthd_probe_operation_seconds",
    "Median time of the slowest part in the last round with this operation. size: payload bytes.",
    *("kind", "backend", "op", "size"),
)
ROUND_TRIP = gauge(
    "dshealthd_probe_round_trip_seconds",
    "Round-trip time of an echo between agents, over the last light rounds led by this node.",
    "statistic",
)
CLOCK_OFFSET = gauge(
    "dshealthd_probe_clock_offset_seconds",
    "How far the clocks of recently met peers are ahead of this node's; if most agree, the "
    "median is this node's clock error.",
    "statistic",
)
DISAGREES = gauge(
    "dshealthd_probe_peer_disagrees",
    "1 if no round with this member was possible, last time, because the two nodes differ in "
    "clock, key, member list, names or version, or its name is unknown here.",
    *("peer", "reason"),
)
SUSPECT = gauge(
    "dshealthd_suspect",
    "1 while this agent suspects a node, gpu, nic, link or leaf. component is NODE, NODE/PART, "
    "NODE--NODE or the leaf's name.",
    *("kind", "component", "reason"),
)
CHECKSUM = gauge(
    "dshealthd_probe_checksum",
    "Checksum of matrix products with fixed operands, from the last round among this node's "
    "GPUs. It must be equal on all GPUs with the same label library (GPU model, driver, torch "
    "and cuBLAS). Absent if the library does not guarantee bit-identical results.",
    "gpu",
    "library",
)
LAST = gauge(
    "dshealthd_probe_last_round_timestamp_seconds",
    "Unix time of the end of the last round.",
    "kind",
)
MEMBER = gauge(
    "dshealthd_probe_member_hash",
    '48-bit hash of a member\'s name: this node (of="self"), or the peer of the last '
    'successful round (of="met"). Rules use it to tell that an unscraped node is up.',
    "of",
)

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LAST_ROUNDS = 20
SIZES = frozenset({0, len(PAYLOAD), *(size for size, _ in LATENCY + LARGE + GLOO_BANDWIDTH)})
"""Payload bytes of scheduled rounds between nodes; those of other rounds, which people and other
members choose, are no series.
"""
LATEST = 32
"""Round-trip times, clock offsets and disagreements kept for their metrics."""


class RoundMetrics:
    """Metrics of all rounds that this node has seen."""

    def __init__(self) -> None:
        self.rounds: deque[dict[str, Any]] = deque(maxlen=LAST_ROUNDS)
        """The last rounds in status-document form, newest last."""
        self._ended: Counter[tuple[str, str]] = Counter()
        self._skips: Counter[str] = Counter()
        self._starved = self._untimed = 0
        self._durations: dict[str, Buckets] = {}
        self._timings: dict[tuple[str, str, str, str], Timing] = {}
        self._trips: deque[float] = deque(maxlen=LATEST)
        self._offsets: OrderedDict[str, float] = OrderedDict()
        self._disagreeing: OrderedDict[str, str] = OrderedDict()
        self._last: dict[str, float] = {}
        self._met = ""
        self._checksums: dict[str, Checksum] = {}

    def skip(self, reason: str) -> None:
        """Count a round that was not run as planned, by reason."""
        self._skips[reason] += 1
        self._met = ""

    def add(self, report: RoundReport, me: str) -> None:
        """Add a round to the metrics."""
        observation = report.observation
        kind = str(observation.kind)
        self._ended[kind, str(observation.outcome)] += 1
        self._starved += observation.reason == STARVED
        self._untimed += (
            report.led
            and observation.kind is RoundKind.LIGHT
            and observation.outcome is Outcome.OK
            and not observation.timings
        )
        if (
            observation.kind is RoundKind.LIGHT
            and observation.reason
            and observation.outcome in {Outcome.OK, Outcome.DECLINED}
        ):
            self.skip(observation.reason)
        self._durations.setdefault(kind, Buckets(BOUNDS)).observe(report.seconds)
        self._last[kind] = observation.at
        for timing in slowest(observation.timings, "op", "size"):
            if timing.size in SIZES or observation.kind is RoundKind.LOCAL:
                labels = kind, str(observation.backend), timing.op, str(timing.size)
                self._timings[labels] = timing
            if observation.kind is RoundKind.LIGHT and timing.size == 0 and report.led:
                self._trips.append(timing.seconds)
        peer = next((name for name in observation.members if name != me), "")
        if peer:
            self._met = peer if observation.outcome is Outcome.OK else ""
        if report.offset is not None:
            _put_latest(self._offsets, peer, report.offset)
        unauthorized = observation.outcome is Outcome.UNAUTHORIZED
        differs = Rejection.KEY if unauthorized else observation.reason
        if observation.outcome is not Outcome.OK and differs in DISAGREEMENTS:
            _put_latest(self._disagreeing, peer, differs)
        elif observation.outcome is Outcome.OK:
            self._disagreeing.pop(peer, None)
        self.rounds.append(_entry(report, peer))

    def record_checksums(self, results: Iterable[RankResult]) -> None:
        """Replace the checksum metrics by those of a round among this node's GPUs."""
        self._checksums = {
            result.part: result.checksum for result in results if result.checksum is not None
        }

    def forget(self, names: Iterable[str]) -> None:
        """Drop the metrics of members that are not in `names`."""
        kept = set(names)
        for store in (self._offsets, self._disagreeing):
            for name in [name for name in store if name not in kept]:
                del store[name]

    def samples(self, suspects: Iterable[Suspect], me: str = "") -> Iterator[Sample]:
        """Yield the metrics of rounds; `me` is empty while no rounds can run."""
        for of, name in (("self", me), ("met", me and self._met)):
            if name:
                digest = hashlib.blake2b(name.encode(), digest_size=6).digest()
                yield MEMBER(float(int.from_bytes(digest)), of)
        for (kind, outcome), count in self._ended.items():
            yield ROUNDS(float(count), kind, outcome)
        for reason, count in self._skips.items():
            yield SKIPS(float(count), reason)
        yield STARVED_ROUNDS(float(self._starved))
        yield UNTIMED_ROUNDS(float(self._untimed))
        for kind, buckets in self._durations.items():
            yield from buckets.samples(DURATION, kind)
        for labels, timing in self._timings.items():
            if timing.bus_bandwidth:
                yield BANDWIDTH(timing.bus_bandwidth, *labels)
        for labels, timing in self._timings.items():
            yield OPERATION(timing.seconds, *labels)
        for metric, values in ((ROUND_TRIP, self._trips), (CLOCK_OFFSET, self._offsets.values())):
            if values:
                yield metric(min(values), "min")
                yield metric(statistics.median(values), "median")
                yield metric(max(values), "max")
        for peer, reason in self._disagreeing.items():
            yield DISAGREES(1.0, peer, reason)
        for suspect in suspects:
            yield SUSPECT(1.0, suspect.part, suspect.component, suspect.reason)
        for part, checksum in self._checksums.items():
            yield CHECKSUM(float(checksum.number), part, checksum.library)
        for kind, at in self._last.items():
            yield LAST(at, kind)


def _put_latest(store: OrderedDict[Any, Any], peer: str, value: object) -> None:
    """Put a peer's value into a dict of the metrics, which keeps the last `LATEST` peers."""
    store[peer] = value
    store.move_to_end(peer)
    while len(store) > LATEST:
        store.popitem(last=False)


def _entry(report: RoundReport, peer: str) -> dict[str, Any]:
    seen = report.observation
    return {
        "time": round(seen.at, 3),
        "epoch": seen.epoch if seen.epoch >= 0 else None,
        "kind": seen.kind,
        "backend": seen.backend,
        "members": list(seen.members),
        "led": report.led,
        "outcome": seen.outcome,
        "stage": seen.stage,
        "reason": seen.reason,
        "late": list(seen.late),
        "seconds": round(report.seconds, 4),
        "timings": list(map(asdict, seen.timings)),
        "clock_offset_seconds": {} if report.offset is None else {peer: round(report.offset, 6)},
    }
