"""The Inspector's format: what is kept of it, in which units, and that nothing in a file can do
harm.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest

from dshealthd.jobs.nccl.inspector import MeasuredOperation, file_names, message_class, parse
from tests.jobs.nccl.inspector_plugin import line, line_229

MAX_LINE = 2048
MAX_MALFORMED = 100

NODE = os.uname().nodename
ALL_REDUCE = {"name": "AllReduce", "ranks": "16", "nodes": "2", "message": "256MiB-"}


@pytest.mark.parametrize(
    ("text", "job", "node", "bandwidth", "seconds"),
    [
        # GB/s are 10^9 bytes a second; what names no Slurm job has none.
        (line(678.263, 9498.47, node="n1"), None, "n1", 678.263e9, 9498.47e-6),
        # Of NCCL 2.29; what tells single operations apart is not kept.
        (line_229(400, 1000, number=1) + line_229(100, 3000, number=2), "77", NODE, 200e9, 2e-3),
        # Bandwidths of one class have their geometric mean, times their arithmetic one.
        (
            line(100, 10, communicator="DP 0", algorithm="Ring_simple")
            + line(400, 30, communicator="DP 1", message="3-4GB"),
            *(None, NODE, 200e9, 20e-6),
        ),
        # The plugin writes 0 where it has measured nothing: no number is made of it.
        (line(0, 12), None, NODE, None, 12e-6),
    ],
)
def test_figures(
    text: str, job: str | None, node: str, bandwidth: float | None, seconds: float
) -> None:
    """Each form of the file gives bytes per second and seconds of one operation."""
    content = parse(text)
    ((operation, figures),) = content.operations.items()
    assert operation == MeasuredOperation(job=job, node=node, **ALL_REDUCE)
    assert figures.bandwidth == (bandwidth and pytest.approx(bandwidth))
    assert figures.seconds == pytest.approx(seconds)
    assert content.malformed == 0


def test_kept_apart() -> None:
    """Operations, sizes of communicators and classes of messages are not mixed."""
    text = (
        line(1, 1)
        + line(2, 1, ranks="8", nodes="1")
        + line(3, 1, message="512-513KB")
        + line(4, 1, operation="Send")
    )
    found = parse(text).operations
    assert {
        (key.name, key.ranks, key.message): figures.bandwidth for key, figures in found.items()
    } == {
        ("AllReduce", "16", "256MiB-"): pytest.approx(1e9),
        ("AllReduce", "8", "256MiB-"): pytest.approx(2e9),
        ("AllReduce", "16", "64KiB-1MiB"): pytest.approx(3e9),
        ("Send", "16", "256MiB-"): pytest.approx(4e9),
    }


@pytest.mark.parametrize("kept", [1, 40, 300, 477])
def test_half_written(kept: int) -> None:
    """A line that is still being written counts once it is whole, and is no error until then."""
    whole, part = line(100, 10), line(7, 7, operation="Broadcast")
    content = parse(whole + part[:kept])
    assert [key.name for key in content.operations] == (
        ["AllReduce", "Broadcast"] if "\n" in part[:kept] else ["AllReduce"]
    )
    assert content.malformed == 0


@pytest.mark.parametrize("text", [
    "nccl_bus_bandwidth_gbs 5",
    line(1, 1).replace("nccl_", "up_"),
    line(1, 1, operation="Invalid"),
    line(1, 1, operation="rm -rf"),
    line(1, 1, message="large"),
    line(1, 1, message="1e9-2e9B"),
    line(1, 1, ranks="0"),
    line(1, 1, ranks="99999999999999999999"),
    line(1, 1, nodes="²"),
    line(1, 1, communicator='a"b'),
    line(float("nan"), float("inf")),
    line(-1, -5),
    line(1, 1, communicator="x" * MAX_LINE),
    "\x00\xff{{{",
])  # fmt: skip
def test_not_the_plugins(text: str) -> None:
    """What the plugin cannot have written is counted and makes no series."""
    content = parse(line(5, 5) + text.rstrip("\n") + "\n" + line(6, 6, operation="Reduce"))
    assert sorted(key.name for key in content.operations) == ["AllReduce", "Reduce"]
    assert content.malformed >= 1


@pytest.mark.parametrize(("text", "taken"), [
    (line(1, 1, ranks="1048576", nodes="1048576"), True),
    (line(1, 1, ranks="1048577"), False),
    (line(1, 1, nodes="1048577"), False),
    (line(1, 1, communicator="x" * (MAX_LINE - 100 - len(line(1, 1, node=NODE)) // 2)), True),
])  # fmt: skip
def test_what_the_plugin_may_write(text: str, *, taken: bool) -> None:
    """Up to a million ranks, and up to what its buffer holds."""
    content = parse(text)
    assert (bool(content.operations), bool(content.malformed)) == (taken, not taken)


def test_garbage_is_given_up() -> None:
    """A file full of garbage costs no more than a hundred lines of it."""
    content = parse(("a{" + ',="' * 680 + "\n") * 5000 + line(5, 5))
    assert (content.operations, content.malformed) == ({}, MAX_MALFORMED)


@pytest.mark.parametrize(("text", "expected"), [
    ("0B", "0-64KiB"),
    ("63-64KB", "0-64KiB"),
    ("64-65KB", "64KiB-1MiB"),
    ("1023-1024KB", "64KiB-1MiB"),
    ("1-2MB", "1MiB-16MiB"),
    ("16.00MB", "16MiB-256MiB"),
    ("256-257MB", "256MiB-"),
    ("0.10GB", "16MiB-256MiB"),
    ("4-5GB", "256MiB-"),
    ("1.00TB", "256MiB-"),
])  # fmt: skip
def test_message_classes(text: str, expected: str) -> None:
    """Sizes are those of `inspectorPromFormatMessageSizeRange`, in units of 1024."""
    assert message_class(text) == expected


@pytest.mark.parametrize(("metric", "value", "taken"), [
    ("bus_bandwidth_gbs", 1e-9, True),
    ("bus_bandwidth_gbs", 9.9e-10, False),
    ("bus_bandwidth_gbs", 1e5, True),
    ("bus_bandwidth_gbs", 1.001e5, False),
    ("collective_exec_time_microseconds", 1e-3, True),
    ("collective_exec_time_microseconds", 9.9e-4, False),
    ("collective_exec_time_microseconds", 1e13, True),
    ("collective_exec_time_microseconds", 1.001e13, False),
])  # fmt: skip
def test_figures_that_no_nccl_measures(metric: str, value: float, *, taken: bool) -> None:
    """The first and the last plausible figure count, their neighbors are malformed lines."""
    (written,) = (text for text in line(1, 1).splitlines() if f"nccl_{metric}{{" in text)
    content = parse(f"{written.rpartition(' ')[0]} {value:g}\n")
    assert (len(content.operations), content.malformed) == ((1, 0) if taken else (0, 1))


def test_so_many_entries_of_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand are looked at."""
    uuids = [f"{number}" * 8 + "-0000-0000-0000-000000000000" for number in (1, 2)]
    names = [f"nccl_inspector_metrics_{uuid}.prom" for uuid in uuids]
    entries = [SimpleNamespace(name=name) for name in (*["other"] * 19_999, *names)]
    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(iter(entries)))
    assert file_names(0) == {names[0]: f"GPU-{uuids[0]}"}
