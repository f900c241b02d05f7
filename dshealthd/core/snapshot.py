"""The snapshot: the last result of every collector, read by scrapes and the page.

Nothing here touches hardware.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dshealthd.core.collector import Fault, Reason, Sample, counter, gauge
from dshealthd.core.exposition import Renderer, Tier, verdict_chooser
from dshealthd.core.result import CollectionOutcome, CollectionResult, not_available

AVAILABLE = gauge(
    "dshealthd_collector_available",
    "1 if this machine has the collector's source, 0 if it does not.",
    "collector",
)
UP = gauge(
    "dshealthd_collector_up",
    "1 if the last collection read its source, 0 if it failed; absent where the source is "
    "not available.",
    "collector",
)
FAILING = gauge(
    "dshealthd_collector_failing",
    "1 while the collection, or a part of it that does not belong to a job, fails for this reason.",
    "collector",
    "reason",
)
DURATION = gauge(
    "dshealthd_collector_duration_seconds", "How long the last collection took.", "collector"
)
LAST_SUCCESS = gauge(
    "dshealthd_collector_last_success_timestamp_seconds",
    "Unix time of the last collection that read its source.",
    "collector",
)
ERRORS = counter(
    "dshealthd_collector_errors_total",
    "Collections that failed, and parts (a device, a port, a path) that could not be read.",
    "collector",
    "reason",
)


@dataclass(slots=True)
class Latest:
    """The last result of one collector and its history since the agent started."""

    name: str
    expires_after: float
    """Seconds after which samples are stale, whatever the collector does."""
    result: CollectionResult = field(default_factory=lambda: not_available("not sampled yet"))
    sampled: float | None = None
    """Monotonic time of the last result, in seconds; None before the first."""
    last_success: float | None = None
    """Unix time of the last success, in seconds."""
    errors: Counter[Reason] = field(default_factory=Counter)
    renderers: defaultdict[Tier, Renderer] = field(default_factory=lambda: defaultdict(Renderer))
    """Renderers of the samples, for the tiers that scrapes have requested."""
    texts: dict[Tier, bytes] = field(default_factory=dict)
    """The samples of this result as encoded text, for the same ones."""

    def expired(self, now: float) -> bool:
        """Return whether the collector's last samples are too old to be shown."""
        return (
            self.sampled is not None
            and self.result.outcome is CollectionOutcome.OK
            and now - self.sampled > self.expires_after
        )

    def text(self, tier: Tier) -> bytes:
        """Return the samples of a tier as encoded text; a result is rendered once for each."""
        if tier not in self.texts:
            text = self.renderers[tier].render(_of(tier, self.result.samples))
            self.texts[tier] = text.encode()
        return self.texts[tier]

    def reasons(self, now: float) -> dict[Reason, Fault | None]:
        """Return why the last collection or parts of it failed.

        The value is the first fault with that reason, or None if the whole collection failed.
        Parts that are a job's own are left out: its user could keep the collector failing.
        """
        reasons: dict[Reason, Fault | None] = {}
        if self.expired(now):
            reasons[Reason.EXPIRED] = None
        if self.result.reason is not None:
            reasons[self.result.reason] = None
        for fault in self.result.faults:
            if not fault.of_job:
                reasons.setdefault(fault.reason, fault)
        return reasons


def _content(result: CollectionResult) -> tuple[object, ...]:
    return result.outcome, result.samples, result.faults, result.reason


def _of(tier: Tier, samples: Iterable[Sample]) -> Iterable[Sample]:
    return samples if tier is Tier.ALL else filter(verdict_chooser(), samples)


