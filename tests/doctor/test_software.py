"""Versions of driver, CUDA, NCCL and torch that do not fit together: found, and mended."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import pytest

from dshealthd.doctor.node import software
from tests.doctor.looks import look, outcomes, results

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.doctor.node_context import NodeContext


def installed(prefix: Path, *distributions: str, torch: str, cuda: str = "") -> None:
    """Make an environment with these packages' metadata."""
    site = prefix / "lib/python3.11/site-packages"
    (site / "torch").mkdir(parents=True)
    for name in distributions:
        (site / f"{name}.dist-info").mkdir()
    lines = [f"__version__ = '{torch}'"] + ([f"cuda: Optional[str] = '{cuda}'"] if cuda else [])
    (site / "torch/version.py").write_text("\n".join(lines))


def node(python: str, cuda: str, gpu: str = "NVIDIA H100") -> NodeContext:
    """Return a node with eight GPUs, whose driver serves this CUDA, and a training environment."""
    figures = {
        "gpus_expected": ({}, 8),
        "gpu_driver_info": ({"driver": "570.1", "cuda": cuda, "nvml": "12"}, 1),
        "gpu_info": ({"name": gpu}, 1),
    }
    document = {
        "findings": [],
        "collectors": [{"name": "gpu", "state": "ok", "reason": None, "detail": "", "faults": []}],
        "metrics": {
            f"dshealthd_{name}": {"samples": [{"labels": labels, "value": value}]}
            for name, (labels, value) in figures.items()
        },
    }
    return dataclasses.replace(look(), document=document, python=(python,))


@pytest.mark.parametrize(
    ("torch", "cuda", "packages", "driver", "words"),
    [
        ("2.8.0+cu128", "12.8", ("torch-2.8.0", "nvidia_nccl_cu12-2.27.3"), "12.4", ()),
        ("2.9.0+cu130", "13.0", ("torch-2.9.0",), "12.8", ("CUDA 13.0", "supports only 12.8")),
        ("2.8.0+cpu", "", ("torch-2.8.0",), "12.8", ("without CUDA",)),
        ("2.8.0", "12.8", ("deepspeed-0.17.0", "deepspeed-0.18.0"), "12.8", ("2 times",)),
        ("2.3.1", "12.1", ("nvidia_nccl_cu12-2.21.5",), "12.8", ("NCCL 2.21.5",)),
    ],
    ids=["fits", "too new", "cpu", "twice", "defect"],
)
def test_software(
    tmp_path: Path,
    torch: str,
    cuda: str,
    packages: tuple[str, ...],
    driver: str,
    words: tuple[str, ...],
) -> None:
    """Versions that do not go together are found by an environment's files; fitting ones pass."""
    installed(tmp_path, *packages, torch=torch, cuda=cuda)
    context = node(str(tmp_path / "bin/python3"), driver)
    found = results(software.VERSIONS, context)
    assert [one.outcome.value for one in found] == (["warning"] if words else ["ok"])
    assert all(word in found[0].text for word in words)
    if words:
        shutil.rmtree(tmp_path / "lib")  # what pip leaves after the remedy
        fitting = ("torch-2.8.0", "deepspeed-0.18.0", "nvidia_nccl_cu12-2.27.3")
        installed(tmp_path, *fitting, torch="2.8.0+cu128", cuda="12.8")
        assert found[0].remedy.startswith(f"{tmp_path}/bin/python -m pip ")
        assert outcomes(software.VERSIONS, context) == ["ok"]
    gone = dataclasses.replace(context, python=(str(tmp_path / "absent/bin/python"),))
    assert outcomes(software.VERSIONS, gone) == ["unknown"]


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("NVIDIA B200", "warning"),
        ("NVIDIA GB300", "warning"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "warning"),
        ("NVIDIA H200", "ok"),
        ("NVIDIA GB10", "ok"),
    ],
)
def test_blackwell_needs_kernels_of_its_own(tmp_path: Path, name: str, outcome: str) -> None:
    """CUDA and NCCL from before Blackwell fail on it with "no kernel image", and run elsewhere."""
    installed(tmp_path, "torch-2.6.0", "nvidia_nccl_cu12-2.22.3", torch="2.6.0", cuda="12.4")
    context = node(str(tmp_path), "12.8", name)
    found = results(software.VERSIONS, context)
    assert {one.outcome.value for one in found} == {outcome}
    if outcome == "warning":
        cuda, nccl = found
        assert "CUDA 12.4 has no kernels for Blackwell, which needs 12.8" in cuda.text
        assert "/whl/cu128" in cuda.remedy
        assert "CUDA 12.8 release notes" in cuda.source
        assert "NCCL 2.22.3 has no kernels for Blackwell, which needs 2.25.1" in nccl.text
        shutil.rmtree(tmp_path / "lib")
        installed(tmp_path, "torch-2.8.0", "nvidia_nccl_cu12-2.27.3", torch="2.8.0", cuda="12.8")
        assert outcomes(software.VERSIONS, context) == ["ok"]


@pytest.mark.parametrize(
    ("driver", "index"),
    [("11.4", "cu118"), ("12.2", "cu126"), ("12.6", "cu126"), ("12.9", "cu128"), ("13", "cu130")],
)
def test_index_of_the_remedy(driver: str, index: str) -> None:
    """The remedy names an index of wheels that exists and that the driver serves."""
    ((_, remedy, _),) = software.judge(frozenset({("cuda", "14.0")}), driver, gpus=True)
    assert f"https://download.pytorch.org/whl/{index} " in remedy


def test_driver_too_old_for_any_torch() -> None:
    """Where no index is left, no package is named that does not exist."""
    ((_, remedy, _),) = software.judge(frozenset({("cuda", "12.8")}), "10.2", gpus=True)
    assert "a newer driver" in remedy
    assert "pip" not in remedy
