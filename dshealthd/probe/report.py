"""Results of probes as people read them.

Nccl-tests' table, a matrix of pairs, and exit statuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.probe.observation import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dshealthd.probe.observation import Timing

EXIT: Mapping[Outcome, int] = {
    Outcome.OK: 0,
    Outcome.FAILED: 1,
    Outcome.DECLINED: 3,
    Outcome.UNREACHABLE: 4,
    Outcome.REFUSED: 5,
    Outcome.UNAUTHORIZED: 6,
    Outcome.HUNG: 7,
    Outcome.CORRUPTED: 8,
    Outcome.INCONCLUSIVE: 9,
}
"""Exit statuses of `dshealthd probe` by outcome; 2 is bad usage, as with every command."""
WORST = (
    Outcome.CORRUPTED,
    Outcome.HUNG,
    Outcome.FAILED,
    Outcome.UNREACHABLE,
    Outcome.REFUSED,
    Outcome.UNAUTHORIZED,
    Outcome.INCONCLUSIVE,
    Outcome.DECLINED,
    Outcome.OK,
)
"""Of several outcomes the first of these counts."""
ELEMENT = 4
"""Bytes of one float."""


def algorithm_bandwidth(timing: Timing) -> float:
    """Return bytes per second of the payload, as nccl-tests has it."""
    return timing.size / timing.seconds


def fields(timing: Timing) -> dict[str, Any]:
    """Return a timing for `--json`: seconds and bytes per second."""
    return {
        "op": timing.op,
        "part": timing.part,
        "size": timing.size,
        "count": timing.size // ELEMENT,
        "seconds": timing.seconds,
        "algbw": algorithm_bandwidth(timing),
        "busbw": timing.bus_bandwidth,
    }


def table(timings: Iterable[Timing]) -> str:
    """Return timings in the columns and units of nccl-tests.

    Microseconds, and 10^9 bytes per second.
    """
    lines = [
        f"# {'op':<16}{'part':>6}{'size':>13}{'count':>13}{'time':>12}{'algbw':>10}{'busbw':>10}",
        f"# {'':<16}{'':>6}{'(B)':>13}{'(elements)':>13}{'(us)':>12}{'(GB/s)':>10}{'(GB/s)':>10}",
    ]
    lines += [
        f"  {t.op:<16}{t.part or '-':>6}{t.size:>13}{t.size // ELEMENT:>13}{t.seconds * 1e6:>12.2f}"
        f"{algorithm_bandwidth(t) / 1e9:>10.3f}{t.bus_bandwidth / 1e9:>10.3f}"
        for t in timings
    ]
    return "\n".join(lines)


def matrix(names: Sequence[str], cells: Mapping[frozenset[str], str], what: str) -> str:
    """Return what each pair came to, in a square.

    Rows and columns are numbered as the list below it.
    """
    width = max([len(str(len(names))), *map(len, cells.values()), 1]) + 2
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
    """Return the outcome that counts of several."""
    return min(outcomes, key=WORST.index, default=Outcome.OK)
