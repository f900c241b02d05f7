"""Turns the last samples into the findings of this moment."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from dshealthd.core.collector import Reason
from dshealthd.core.result import CollectionOutcome
from dshealthd.findings import agent, gpus, heat, host, jobs, links
from dshealthd.findings.catalogue import found, starting, unread
from dshealthd.findings.finding import ORDER, Verdict
from dshealthd.findings.series import Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.core.collector import Sample
    from dshealthd.core.snapshot import Latest, Snapshot
    from dshealthd.findings.finding import Finding, Sign

RULES = (*gpus.RULES, *heat.RULES, *links.RULES, *host.RULES, *jobs.RULES, *agent.RULES)
OF_JOBS = frozenset(
    (
        "training",
        "job_hang",
        "job_environment",
        "software",
        "nccl_ras",
        "nccl_inspector",
        "open_files",
    )
)
"""Collectors whose parts belong to users.

A part that cannot be read says nothing about the node, and a user must not be able to make a
node's state unknown.
"""
_NVML_HUNG, _NVML_FAILING = "DshealthdNvmlHung", "DshealthdNvmlFailing"


def signs(series: Series, name: str, wall: float) -> Iterator[Sign]:
    """Yield a sign for everything that is wrong at Unix time `wall`, in seconds.

    `name` is the probes' name for this node.
    """
    for rule in RULES:
        yield from rule(series, wall)
    yield from agent.accused(series, name)


def series_of(snapshot: Snapshot, own: Iterable[Sample]) -> Series:
    """Return all samples of this moment for judgement.

    `own` are the agent's own samples, including those of the probes.
    """
    return Series(
        itertools.chain(*(snapshot.samples(latest) for latest in snapshot), snapshot.health(), own)
    )


def judge(
    snapshot: Snapshot,
    series: Series,
    *,
    node: str,
    name: str,
    monotonic: float,
    wall: float,
) -> Verdict:
    """Return what is wrong with this node, and what could not be checked.

    `series` comes from `series_of`; `node` is the host's name, `name` the probes' name for it
    (empty where they do not run). `monotonic` is the snapshot's clock and `wall` the Unix time,
    both in seconds.
    """
    common = {"node": node, "instance": node}
    query = functools.partial(series.query, wall=wall)
    seen: dict[tuple[str, str, str], Finding] = {}
    for sign in signs(series, name, wall):
        finding = found(sign, common, query)
        seen.setdefault(finding.key, finding)
    parts = {finding.part.lower() for finding in seen.values()}
    alerts = {finding.alert for finding in seen.values()}
    if pending := tuple(latest.name for latest in snapshot if latest.sampled is None):
        late = starting(pending, node)
        seen[late.key] = late
    for latest in snapshot:
        for finding in _unread(latest, monotonic, node, parts, alerts):
            seen.setdefault(finding.key, finding)
    return Verdict(tuple(sorted(seen.values(), key=lambda one: -ORDER.index(one.severity))))


def _unread(
    latest: Latest, now: float, node: str, parts: set[str], alerts: set[str]
) -> Iterator[Finding]:
    """Yield findings for what a collector could not read, unless a finding covers it already."""
    if latest.sampled is None:
        return
    result = latest.result
    if latest.expired(now):
        yield unread(
            latest.name, "", Reason.EXPIRED, f"no sample for {now - latest.sampled:.0f} s", node
        )
    elif result.outcome is CollectionOutcome.ERROR and result.reason is not None:
        broken = _NVML_HUNG if result.reason in gpus.HUNG else _NVML_FAILING
        of_nvml = latest.name in gpus.NVML and broken in alerts
        if not of_nvml:
            detail = f"{words(result.reason)}: {result.detail}"
            yield unread(latest.name, "", result.reason, detail, node)
    if latest.name in OF_JOBS:
        return
    for fault in result.faults:
        told = fault.reason in gpus.HUNG and latest.name in gpus.NVML and _NVML_HUNG in alerts
        if not told and not fault.of_job and fault.part.lower() not in parts:
            detail = f"{words(fault.reason)}: {fault.detail}"
            yield unread(latest.name, fault.part, fault.reason, detail, node)


def words(reason: Reason | str) -> str:
    """Return a reason's slug as words."""
    return str(reason).replace("_", " ")
