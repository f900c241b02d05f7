"""NVLinks: state, errors of both generations, traffic, the fabric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collectors.nvlink import ErrorSums, bit_error_ratio
from tests.nvml.node import Node, nodes

node = nodes(gpus=2)


@pytest.mark.parametrize(
    ("code", "ratio"), [(0x10F, 1e-15), (0x50C, 5e-12), (0x000, 0.0), (0xF02, 0.15)]
)
def test_bit_error_ratio(code: int, ratio: float) -> None:
    """NVML writes a ratio as mantissa and negative exponent."""
    assert bit_error_ratio(code) == pytest.approx(ratio)


def test_errors_of_all_links(node: Node) -> None:
    """Each GPU has the sums of its links' errors from the first look on, also where there is none.

    Links are named once they have had one.
    """
    seen = node.collect("nvlink")
    none = {("replay",): 0, ("recovery",): 0, ("crc",): 0}
    assert seen.values("gpu_nvlink_errors_total", gpu="0", uuid=node.uuid(0)) == none
    assert not seen.values("nvlink_errors_total")
    node.simulator.set(0, "nvlink4_replay", 3)
    node.simulator.set(0, "nvlink9_replay", 2)
    seen = node.collect("nvlink")
    assert seen.value("gpu_nvlink_errors_total", gpu="0", type="replay") == 5
    assert seen.value("gpu_nvlink_errors_total", gpu="1", type="replay") == 0
    assert {labels[2] for labels in seen.values("nvlink_errors_total")} == {"4", "9"}
    node.simulator.set(0, "nvlink4_replay", "na")
    seen = node.collect("nvlink")
    assert seen.value("gpu_nvlink_errors_total", gpu="0", type="replay") == 5
    assert not seen.values("nvlink_errors_total", gpu="0", link="4", type="replay")


def test_sums_grow_by_new_errors_alone() -> None:
    """A link that tells only after others did adds its new errors, and not those of its past; one
    whose GPU was reset begins anew, and one that falls silent keeps its last count.
    """
    sums = ErrorSums({})
    for counts, total in (
        ([2, None], 2),
        ([2, 1000], 2),
        ([2, 1003], 5),
        ([2, 1], 3),
        ([None, 1], 3),
        ([None, None], None),
    ):
        assert sums.add("GPU-0", "replay", counts) == total


def test_sums_outlive_the_worker() -> None:
    """The worker that replaces another goes on with its sums: they neither drop nor jump."""
    memory: dict[str, Any] = {}
    before = ErrorSums(memory)
    assert before.add("GPU-0", "replay", [3, 2, None]) == 5
    assert before.add("GPU-0", "replay", [3, None, 1000]) == 5
    after = ErrorSums(json.loads(json.dumps(memory)))
    assert after.add("GPU-0", "replay", [3, None, 1001]) == 6
    assert after.add("GPU-0", "crc", [None, None, None]) is None
    assert ErrorSums({}).add("GPU-0", "replay", [3, None, 1001]) == 1004


def test_drivers_without_fields(node: Node) -> None:
    """Where a driver lacks the fields, the functions that were there before them tell the same."""
    node.simulator.set(0, "nvlink5_state", 0)
    node.simulator.set(0, "nvlink5_replay", 9)
    for field in (161, 162, 163, 165):
        node.simulator.set(None, f"field_fail.{field}", 3)
    seen = node.collect("nvlink")
    assert seen.value("nvlink_up", gpu="0", link="5") == 0
    assert seen.value("nvlink_up", gpu="0", link="6") == 1
    assert seen.value("nvlink_errors_total", gpu="0", link="5", type="replay") == 9


def test_nvlink_5_with_the_older_counters(tmp_path: Path) -> None:
    """A part that also answers for the older recovery counter does not hide the newer one by it."""
    with Node(tmp_path, profile="b200", gpus=1) as node:
        node.simulator.set(0, "nvlink17_recovery_events", 5)
        node.simulator.set(0, "field.162", 0)
        seen = node.collect("nvlink")
        found = seen.values("nvlink_errors_total", gpu="0", uuid=node.uuid(0), link="17")
    assert (found["recovery",], found["link_recovery",]) == (0, 5)
    series = [sample[:2] for sample in seen.results["nvlink"].samples]
    assert len(set(series)) == len(series)


def test_links_of_a_gpu(tmp_path: Path) -> None:
    """The worst link's ratio, if one tells; how many are up, while each tells; at most 36."""
    with Node(tmp_path, profile="b200", gpus=1) as node:
        node.simulator.set(0, "nvlink3_effective_ber", 0x50C)
        node.simulator.set(0, "nvlink4_effective_ber", 0x30B)
        node.simulator.set(0, "nvlink5_state", 0)
        seen = node.collect("nvlink")
        assert seen.value("nvlink_effective_bit_error_ratio") == pytest.approx(3e-11)
        node.simulator.set(0, "nvlink_effective_ber", 0)
        for link in (3, 4):
            node.simulator.set(0, f"nvlink{link}_effective_ber", 0)
        assert not node.collect("nvlink").values("nvlink_effective_bit_error_ratio")
        assert seen.value("nvlinks_up") == 17
        node.simulator.set(0, "nvlink5_state", "na")
        seen = node.collect("nvlink")
        assert len(seen.values("nvlink_up")) == 17
        assert not seen.values("nvlinks_up")
        for count, shown in ((36, True), (37, False)):
            node.simulator.set(0, "nvlink_count", count)
            assert bool(node.collect("nvlink").values("nvlink_up")) is shown


def test_gpu_without_links(node: Node) -> None:
    """A GPU without NVLink has no such series and is no fault."""
    node.simulator.set(None, "nvlink_count", "unsupported")
    seen = node.collect("nvlink")
    assert seen.results["nvlink"].samples == ()
    assert not seen.reasons("nvlink")
