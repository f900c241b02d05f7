"""The summary of a bundle of evidence: the page to read first, at night, to find the culprit."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import printable

if TYPE_CHECKING:
    from dshealthd.evidence.findings import CollectedEvidence, RankEvidence

COUNTED = re.compile(
    r"dshealthd_(?:gpu|nvlink|infiniband|pcie|xid|sxid|kernel_events|network|tcp)_\w+"
)
"""Metric families of GPUs, fabric and kernel."""
MAX_LINES = 60
"""Most lines of a section; of ranks there are at most `MAX_RANKS`."""
_WIDTH = 300
FILES = (
    ("rank-R-PID.stacks.txt", "Python stacks"),
    ("rank-R-PID.kernel.txt", "threads of the rank as the kernel sees them"),
    (
        "rank-R-PID.flight-recorder.pickle",
        (
            "dump of PyTorch's flight recorder, as the rank wrote it: never unpickle it with "
            "plain Python"
        ),
    ),
    ("rank-R-PID.flight-recorder.json", "last collectives in that dump"),
    ("explain.txt", "failures found in the ranks' logs, with the lines that prove them"),
    ("nccl-ras-1.json, -2.json", "two NCCL RAS answers, some seconds apart"),
    ("kernel-log.txt", "kernel lines of the last 15 minutes"),
    ("metrics-before.prom, -after.prom", "all metrics of the agent, at start and end"),
    ("probes.json", "state of the probes and their last rounds"),
)


def changed_metrics(before: str, after: str) -> list[str]:
    """Return the changes of GPU, fabric and kernel metrics between two expositions.

    One line per series, a bounded number of them.
    """
    earlier = parse(before)
    lines = []
    for name, value in sorted(parse(after).items()):
        old = earlier.get(name)
        if old is not None and old != value:
            risen = name.partition("{")[0].endswith("_total")
            lines.append(f"{name} {old:g} -> {value:g}" + f" (+{value - old:g})" * risen)
    return _shortened(lines, MAX_LINES)


def _shortened(lines: list[str], most: int) -> list[str]:
    """Return the first lines, and how many more there are."""
    rest = len(lines) - most
    return lines[:most] + ([f"and {rest} more"] if rest > 0 else [])


def parse(exposition: str) -> dict[str, float]:
    """Return the values of GPU, fabric and kernel metrics by their series, as the agent writes
    it.
    """
    found: dict[str, float] = {}
    for line in exposition.split("\n"):
        if COUNTED.match(line):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError, ArithmeticError):
                found[name] = float(value)
    return found


def write(findings: CollectedEvidence) -> str:
    """Return the text of a bundle's summary."""
    return "\n".join(printable(line)[:_WIDTH] for line in _lines(findings)) + "\n"


def _lines(findings: CollectedEvidence) -> Iterator[str]:
    case = findings.case
    what = "requested by hand" if case.reason == "requested" else f"hung, cause: {case.reason}"
    yield f"{case.job or 'all jobs'} on {findings.node}: {what}"
    duration = f", in {findings.seconds:.0f} s" if findings.finished else ""
    yield f"taken   {_time(findings.begun)}{duration}"
    if case.since is not None:
        yield (
            f"since   {_time(case.since)}: no progress for {findings.begun - case.since:.0f} "
            "s when taken"
        )
    if not findings.finished:
        yield (
            "THE COLLECTION HAS NOT ENDED: it is running or was killed; the files hold what "
            "was collected so far"
        )
    yield from _section("What shows the cause", _blame(findings))
    ranks = [_rank(findings, rank) for rank in findings.ranks]
    number = len(ranks) if ranks or findings.finished else "not known yet"
    yield from _section(f"Ranks on this node: {number}", ranks)
    moved = findings.moved or ["none" if findings.interval else "unknown"]
    changed = f"GPU, fabric and kernel metrics that changed within {findings.interval:.0f} s"
    yield from _section(changed, moved)
    known = findings.rounds
    rounds = ["unknown"] if known is None else [_round(entry) for entry in known[-MAX_LINES:]]
    yield from _section("Probe rounds of the last hour", rounds or ["none"])
    missing = [
        *findings.missing,
        *(_problem(rank, name) for rank in findings.ranks for name in rank.problems),
    ]
    nothing = "nothing" if findings.finished else "not known yet"
    yield from _section("Not collected", _shortened(missing, MAX_LINES) or [nothing])
    yield from _section("Files", (f"{name:34} {meaning}" for name, meaning in FILES))


def _stopped(findings: CollectedEvidence) -> Iterator[str]:
    """Yield a line for each rank that is stopped by a signal and not already named a culprit.

    Nothing else shows this in a job without heartbeats: such a rank writes no dump, and its peers'
    dumps say only that all of them have entered.
    """
    named = {rank for rank, _ in findings.case.culprits}
    for rank in findings.ranks:
        state = rank.facts.get("kernel", {}).get("state")
        if state == "stopped" and rank.rank not in named:
            yield f"rank {rank.rank} (pid {rank.pid}): its process is stopped by a signal"


