"""Variables of NCCL, on a node with real interfaces."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.host import Host
from dshealthd.doctor.check import Result
from dshealthd.doctor.job.context import JobContext
from dshealthd.doctor.job.sources.source import Source
from dshealthd.findings.finding import State
from tests.doctor.job.asking import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARNING,
    asked,
    environment_after,
    outcomes,
    results,
)


def job(*variables: str, host: Host | None = None, nodes: int = 1) -> JobContext:
    """Return a job with these variables."""
    made = asked(launch=f"torchrun --nnodes={nodes} --nproc-per-node=8 x.py")
    have = dict(variable.partition("=")[::2] for variable in variables)
    return JobContext(host=host or Host(), command=made.command, environment=have)


@pytest.fixture
def adapters(tmp_path: Path) -> Host:
    """Return a node with two adapters, the second of which is down."""
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        place = tmp_path / "class" / "infiniband" / name / "ports" / "1"
        place.mkdir(parents=True)
        (place / "state").write_text(f"{state}\n")
    return Host(sysfs=tmp_path)


@pytest.mark.parametrize(
    ("variable", "outcome", "words"),
    [
        ("NCCL_DEBUG=INFO", OK, "as they are set"),
        ("NCCL_SOCKET_IFNAME=lo", OK, "as they are set"),
        ("NCCL_SOCKET_IFNAME=^docker", OK, "as they are set"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=1", OK, "as they are set"),
        ("NCCL_TIMEOUT=1800", WARNING, "is not read by any release in use"),
        ("NCCL_REUSE_SOCKET_ADDR=1", WARNING, "is not read by any release in use"),
        ("NCCL_SOCKET_IFNAMES=eth0", CRITICAL, "NCCL_SOCKET_IFNAME seems to be misspelt"),
        ("NCCL_ASYNC_ERROR_HANDLING=1", OK, "as they are set"),
        ("NCCL_OF_A_PLUGIN=1", OK, "as they are set"),
        ("NCCL_IB_TIMEOUT=1000", CRITICAL, "NCCL_IB_TIMEOUT=1000 has a value out of range"),
        ("NCCL_IB_DISABLE=true", CRITICAL, "has a value that is not a number"),
        ("NCCL_SOCKET_IFNAME=nosuch0", CRITICAL, "names a device that this node does not have"),
        ("NCCL_RAS_ADDR=localhost:28028", OK, "as they are set"),
        ("NCCL_RAS_ADDR=0.0.0.0:28028", WARNING, "opens a port without authentication"),
    ],
)
def test_variables(variable: str, outcome: State, words: str) -> None:
    """Each variable of the guides is judged as NCCL's own sources treat it."""
    (result,) = results("nccl-variables", job(variable))
    assert result.outcome is outcome, result.text
    assert words in result.text
    if result.component not in {"", variable.partition("=")[0]}:  # of the name that it means
        right = job(f"{result.component}=lo")
        assert outcomes("nccl-variables", right) == [OK]
    elif outcome is not OK:
        assert mended("nccl-variables", result, variable) == [OK]


def mended(check: str, result: Result, variable: str, **more: Any) -> list[State]:
    """Return what the check says once the remedy was pasted into the shell of the job."""
    name, _, value = variable.partition("=")
    left = environment_after(result.remedy, {name: value})
    variables = [f"{name}={value}" for name, value in left.items() if "NCCL" in name]
    return [one.outcome for one in results(check, job(*variables, **more))]


def test_infiniband_that_is_disabled_on_other_nodes(tmp_path: Path) -> None:
    """Seen from a login node, only a job of several nodes without InfiniBand is a warning."""
    without = Host(sysfs=tmp_path)
    gpus = Source("NVML", 1)
    for variable in ("NCCL_IB_DISABLE=1", "NCCL_NET=Socket"):
        (found,) = results("nccl-variables", job(variable, host=without, nodes=2))
        assert found.outcome is WARNING
        assert "between the 2 nodes of the job; right only where they have neither" in found.text
        assert mended("nccl-variables", found, variable, host=without, nodes=2) == [OK]
        for fine in (
            job(variable, host=without),
            dataclasses.replace(job(variable, host=without, nodes=2), gpus=gpus),
        ):
            assert outcomes("nccl-variables", fine) == [OK]


