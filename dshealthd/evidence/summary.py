"""The summary of a bundle of evidence: the page to read first, at night, to find the culprit."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from dshealthd.core.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.evidence.findings import CollectedEvidence, RankEvidence

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
Series: TypeAlias = "dict[str, dict[Labels, float]]"

_LINE = re.compile(
    r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)$', re.MULTILINE
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
COUNTED = re.compile(
    r"dshealthd_(gpu|nvlink|infiniband|pcie|xid|sxid|kernel_events|network|tcp)_\w+"
)
"""Metric families of GPUs, fabric and kernel."""
MAX_MOVED = 60


def parse(text: str) -> Series:
    """Return the series of an exposition in Prometheus' text format; other lines are skipped."""
    found: Series = {}
    for name, labels, value in _LINE.findall(text):
        try:
            found.setdefault(name, {})[tuple(_LABEL.findall(labels))] = float(value)
        except (ValueError, ArithmeticError):
            continue
    return found


def of_job(series: Series, name: str, job: str) -> dict[str, float]:
    """Return a job's values of a metric by rank; the largest if a rank has several series."""
    found: dict[str, float] = {}
    for labels, value in series.get(name, {}).items():
        known = dict(labels)
        if known.get("training_job") == job and "rank" in known:
            found[known["rank"]] = max(value, found.get(known["rank"], value))
    return found


def chosen(series: Series, name: str, job: str, label: str) -> dict[str, str]:
    """Return by rank the value of the label for which a metric of the job is 1."""
    found: dict[str, str] = {}
    for labels, value in series.get(name, {}).items():
        known = dict(labels)
        if value == 1 and known.get("training_job") == job and "rank" in known:
            found[known["rank"]] = known.get(label, "")
    return found


def moved(before: Series, after: Series) -> list[str]:
    """Return the changes of GPU, fabric and kernel metrics between two expositions.

    One line per series, a bounded number of them.
    """
    lines = []
    for name, values in sorted(after.items()):
        if not COUNTED.fullmatch(name):
            continue
        for labels, value in values.items():
            old = before.get(name, {}).get(labels)
            if old is not None and old != value:
                shown = ",".join(f'{label}="{of}"' for label, of in labels)
                where = f"{name}{{{shown}}}" if labels else name
                lines.append(
                    f"{where} {old:g} -> {value:g}"
                    + (f" (+{value - old:g})" if name.endswith("_total") else "")
                )
    rest = len(lines) - MAX_MOVED
    return lines[:MAX_MOVED] + ([f"and {rest} more"] if rest > 0 else [])


MAX_RANKS = 64
MAX_ROUNDS = 20
MAX_MISSING = 40
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


def write(findings: CollectedEvidence) -> str:
    """Return the text of a bundle's summary."""
    return "\n".join(printable(line)[:_WIDTH] for line in _lines(findings)) + "\n"


def _lines(findings: CollectedEvidence) -> Iterator[str]:
    case = findings.case
    series = parse(findings.metrics)
    what = "requested by hand" if case.reason == "requested" else f"hung, cause: {case.reason}"
    yield f"{case.job or 'all jobs'} on {findings.node}: {what}"
    yield f"taken   {_time(findings.begun)}, in {findings.seconds:.0f} s"
    if case.since is not None:
        yield f"since   {_time(case.since)}: no progress for {findings.begun - case.since:.0f} s when taken"
    if not findings.finished:
        yield "THE COLLECTION HAS NOT ENDED: it is running or was killed; the files hold what was collected so far"
    yield ""
    yield "What shows the cause"
    yield from _indented(_blame(findings, series))
    yield ""
    yield f"Ranks on this node: {len(findings.ranks)}"
    yield from _indented(_rank(findings, series, rank) for rank in findings.ranks[:MAX_RANKS])
    yield ""
    yield f"GPU, fabric and kernel metrics that changed within {findings.interval:.0f} s"
    yield from _indented(findings.moved or ["none" if findings.interval else "unknown"])
    yield ""
    yield "Probe rounds of the last hour"
    yield from _indented([_round(entry) for entry in findings.rounds[-MAX_ROUNDS:]] or ["none"])
    yield ""
    yield "Not collected"
    missing = [
        *findings.missing,
        *(_problem(rank, name) for rank in findings.ranks for name in rank.problems),
    ]
    yield from _indented(
        [
            *missing[:MAX_MISSING],
            *([f"and {len(missing) - MAX_MISSING} more"] if len(missing) > MAX_MISSING else []),
        ]
        or ["nothing"]
    )
    yield ""
    yield "Files"
    yield from _indented(f"{name:34} {meaning}" for name, meaning in FILES)


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