def _blame(findings: CollectedEvidence) -> Iterator[str]:
    """Yield what shows whom the other ranks wait for, the most reliable first."""
    if findings.case.explanation:
        yield f"cause: {findings.case.explanation}"
    shown = [
        *(f"rank {rank} {why}" for rank, why in findings.case.culprits),
        *_stopped(findings),
        *findings.logs,
        *findings.collectives,
        *_by_ras(findings.ras),
        *_by_steps(findings),
        *_moving(findings),
    ]
    unknown = (
        "no cause found on this node; see the bundles of the job's other nodes, and the probes' "
        "suspects"
    )
    yield from shown or [unknown if findings.finished else "not known yet"]


def _by_ras(ras: Mapping[str, Any] | None) -> Iterator[str]:
    if ras is None:
        return
    for number, host, gpu, what in ras["troubles"]:
        yield f"NCCL RAS: {_who(number, host, gpu)} is {what}"
    for number, host, gpu, operation, behind in ras["behind"]:
        yield (
            f"NCCL RAS: {_who(number, host, gpu)} is {behind} {operation} behind the furthest rank"
        )
    if not ras["troubles"] and not ras["behind"]:
        still = (
            "nothing was launched between two answers"
            if ras["idle"]
            else "counts have moved, or cannot be compared"
        )
        yield (
            f"NCCL RAS (NCCL {ras['version'] or 'of unknown version'}): all ranks answer and "
            f"none is behind; {still}"
        )


def _who(number: str, host: str, gpu: str) -> str:
    return (
        f"rank {number or '?'}" + (f" on {host}" if host else "") + (f" GPU {gpu}" if gpu else "")
    )


def _by_steps(findings: CollectedEvidence) -> Iterator[str]:
    """Show the steps that the heartbeats report; which ranks are the culprits takes all ranks."""
    here = {rank.job for rank in findings.ranks}
    for job in findings.jobs:
        steps: dict[int, list[str]] = {}
        for rank in job["ranks"] if job["job"] in here else ():
            if rank["step"] is not None:
                steps.setdefault(rank["step"], []).append(str(rank["rank"]))
        if len(steps) > 1:
            by_step = (f"step {step}: rank {', '.join(steps[step])}" for step in sorted(steps))
            yield f"heartbeats of {job['job']}, ranks here only: {'; '.join(by_step)}"


def _moving(findings: CollectedEvidence) -> Iterator[str]:
    """Yield a line for each job that the agent finds not hung, if evidence was requested."""
    if findings.case.reason != "requested":
        return
    for job in findings.jobs:
        heard = [rank["heartbeat"] for rank in job["ranks"] if rank.get("heartbeat") is not None]
        steps = [rank["step"] for rank in job["ranks"] if rank["step"] is not None]
        if job["hang"] or not steps or not heard or findings.case.job not in {"", job["job"]}:
            continue
        ago = max(0.0, findings.begun - max(heard))
        yield f"{job['job']} is not hung: step {max(steps)}, last progress {ago:.0f} s ago"


def _rank(findings: CollectedEvidence, rank: RankEvidence) -> str:
    sent: Mapping[str, Any] = next(
        (
            sent
            for job in findings.jobs
            for sent in job["ranks"]
            if (job["job"], sent["rank"]) == (rank.job, rank.rank)
        ),
        {},
    )
    step, heard = sent.get("step"), sent.get("heartbeat")
    kernel, stacks, recorder = (
        rank.facts.get(name) or {} for name in ("kernel", "stacks", "recorder")
    )
    cpu = kernel.get("cpu")
    parts = [
        f"rank {rank.rank}" + ("" if findings.case.job else f" of {rank.job}"),
        findings.node,
        f"pid {rank.pid}",
        f"step {step}" if step is not None else "step unknown",
        "/".join(filter(None, (sent.get("phase"), sent.get("stage")))) or "stage unknown",
        f"heartbeat {findings.begun - heard:.0f} s ago" if heard is not None else "",
        f"{kernel.get('state', 'state unknown')}"
        + (f" in {kernel['waits']}" if kernel.get("waits") else ""),
        f"CPU {cpu:.0%}" if cpu is not None else "",
        f"Python at {stacks['at']}" if stacks else "Python stack unknown",
        f"in {stacks['in']}" if stacks.get("in") else "",
        f"flight recorder {recorder['note']}" if recorder.get("note") else "",
    ]
    return ", ".join(filter(None, parts))


def _problem(rank: RankEvidence, name: str) -> str:
    names = {
        "kernel": "the kernel's view",
        "stacks": "Python stacks",
        "recorder": "flight recorder",
        "digest": "contents of its dump",
    }
    return f"rank {rank.rank} (pid {rank.pid}), {names.get(name, name)}: {rank.problems[name]}"


def _round(entry: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value}"
        for name, value in entry.items()
        if isinstance(value, str | int | float) and value != ""
    )


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from ("", title)
    for line in lines:
        yield f"  {line}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
