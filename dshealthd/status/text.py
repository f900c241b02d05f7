"""The status of a node as text for a terminal, findings first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import duration, plural, printable
from dshealthd.findings.finding import Finding, State
from dshealthd.findings.series import of_document
from dshealthd.status.jobs import job_lines

if TYPE_CHECKING:
    from dshealthd.status.paint import Paint
    from dshealthd.status.query import AgentAnswer

ROUNDS = 3
"""Probe rounds that are shown."""
_WIDTHS = (6, 7, 10, 14, 7, 0)


def node(answer: AgentAnswer, paint: Paint) -> Iterator[str]:
    """Yield the lines of one node's status."""
    state = answer.state
    yield f"{printable(answer.name)}  {paint(state, state.upper())}  {_headline(answer)}"
    if answer.problem:
        return
    document = answer.document
    for finding in document["findings"]:
        yield from _finding(finding, answer, paint)
    for sign in document["watched"]:
        seconds = document["time"] - (sign.since or document["time"])
        part, summary = printable(sign.part or "this node"), printable(sign.summary)
        hold = duration(sign.hold_seconds)
        yield f"  watched   {part}: {summary} (for {duration(seconds)}; a finding after {hold})"
    for title, lines in (
        ("GPUs", list(_gpus(document))),
        ("Links", list(_links(document))),
        (
            "Jobs",
            [
                line
                for job in document["jobs"]
                for line in job_lines(job["job"], [(answer, job)], paint)
            ],
        ),
        ("Probes", list(_probes(document.get("probe") or {}))),
        ("Left out", list(left_out(answer))),
    ):
        if lines:
            yield ""
            yield title
            yield from (f"  {line}" for line in lines)


def left_out(answer: AgentAnswer) -> Iterator[str]:
    """Yield what an agent's document lacks because it could not be built, each with its reason."""
    for one in answer.document.get("left_out", ()):
        yield f"{printable(one['part'])}: {printable(one['reason'])}"


def unseen(answer: AgentAnswer) -> int:
    """Return how many processes an agent may not inspect: they may belong to training jobs."""
    family = answer.document.get("metrics", {}).get("dshealthd_processes_unseen", {"samples": ()})
    counts = (
        sample["value"]
        for sample in family["samples"]
        if sample["labels"].get("reason") == "permission_denied"
    )
    return sum(int(count) for count in counts if isinstance(count, int | float))


def _headline(answer: AgentAnswer) -> str:
    if answer.problem:
        return printable(answer.problem)
    findings = answer.document["findings"]
    problems = sum(finding.severity is not State.UNKNOWN for finding in findings)
    starting = sum(not finding.alert for finding in findings)
    unread = len(findings) - problems - starting
    parts = [f"{plural(problems, 'problem')} found"] if problems else []
    if unread:
        parts.append(f"{plural(unread, 'source')} not readable")
    if starting:
        parts.append("not all sources read yet")
    read = sum(one["state"] == "ok" for one in answer.document["collectors"])
    so_far = " so far" if answer.document["watched"] else ""
    return ", ".join(parts) or f"healthy{so_far}, {plural(read, 'collector')} OK"


def _finding(finding: Finding, answer: AgentAnswer, paint: Paint) -> Iterator[str]:
    state = finding.severity
    since = finding.since
    facts = [] if since is None else [f"for {duration(max(0.0, answer.document['time'] - since))}"]
    facts += filter(None, [printable(finding.trend)])
    lasts = f" ({', '.join(facts)})" if facts else ""
    part = printable(finding.part or "this node")
    yield f"  {paint(state, state.upper().ljust(8))}  {part}: {printable(finding.summary)}{lasts}"
    yield f"            {printable(finding.detail)}"
    yield f"            First step: {printable(finding.first_step)}"
    yield f"            Runbook: {printable(answer.url)}{printable(finding.runbook)}"


def _gpus(document: Mapping[str, Any]) -> Iterator[str]:
    series = of_document(document)
    by_gpu = ((point.labels.get("gpu", "?"), point.value) for point in series("gpu_up"))
    for gpu, up in sorted(by_gpu, key=lambda each: (len(each[0]), each[0])):  # as numbers sort
        if not up:
            yield f"GPU {printable(gpu)}  not readable"
            continue
        used = series.value("gpu_memory_used_bytes", gpu=gpu)
        total = series.value("gpu_memory_total_bytes", gpu=gpu)
        links = [link.value for link in series("nvlink_up", gpu=gpu)]
        none = "no" if _has_read(document, "nvlink", f"GPU {gpu}") else "unknown"
        columns = (
            f"GPU {printable(gpu)}",
            _figure(series.value("gpu_temperature_celsius", gpu=gpu, sensor="core"), "°C"),
            f"{_figure(series.value('gpu_utilization_ratio', gpu=gpu), '%', 100)} busy",
            f"{_figure(used, '', 2**-30)} of {_figure(total, 'GiB', 2**-30)}",
            _figure(series.value("gpu_power_watts", gpu=gpu), "W"),
            f"{sum(links):.0f}/{plural(len(links), 'NVLink')}" if links else f"{none} NVLink",
        )
        yield "  ".join(column.rjust(width) for column, width in zip(columns, _WIDTHS, strict=True))


def _has_read(document: Mapping[str, Any], collector: str, part: str) -> bool:
    """Return whether a collector has read a part: only then does the part lack what is not among
    the samples.
    """
    return any(
        (one["name"], one["state"]) == (collector, "ok")
        and all(fault["part"].lower() != part.lower() for fault in one["faults"])
        for one in document["collectors"]
    )


def _links(document: Mapping[str, Any]) -> Iterator[str]:
    series = of_document(document)
    for labels, value in series("infiniband_port_up"):
        device, port = (labels.get(name, "?") for name in ("device", "port"))
        rate = series.value("infiniband_port_rate_bytes_per_second", device=device, port=port)
        speed = f", {rate * 8 / 1e9:.0f} Gb/s" if rate and value else ""
        yield f"{printable(device)}/{printable(port)}  {'up' if value else 'down'}{speed}"


def _probes(probe: Mapping[str, Any]) -> Iterator[str]:
    if probe.get("state", "off") == "off":
        return
    yield from map(printable, probe.get("detail", "").splitlines())
    if "members" in probe and "period_seconds" in probe:
        yield f"{plural(probe['members'], 'member')}, every {duration(probe['period_seconds'])}"
    suspects = probe.get("suspects", ())
    for entry in list(reversed(probe.get("rounds", ())))[:ROUNDS]:
        peers = ", ".join(name for name in entry["members"] if name != probe.get("name"))
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
        yield (
            f"{at}  {printable(entry['kind'])}  {printable(entry['outcome'])}  with "
            f"{printable(peers)}"
        )
    for suspect in suspects:
        kind, component = printable(suspect["kind"]), printable(suspect["component"])
        yield f"suspect {kind} {component}: {printable(suspect['reason'])}"
    if not suspects:
        yield "no suspects"


def _figure(value: float | None, unit: str, factor: float = 1) -> str:
    return "unknown" if value is None else f"{value * factor:.0f} {unit}".rstrip()