@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME=ib0", "NCCL_IB_HCA==mlx5_9"])
@pytest.mark.parametrize(
    "command", ["srun -N2 torchrun --nnodes=2 x.py", "srun python x.py", "torchrun --nnodes=2 x.py"]
)
def test_devices_of_other_nodes_are_unknown(adapters: Host, variable: str, command: str) -> None:
    """A login node, without GPUs, has none of the job's devices: nothing is wrong with that."""
    made = asked(launch=command)
    name, _, value = variable.partition("=")
    made = dataclasses.replace(made, host=adapters, environment={name: value}, gpus=None)
    (found,) = results("nccl-variables", made)
    assert found.outcome is UNKNOWN
    assert "the job runs on others" in found.text
    (found,) = results("nccl-variables", dataclasses.replace(made, gpus=Source("NVML", 8)))
    assert found.outcome is CRITICAL


def test_loopback_between_nodes() -> None:
    """The loopback interface alone serves one node, and none of several."""
    assert outcomes("nccl-variables", job("NCCL_SOCKET_IFNAME=lo")) == [OK]
    (result,) = results("nccl-variables", job("NCCL_SOCKET_IFNAME=lo", nodes=2))
    assert result.outcome is CRITICAL
    assert "only an interface inside the node" in result.text
    assert mended("nccl-variables", result, "NCCL_SOCKET_IFNAME=lo", nodes=2) == [OK]


@pytest.mark.parametrize(
    ("variable", "outcome", "words"),
    [
        ("NCCL_IB_HCA==mlx5_0", OK, "as they are set"),
        ("NCCL_IB_HCA==mlx5_1", CRITICAL, "names a device that is down"),
        ("NCCL_IB_HCA==mlx5_9", CRITICAL, "names a device that this node does not have"),
        ("NCCL_IB_DISABLE=1", WARNING, "disables InfiniBand, which works on this node"),
        ("NCCL_IB_DISABLE=0", OK, "as they are set"),
    ],
)
def test_adapters(adapters: Host, variable: str, outcome: State, words: str) -> None:
    """Adapters that are named exist and work; InfiniBand is off only where there is none."""
    (result,) = results("nccl-variables", job(variable, host=adapters))
    assert result.outcome is outcome, result.text
    assert words in result.text
    if outcome is not OK:
        assert mended("nccl-variables", result, variable, host=adapters) == [OK]


def test_infiniband_off_where_there_is_none(tmp_path: Path) -> None:
    """On a node without adapters it is right to switch InfiniBand off."""
    assert outcomes("nccl-variables", job("NCCL_IB_DISABLE=1", host=Host(sysfs=tmp_path))) == [OK]


@pytest.mark.parametrize(
    "variable", ["NCCL_P2P_DISABLE=1", "NCCL_P2P_LEVEL=LOC", "NCCL_SHM_DISABLE=1"]
)
def test_transports(variable: str) -> None:
    """A work-around that was left on is a warning of its own symptom, with the way back."""
    made = job(variable)
    (result,) = results("transports", made)
    assert result.outcome is WARNING
    assert variable in result.text
    assert result.remedy == f"unset {variable.partition('=')[0]}"
    assert outcomes("nccl-variables", made) == [OK]
    assert mended("transports", result, variable) == [OK]
    assert outcomes("transports", job("NCCL_P2P_DISABLE=0")) == [OK]


def test_variables_of_this_shell() -> None:
    """Variables are those of this shell that concern training; secrets are not kept."""
    have = {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin"}
    assert asked(environment=have).variables == {"NCCL_DEBUG": "INFO"}
