"""Memory errors of GPUs: totals, places, what was put out of use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.collector import Reason
from tests.nvml.node import Node

if TYPE_CHECKING:
    from pathlib import Path


def test_totals_and_places(tmp_path: Path) -> None:
    """SRAM and DRAM errors are told apart, their sum is the total, and parity and SEC-DED errors
    both count as uncorrected.
    """
    with Node(tmp_path, gpus=2) as node:
        node.simulator.set(1, "ecc_volatile_uncorrected_dram", 2)
        node.simulator.set(1, "ecc_volatile_uncorrected_sram", 5)
        node.simulator.set(1, "sram_volatile_unc_parity", 1)
        node.simulator.set(1, "sram_volatile_unc_secded", 4)
        node.simulator.set(1, "sram_threshold_exceeded", 1)
        seen = node.collect("ecc")
        wanted = {"gpu": "1", "uuid": node.uuid(1), "type": "uncorrected", "counter": "volatile"}
        assert seen.value("gpu_ecc_errors_total", **wanted) == 7
        assert seen.values("gpu_ecc_location_errors_total", **wanted) == {
            ("dram",): 2,
            ("sram",): 5,
        }
        assert seen.value("gpu_sram_threshold_exceeded", gpu="1") == 1
        assert seen.value("gpu_sram_threshold_exceeded", gpu="0") == 0


def test_sram_of_ampere(tmp_path: Path) -> None:
    """A part without the SRAM status is asked for each of its four counts."""
    with Node(tmp_path, profile="a100", gpus=1) as node:
        node.simulator.set(0, "ecc_aggregate_uncorrected_sram", 3)
        seen = node.collect("ecc")
    assert (
        seen.value(
            "gpu_ecc_location_errors_total",
            location="sram",
            type="uncorrected",
            counter="aggregate",
        )
        == 3
    )
    assert (
        seen.value(
            "gpu_ecc_location_errors_total", location="sram", type="corrected", counter="volatile"
        )
        == 0
    )
    assert not seen.values("gpu_sram_threshold_exceeded")


def test_row_remapping(tmp_path: Path) -> None:
    """Rows that were replaced, that wait, and that could not be replaced are told apart."""
    with Node(tmp_path, gpus=2) as node:
        for key, value in {
            "correctable": 6,
            "uncorrectable": 1,
            "pending": 1,
            "failure": 1,
        }.items():
            node.simulator.set(1, f"remapped_{key}", value)
        seen = node.collect("ecc")
        assert seen.values("gpu_remapped_rows", gpu="1", uuid=node.uuid(1)) == {
            ("corrected",): 6,
            ("uncorrected",): 1,
        }
    for metric in ("gpu_remapped_rows_pending", "gpu_remapped_rows_failed"):
        assert {labels[0]: value for labels, value in seen.values(metric).items()} == {
            "0": 0,
            "1": 1,
        }
    assert not seen.values("gpu_retired_pages")


def test_retired_pages_of_volta(tmp_path: Path) -> None:
    """Parts before Ampere retire pages; rows they do not have."""
    with Node(tmp_path, profile="v100", gpus=1) as node:
        node.simulator.set(0, "retired_dbe", 2)
        node.simulator.set(0, "retired_pending", 1)
        seen = node.collect("ecc")
    assert seen.value("gpu_retired_pages", type="uncorrected") == 2
    assert seen.value("gpu_retired_pages_pending") == 1
    assert not seen.values("gpu_remapped_rows")


def test_ecc_off(tmp_path: Path) -> None:
    """With ECC off there are no counts: absent, not zero."""
    with Node(tmp_path, gpus=1) as node:
        node.simulator.set(0, "ecc_mode", 0)
        for key in ("unc_parity", "unc_secded", "cor"):
            node.simulator.set(0, f"sram_volatile_{key}", "unsupported")
        seen = node.collect("ecc")
    assert not seen.values("gpu_ecc_errors_total")
    assert not seen.values("gpu_ecc_location_errors_total")
    assert not seen.reasons("ecc")


def test_repairs(tmp_path: Path) -> None:
    """A channel or a TPC that waits for a reset is told, and memory that no repair helps."""
    with Node(tmp_path, gpus=4) as node:
        node.simulator.set(1, "repair_channel_pending", 1)
        node.simulator.set(2, "repair_tpc_pending", 1)
        node.simulator.set(2, "unrepairable_memory", 1)
        node.simulator.set(3, "repair_channel_pending", "unsupported")
        node.simulator.set(3, "unrepairable_memory", "unsupported")
        seen = node.collect("ecc")
        pending, broken = (
            {labels[0]: value for labels, value in seen.values(metric).items()}
            for metric in ("gpu_repair_pending", "gpu_memory_unrepairable")
        )
        assert pending == {"0": 0, "1": 1, "2": 1}
        assert broken == {"0": 0, "1": 0, "2": 1}
        assert not seen.reasons("ecc")
        # What cannot be told is neither pending nor well.
        node.simulator.set(1, "repair_channel_pending", "na")
        node.simulator.set(1, "unrepairable_memory", "na")
        seen = node.collect("ecc")
        assert not seen.values("gpu_repair_pending", gpu="1")
        assert not seen.values("gpu_memory_unrepairable", gpu="1")


def test_inforom(tmp_path: Path) -> None:
    """A corrupted infoROM is 0 and no failing call; one that is not told of is absent."""
    with Node(tmp_path, gpus=3) as node:
        node.simulator.set(1, "inforom_checksum", "error:14")
        node.simulator.set(2, "inforom_checksum", "unsupported")
        seen = node.collect("ecc")
        assert {labels[0]: value for labels, value in seen.values("gpu_inforom_valid").items()} == {
            "0": 1,
            "1": 0,
        }
        assert not seen.reasons("ecc")
        node.simulator.set(1, "inforom_checksum", 7)
        node.simulator.fault(
            "fail", 999, gpu=0, function="nvmlDeviceGetInforomConfigurationChecksum"
        )
        seen = node.collect("ecc", advance=61.0)
        assert {labels[0]: value for labels, value in seen.values("gpu_inforom_valid").items()} == {
            "1": 1
        }
        assert seen.reasons("ecc") == {"gpu 0": Reason.UNKNOWN_ERROR}
