"""Turns the last samples into the findings of this moment."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.collector import Reason, Sample, reason_in_words
from dshealthd.core.result import CollectionOutcome
from dshealthd.findings import (
    agent,
    catalogue,
    coverage,
    fabric,
    gpu_links,
    gpus,
    heat,
    host,
    idleness,
    jobs,
    settings,
    slowness,
    stalls,
    storage,
    unused,
)
from dshealthd.findings.catalogue import starting_finding, unread
from dshealthd.findings.finding import Finding, Sign, State, Verdict
from dshealthd.findings.series import DEFAULTS, Series
from dshealthd.findings.users import Users

if TYPE_CHECKING:
    from dshealthd.core.snapshot import Latest, Snapshot
    from dshealthd.findings.limits import Limits
    from dshealthd.findings.past import Past
    from dshealthd.jobs.hangs.judge import Standstill

    Key = tuple[str, str, str, str]

RULES = (
    *gpus.RULES,
    *heat.RULES,
    *gpu_links.RULES,
    *fabric.RULES,
    *host.RULES,
    *storage.RULES,
    *idleness.RULES,  # before the next, which see less of the same job
    *stalls.RULES,
    *jobs.RULES,
    *slowness.RULES,
    *settings.RULES,
    *coverage.RULES,
    *unused.RULES,
    *agent.RULES,
)
_OF_NVML = frozenset(("DshealthdNvmlBroken", "DshealthdGpusUnwatched"))
"""Findings that cover what collectors could not read from NVML."""


class Judgement(NamedTuple):
    """What one look at a node shows."""

    found: dict[Key, Finding]
    """By key."""
    failed: Mapping[str, str]
    """The rules that ended by a defect, and the traceback of each."""


def seen(series: Series, *, node: str, name: str, wall: float) -> Judgement:
    """Return what `series` shows to be wrong, whichever rules fail.

    `node` is the host's name, `name` the probes' name for it (empty where they do not run), `wall`
    the Unix time in seconds.
    """
    users = Users(series)
    found: dict[Key, Finding] = {}
    failed = {}
    for rule in (*RULES, functools.partial(agent.suspects_here, name=name)):
        signs = rule(series, wall)
        while True:
            try:
                if (sign := next(signs, None)) is None:
                    break
                finding = catalogue.finding_of(sign, node, series.limits, rule_name(rule))
                if finding.severity is State.CRITICAL and not finding.training_job:
                    finding = dataclasses.replace(finding, training_job=users.of(sign))
            except Exception:  # noqa: BLE001 - a defect in one rule must not hide what others see
                failed[rule_name(rule)] = traceback.format_exc()
            else:
                found.setdefault(finding.key, finding)
    return Judgement(found, failed)


def rule_name(rule: Callable[..., Iterator[Sign]]) -> str:
    """Return the name of a rule, as its failure is told: `jobs.hangs`."""
    own = getattr(rule, "func", rule)
    return f"{own.__module__.rpartition('.')[2]}.{own.__name__}"


def judgement_of(
    snapshot: Snapshot,
    series: Series,
    *,
    node: str,
    name: str,
    monotonic: float,
    wall: float,
    shown: Callable[[Finding], bool] = lambda _finding: True,
) -> Judgement:
    """Return what is wrong with this node at this moment, and what cannot be checked.

    `series` has all samples; `monotonic` is the snapshot's clock in seconds; `shown` says whether a
    sign is a finding by now, and not held back any more: until then it does not stand for what
    could not be read. The others are as `seen` takes them.
    """
    found, failed = seen(series, node=node, name=name, wall=wall)
    parts = {finding.part.lower() for finding in found.values() if shown(finding)}
    alerts = {finding.alert for finding in found.values() if shown(finding)}
    for rule in failed:
        why = "a defect has ended this rule, whose findings stay as they were; the log has it"
        broken = unread("findings", f"the rule {rule}", Reason.INTERNAL, why, node)
        found[broken.key] = dataclasses.replace(broken, origins=(rule,))
    if why := unready(snapshot):
        late = starting_finding(why, pending(snapshot), node)
        found[late.key] = late
    for latest in snapshot:
        for finding in _unread(latest, monotonic, node, parts, alerts):
            found.setdefault(finding.key, finding)
    return Judgement(found, failed)


def pending(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the collectors that have no result yet."""
    return tuple(latest.name for latest in snapshot if latest.sampled is None)


def unready(snapshot: Snapshot) -> str:
    """Return why nothing follows from the samples yet, empty once each source has had a result: one
    that hangs or fails has one, too, which says so.
    """
    if not any(True for _ in snapshot):
        return "no collector runs"
    return f"no result yet: {', '.join(names)}" if (names := pending(snapshot)) else ""


def series_of(
    snapshot: Snapshot,
    own: Iterable[Sample],
    limits: Limits = DEFAULTS,
    past: Past | None = None,
    now: float = 0.0,
    standstills: Mapping[str, Standstill] = MappingProxyType({}),
) -> Series:
    """Return all samples of this moment for judgement.

    `own` are the agent's own samples, including those of the probes; the others as `Series` takes
    them.
    """
    return Series(
        itertools.chain(*(snapshot.samples(latest) for latest in snapshot), snapshot.health(), own),
        limits,
        past,
        now,
        standstills,
    )


def judge(
    snapshot: Snapshot, series: Series, *, node: str, name: str, monotonic: float, wall: float
) -> Verdict:
    """Return what a single look at this node shows, without a memory: holds do not count."""
    return Verdict.of(
        judgement_of(
            snapshot, series, node=node, name=name, monotonic=monotonic, wall=wall
        ).found.values()
    )


def _unread(
    latest: Latest, now: float, node: str, parts: set[str], alerts: set[str]
) -> Iterator[Finding]:
    """Yield findings for what a collector could not read, unless a finding covers it already."""
    result = latest.result
    if latest.sampled is not None and latest.expired(now):
        yield unread(
            latest.name, "", Reason.EXPIRED, f"no sample for {now - latest.sampled:.0f} s", node
        )
    elif result.outcome is CollectionOutcome.ERROR and result.reason is not None:
        told = latest.name in gpus.NVML and not _OF_NVML.isdisjoint(alerts)
        # Every path that a source reads may have a finding of its own.
        told |= bool(result.faults) and all(each.part.lower() in parts for each in result.faults)
        if not told:
            detail = f"{reason_in_words(result.reason)}: {result.detail}"
            yield unread(latest.name, "", result.reason, detail, node)
    for fault in result.faults:
        hung = fault.reason in gpus.HUNG and latest.name in gpus.NVML
        told = hung and "DshealthdNvmlBroken" in alerts
        if not told and not fault.of_job and fault.part.lower() not in parts:
            detail = f"{reason_in_words(fault.reason)}: {fault.detail}"
            yield unread(latest.name, fault.part, fault.reason, detail, node)
