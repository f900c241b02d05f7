"""NVLinks: state, errors of both generations, traffic, the fabric."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.collectors.nvlink import ErrorSums, bit_error_ratio
from tests.nvml.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Give two H100."""
    with Node(tmp_path, gpus=2) as made:
        yield made


@pytest.mark.parametrize(
    ("code", "ratio"), [(0x10F, 1e-15), (0x50C, 5e-12), (0x000, 0.0), (0xF02, 0.15)]
)
def test_bit_error_ratio(code: int, ratio: float) -> None:
    """NVML writes a ratio as mantissa and negative exponent."""
    assert bit_error_ratio(code) == pytest.approx(ratio)


@pytest.mark.parametrize(("state", "up"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_state(node: Node, state: int, up: int) -> None:
    """A link that sleeps to save power is up, one whose traffic is disabled is not."""
    node.simulator.set(1, "nvlink7_state", state)
    seen = node.collect("nvlink")
    assert seen.value("nvlink_up", gpu="1", uuid=node.uuid(1), link="7") == up
    assert sum(seen.values("nvlink_up").values()) == 35 + up
    assert seen.value("nvlinks_up", gpu="1", uuid=node.uuid(1)) == 17 + up
    assert seen.value("nvlinks_up", gpu="0", uuid=node.uuid(0)) == 18


def test_errors_of_a_link(node: Node) -> None:
    """Errors are counted by link and type, up to NVLink 4."""
    for key, value in {"replay": 3, "recovery": 1, "crc_flit": 250}.items():
        node.simulator.set(0, f"nvlink4_{key}", value)
    seen = node.collect("nvlink")
    assert seen.values("nvlink_errors_total", gpu="0", uuid=node.uuid(0), link="4") == {
        ("replay",): 3,
        ("recovery",): 1,
        ("crc",): 250,
    }
    assert sum(seen.values("nvlink_errors_total").values()) == 254


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


def test_errors_of_a_link_that_falls_silent(node: Node) -> None:
    """A link that no longer tells does not make the sum drop, as if it had been reset."""
    node.simulator.set(0, "nvlink4_replay", 3)
    node.simulator.set(0, "nvlink5_replay", 2)
    assert node.collect("nvlink").value("gpu_nvlink_errors_total", gpu="0", type="replay") == 5
    node.simulator.set(0, "nvlink4_replay", "na")
    seen = node.collect("nvlink")
    assert seen.value("gpu_nvlink_errors_total", gpu="0", type="replay") == 5
    assert not seen.values("nvlink_errors_total", gpu="0", link="4", type="replay")
    node.simulator.set(0, "nvlink_replay", "na")
    node.simulator.set(0, "nvlink5_replay", "na")
    seen = node.collect("nvlink")
    assert not seen.values("gpu_nvlink_errors_total", gpu="0", type="replay")
    assert seen.value("gpu_nvlink_errors_total", gpu="0", type="crc") == 0


def test_errors_of_a_link_that_answers_late(node: Node) -> None:
    """A link that tells only after others did adds its new errors, and not those of its past."""

    def replays() -> float:
        return node.collect("nvlink").value("gpu_nvlink_errors_total", gpu="0", type="replay")

    node.simulator.set(0, "nvlink4_replay", "na")
    node.simulator.set(0, "nvlink5_replay", 2)
    assert replays() == 2
    node.simulator.set(0, "nvlink4_replay", 1000)
    assert replays() == 2
    node.simulator.set(0, "nvlink4_replay", 1003)
    assert replays() == 5
    node.simulator.set(0, "nvlink4_replay", 1)  # the GPU was reset
    assert replays() == 3


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


def test_nvlink_5(tmp_path: Path) -> None:
    """NVLink 5 has errors of its own, and a bit error ratio, of which the worst link's is shown."""
    with Node(tmp_path, profile="b200", gpus=1) as node:
        for key, value in {
            "rcv_errors": 2,
            "recovery_events": 1,
            "plr_xmit_retry_blocks": 70,
            "effective_ber": 0x30B,
        }.items():
            node.simulator.set(0, f"nvlink17_{key}", value)
        seen = node.collect("nvlink")
        wanted = seen.values("nvlink_errors_total", gpu="0", uuid=node.uuid(0), link="17")
    assert wanted == {("receive",): 2, ("link_recovery",): 1, ("retransmit",): 70}
    assert seen.value("nvlink_effective_bit_error_ratio") == pytest.approx(3e-11)
    assert {labels[2]: value for labels, value in seen.values("nvlinks").items()} == {"5.0": 18}


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


def test_traffic_and_speed(node: Node) -> None:
    """Traffic is the sum over all links, in bytes; the speed is that of one link."""
    node.simulator.set(0, "nvlink_data_tx", 1000)
    seen = node.collect("nvlink")
    assert seen.value("nvlink_transmit_bytes_total", gpu="0") == 18 * 1000 * 1024
    assert seen.value("nvlink_speed_bytes_per_second", gpu="0") == 26562e6


def test_remote_ends(node: Node) -> None:
    """Links are counted by their version and by what is at the other end."""
    node.simulator.set(0, "nvlink3_remote_type", 0)
    node.simulator.set(0, "nvlink4_remote_type", 255)
    seen = node.collect("nvlink")
    assert seen.values("nvlinks", gpu="0", uuid=node.uuid(0)) == {
        ("4.0", "switch"): 16,
        ("4.0", "gpu"): 1,
        ("4.0", "unknown"): 1,
    }


def test_gpu_without_links(node: Node) -> None:
    """A GPU without NVLink has no such series and is no fault."""
    node.simulator.set(None, "nvlink_count", "unsupported")
    seen = node.collect("nvlink")
    assert seen.results["nvlink"].samples == ()
    assert not seen.reasons("nvlink")


def test_sums_of_nvlink_5(tmp_path: Path) -> None:
    """NVLink 5 has a series for all links of a GPU together."""
    with Node(tmp_path, profile="b200") as node:
        kinds = {
            "receive": "rcv_errors",
            "link_recovery": "recovery_events",
            "retransmit": "plr_xmit_retry_blocks",
        }
        for place, key in enumerate(kinds.values(), start=1):
            node.simulator.set(0, f"nvlink3_{key}", place)
            node.simulator.set(0, f"nvlink7_{key}", 100)
        seen = node.collect("nvlink")
        assert seen.values("gpu_nvlink_errors_total", gpu="0", uuid=node.uuid(0)) == {
            (kind,): 100 + place for place, kind in enumerate(kinds, start=1)
        }
        assert not seen.reasons("nvlink")
