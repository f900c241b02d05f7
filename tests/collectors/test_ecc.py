"""Memory errors of GPUs: totals, places, what was put out of use."""

from __future__ import annotations

from pathlib import Path

from dshealthd.core.collector import Reason
from tests.nvml.node import Node


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


def test_what_waits_for_a_reset(tmp_path: Path) -> None:
    """A bank of memory waits as a channel does, with drivers that know banks (615); what is unknown
    of one of them makes the whole unknown.
    """
    with Node(tmp_path, profile="b200", gpus=4) as node:
        node.simulator.set(1, "repair_bank_pending", 1)
        node.simulator.set(2, "repair_bank_pending", "unsupported")
        node.simulator.set(2, "repair_channel_pending", 1)
        node.simulator.set(3, "repair_channel_pending", "na")
        seen = node.collect("ecc")
    waits = {labels[0]: value for labels, value in seen.values("gpu_repair_pending").items()}
    assert waits == {"0": 0, "1": 1, "2": 1}
    assert not seen.reasons("ecc")


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
