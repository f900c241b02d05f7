"""The text report of `dshealthd probe`: nccl-tests' table, a matrix of pairs, exit statuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dshealthd.probe.observation import FLOOR, Op, Outcome, Timing, slowest

EXIT: Mapping[Outcome, int] = {
    Outcome.CORRUPTED: 8,
    Outcome.HUNG: 7,
    Outcome.FAILED: 1,
    Outcome.UNREACHABLE: 4,
    Outcome.REFUSED: 5,
    Outcome.UNAUTHORIZED: 6,
    Outcome.INCONCLUSIVE: 9,
    Outcome.DECLINED: 3,
    Outcome.OK: 0,
}
"""Exit statuses of `dshealthd probe` by outcome, worst first; 2 is bad usage, as everywhere."""
ELEMENT = 4
"""Bytes of one float."""
UNITS: Mapping[str, str] = {"size": "bytes", "seconds": "s", "algbw": "bytes/s", "busbw": "bytes/s"}
"""Units of the numbers in `fields`; tables use GB/s like nccl-tests."""


def timing_fields(timing: Timing) -> dict[str, Any]:
    """Return a timing for the `--json` report, in `UNITS`."""
    return {
        "op": timing.op,
        "part": timing.part,
        "size": timing.size,
        "count": timing.size // ELEMENT,
        "seconds": timing.seconds,
        # A node that measures wrongly may have said that it took no time.
        "algbw": timing.size / max(timing.seconds, FLOOR),
        "busbw": timing.bus_bandwidth,
    }


def timing_rows(timings: Sequence[Timing]) -> list[Timing]:
    """Return the timings of a local probe's table: the slowest rank's of each collective, then
    every GPU's of what it does alone.
    """
    reduced = [timing for timing in timings if timing.op == Op.ALL_REDUCE]
    alone = [timing for timing in timings if timing.op != Op.ALL_REDUCE]
    return [
        *(replace(timing, part="") for timing in slowest(reduced, "size")),
        *sorted(alone, key=lambda timing: (timing.op, timing.part)),
    ]


def table(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the report's table of entries made by `fields`, with nccl-tests' columns and units.
    Times are in microseconds, bandwidths in 10^9 bytes per second.
    """
    row = "{:<16}{:>6}{:>13}{:>13}{:>7}{:>7}{:>12}{:>10}{:>10}"
    titles = ("op", "part", "size", "count", "type", "redop", "time", "algbw", "busbw")
    units = ("", "", "(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)")
    lines = [f"# {row.format(*titles)}", f"# {row.format(*units)}"]
    reduced = []
    for entry in entries:
        bus = entry["busbw"] / 1e9
        kind, reduction = "-", "-"
        if entry["op"] == Op.ALL_REDUCE:  # has an element type and a sum, and counts in the average
            kind, reduction = "float", "sum"
            reduced.append(bus)
        lines.append(
            f"  {entry['op']:<16}{entry['part'] or '-':>6}{entry['size']:>13}{entry['count']:>13}"
            f"{kind:>7}{reduction:>7}{entry['seconds'] * 1e6:>12.2f}"
            f"{entry['algbw'] / 1e9:>10.3f}{bus:>10.3f}"
        )
    if reduced:
        lines.append(f"# Avg bus bandwidth    : {sum(reduced) / len(reduced):.3f} GB/s")
    return "\n".join(lines)


def checksum_line(outcome: Outcome) -> str:
    """Return the line on the check of all sums, where nccl-tests counts its `#wrong`."""
    checked = {Outcome.OK: "0 OK", Outcome.CORRUPTED: "FAILED, sums are wrong"}
    return f"# Out of bounds values : {checked.get(outcome, 'not checked')}"


def matrix(names: Sequence[str], cells: Mapping[frozenset[str], str], what: str) -> str:
    """Return the matrix of all pairs, numbered like the list below it."""
    width = max([len(str(len(names))), *map(len, cells.values())]) + 2
    lines = [
        f"# {what}",
        " " * 5 + "".join(f"{number:>{width}}" for number in range(1, len(names) + 1)),
    ]
    for number, row in enumerate(names, 1):
        cell = (
            cells.get(frozenset((row, column)), "") if row != column else "-" for column in names
        )
        lines.append(f"{number:>4} " + "".join(f"{text:>{width}}" for text in cell))
    lines += ["", *(f"{number:>4} {name}" for number, name in enumerate(names, 1))]
    return "\n".join(lines)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst of several outcomes, which is the report's; `ok` if there are none."""
    return min(outcomes, key=list(EXIT).index, default=Outcome.OK)