class Snapshot:
    """Holds one `Latest` per collector and renders them as text.

    A scrape of unchanged results is one cached string.
    """

    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], float]) -> None:
        """Start empty; `monotonic` and `wall` are clocks in seconds."""
        self._monotonic = monotonic
        self._wall = wall
        self._latest: dict[str, Latest] = {}
        """By name, in the order of the names."""
        self._renderers: defaultdict[Tier, Renderer] = defaultdict(Renderer)
        self._body: dict[Tier, bytes] = {}
        self._fresh_until = 0.0
        self.on_change: Callable[[], object] = lambda: None
        """Called in the loop when a result says something else than the one before it."""
        self.on_result: dict[str, Callable[[], object]] = {}
        """What to call in the loop when a collector has a result, by its name."""

    def __iter__(self) -> Iterator[Latest]:
        return iter(self._latest.values())

    def __getitem__(self, name: str) -> Latest:
        """Return one collector's latest result."""
        return self._latest[name]

    def get(self, name: str) -> Latest | None:
        """Return a collector's latest result; None if it does not run."""
        return self._latest.get(name)

    def expect(self, name: str, expires_after: float) -> None:
        """Add a collector to the snapshot; one that is already known keeps its history."""
        if name not in self._latest:
            added = {name: Latest(name, expires_after)}
            self._latest = dict(sorted({**self._latest, **added}.items()))
        self._latest[name].expires_after = expires_after
        self._body.clear()

    def forget(self, name: str) -> None:
        """Remove a collector from the snapshot."""
        self._latest.pop(name, None)
        self._body.clear()

    def put(self, name: str, result: CollectionResult) -> None:
        """Replace a collector's result in the snapshot, and count its failures."""
        latest = self._latest[name]
        before, latest.result = latest.result, result
        latest.sampled = self._monotonic()
        if result.outcome is CollectionOutcome.OK:
            latest.last_success = self._wall()
        if result.reason is not None:
            latest.errors[result.reason] += 1
        latest.errors.update(fault.reason for fault in result.faults)
        self._body.clear()
        if before.samples != result.samples:  # most of those read every 15 s stay for days
            latest.texts.clear()
        if _content(before) != _content(result):
            self.on_change()
        if (call := self.on_result.get(name)) is not None:
            call()

    def complete(self) -> bool:
        """Return whether the snapshot has a result of every collector."""
        return all(latest.sampled is not None for latest in self._latest.values())

    def samples(self, latest: Latest) -> tuple[Sample, ...]:
        """Return a collector's current samples; none if they have expired."""
        return () if latest.expired(self._monotonic()) else latest.result.samples

    def body(self, extra: Callable[[], Iterable[Sample]], tier: Tier = Tier.ALL) -> bytes:
        """Return the whole exposition of a tier; `extra` returns the agent's own samples."""
        now = self._monotonic()
        if now > self._fresh_until:
            self._body.clear()
        if tier not in self._body:
            own = self._renderers[tier]
            parts = [own.render(_of(tier, (*self.health(now), *extra()))).encode()]
            until = []
            for latest in self:
                if latest.sampled is not None and not latest.expired(now):
                    parts.append(latest.text(tier))
                    until.append(latest.sampled + latest.expires_after)
            self._body[tier] = b"".join(parts)
            # The cache is valid only until the first result in it expires.
            self._fresh_until = min(until, default=now)
        return self._body[tier]

    def health(self, now: float | None = None) -> Iterator[Sample]:
        """Yield the samples about the collectors themselves, at monotonic `now` or at present."""
        if now is None:
            now = self._monotonic()
        for latest in self:
            if latest.sampled is None:
                continue
            outcome = latest.result.outcome
            available = outcome is not CollectionOutcome.NOT_AVAILABLE
            yield AVAILABLE(float(available), latest.name)
            if available:
                up = outcome is CollectionOutcome.OK and not latest.expired(now)
                yield UP(float(up), latest.name)
                yield DURATION(latest.result.duration, latest.name)
            for reason in latest.reasons(now):
                yield FAILING(1.0, latest.name, reason)
            if latest.last_success is not None:
                yield LAST_SUCCESS(latest.last_success, latest.name)
            for reason, count in latest.errors.items():
                yield ERRORS(float(count), latest.name, reason)
