"""Versions of driver, CUDA, NCCL and torch that do not fit together: found, and mended."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from dshealthd.doctor.node import software
from dshealthd.doctor.node_context import NodeContext
from tests.doctor.looks import look, outcomes, results


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
        assert f"{tmp_path}/bin/python -m pip " in found[0].remedy or "driver" in found[0].remedy
        assert outcomes(software.VERSIONS, context) == ["ok"]
    gone = dataclasses.replace(context, python=(str(tmp_path / "absent/bin/python"),))
    assert outcomes(software.VERSIONS, gone) == ["unknown"]