def _blame(findings: CollectedEvidence, series: Series) -> Iterator[str]:
    """Yield what shows whom the other ranks wait for, the most reliable first."""
    if findings.case.explanation:
        yield f"cause: {findings.case.explanation}"
    found = False
    for line in (
        *(f"rank {rank} {why}" for rank, why in findings.case.culprits),
        *_stopped(findings),
        *findings.logs,
        *findings.collectives,
        *_by_ras(findings.ras),
        *_by_steps(findings, series),
    ):
        found = True
        yield line
    moving = list(_moving(findings, series))
    yield from moving
    if not found and not moving:
        yield "no cause found on this node; see the bundles of the job's other nodes, and the probes' suspects"


def _by_ras(ras: Mapping[str, Any] | None) -> Iterator[str]:
    if ras is None:
        return
    for number, host, gpu, what in ras["troubles"]:
        yield f"NCCL RAS: {_who(number, host, gpu)} is {what}"
    for number, host, gpu, operation, behind in ras["behind"]:
        yield f"NCCL RAS: {_who(number, host, gpu)} is {behind} {operation} behind the furthest rank"
    if not ras["troubles"] and not ras["behind"]:
        still = (
            "nothing was launched between two answers"
            if ras["idle"]
            else "counts have moved, or cannot be compared"
        )
        yield f"NCCL RAS (NCCL {ras['version'] or 'of unknown version'}): all ranks answer and none is behind; {still}"


def _who(number: str, host: str, gpu: str) -> str:
    return (
        f"rank {number or '?'}" + (f" on {host}" if host else "") + (f" GPU {gpu}" if gpu else "")
    )


def _by_steps(findings: CollectedEvidence, series: Series) -> Iterator[str]:
    """Show the steps that the heartbeats report; which ranks are the culprits takes all ranks."""
    for job in sorted({rank.job for rank in findings.ranks}):
        steps = of_job(series, "dshealthd_job_step", job)
        if len(set(steps.values())) > 1:
            by_step = (
                f"step {step:.0f}: rank "
                + ", ".join(sorted((rank for rank in steps if steps[rank] == step), key=int))
                for step in sorted(set(steps.values()))
            )
            yield f"heartbeats of {job}, ranks here only: {'; '.join(by_step)}"


def _moving(findings: CollectedEvidence, series: Series) -> Iterator[str]:
    """Yield a line for each job that the agent finds not hung, if evidence was requested."""
    if findings.case.reason != "requested":
        return
    for labels, hung in series.get("dshealthd_job_hang", {}).items():
        job = dict(labels).get("training_job", "")
        steps = of_job(series, "dshealthd_job_step", job)
        heard = of_job(series, "dshealthd_job_heartbeat_timestamp_seconds", job)
        if hung or not steps or not heard or findings.case.job not in {"", job}:
            continue
        ago = max(0.0, findings.begun - max(heard.values()))
        yield f"{job} is not hung: step {max(steps.values()):.0f}, last progress {ago:.0f} s ago"


def _rank(findings: CollectedEvidence, series: Series, rank: RankEvidence) -> str:
    key = str(rank.rank)
    step = of_job(series, "dshealthd_job_step", rank.job).get(key)
    doing = [
        chosen(series, f"dshealthd_job_{name}", rank.job, name).get(key, "")
        for name in ("phase", "stage")
    ]
    heard = of_job(series, "dshealthd_job_heartbeat_timestamp_seconds", rank.job).get(key)
    kernel, stacks, recorder = (
        rank.facts.get(name) or {} for name in ("kernel", "stacks", "recorder")
    )
    cpu = kernel.get("cpu")
    parts = [
        f"rank {rank.rank}" + ("" if findings.case.job else f" of {rank.job}"),
        findings.node,
        f"pid {rank.pid}",
        f"step {step:.0f}" if step is not None else "step unknown",
        "/".join(filter(None, doing)) or "stage unknown",
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


def _indented(lines: Any) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
