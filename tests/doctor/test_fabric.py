"""IMEX, judged only where GPUs are part of a fabric of several nodes; and torch against NVML."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.processes import free_port
from dshealthd.core.host import Host
from dshealthd.doctor.node import software
from dshealthd.linux.imex import DAEMON, NODES
from tests.command_line import shell_script
from tests.doctor.looks import look, named, outcomes, results
from tests.doctor.machine import Machine
from tests.waiting import until

_NOT_INITIALIZED = """
import os, warnings

def device_count():  # by NVML, without CUDA
    return 8

def is_available():
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1":
        return device_count() > 0
    warnings.warn("CUDA initialization: Error 802: system not yet initialized")
    return False
"""
"""What torch does while CUDA cannot start, as without Fabric Manager (torch/cuda/__init__.py)."""


def test_imex(make_machine: Callable[..., Machine], tmp_path: Path) -> None:
    """Set up for several nodes and not running is found in such a fabric alone; running, it
    passes.
    """
    machine = make_machine(4, "b200")
    root = tmp_path / "root"
    nodes = root / NODES.lstrip("/")
    nodes.parent.mkdir(parents=True)
    processes = tmp_path / "proc"  # without those of other tests, which may run such a daemon
    processes.mkdir()
    for name in ("1", "uptime", "loadavg"):
        (processes / name).symlink_to(f"/proc/{name}")
    host = Host(sysfs=machine.sys, dev=machine.dev, rootfs=root, procfs=processes)
    (processes / "2").mkdir()
    (processes / "2/comm").write_text("kthreadd\n")
    (processes / "uptime").unlink()
    (processes / "uptime").write_text("90000.00 90000.00\n")
    sources = ("kernel", "nvlink_domain")
    nodes.write_text("# nodes of the rack\n10.0.0.1\n10.0.0.2\n")
    assert outcomes(named("imex"), look(*sources, host=host)) == ["ok"]
    machine.simulator.set(None, "fabric_cluster_uuid", "0123456789abcdef0123456789abcdef")
    (found,) = results(named("imex"), look(*sources, host=host))
    assert found.outcome.value == "warning"
    assert found.value == "2"
    assert "systemctl restart nvidia-imex" in found.remedy
    daemon = tmp_path / DAEMON
    shutil.copy("/bin/sleep", daemon)
    with subprocess.Popen([daemon, "600"]) as process:
        (processes / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        try:
            with socket.create_server(("127.0.0.1", free_port())) as server:
                (nodes.parent / "config.cfg").write_text(f"SERVER_PORT={server.getsockname()[1]}\n")
                # Until its name is its own.
                until(lambda: outcomes(named("imex"), look(*sources, host=host)) == ["ok"])
            assert outcomes(named("imex"), look(*sources, host=host)) == ["warning"]
        finally:
            process.kill()
    nodes.write_text("# none yet\n")
    assert outcomes(named("imex"), look(*sources, host=host)) == ["ok"]


def test_torch_that_does_not_see_the_gpus(
    make_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that sees fewer GPUs than NVML is found; an unusable interpreter is unknown."""
    machine = make_machine()
    context = look("gpu", host=Host(sysfs=machine.sys, dev=machine.dev))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # nobody may not enter root's directories
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    blind = dataclasses.replace(context, python=(sys.executable,))
    (found,) = results(software.CUDA_DEVICES, blind)
    assert (found.outcome.value, found.value, found.limit) == ("warning", "0", "8")
    assert "torch.cuda.init()" in found.remedy
    broken = shell_script(
        machine.directory / "python3", "echo 'libcudart.so: cannot open' >&2; exit 1"
    )
    (unknown,) = results(software.CUDA_DEVICES, dataclasses.replace(context, python=(str(broken),)))
    assert (unknown.outcome.value, "libcudart" in unknown.text) == ("unknown", True)
    broken.write_text(
        f'#!/bin/sh\nPYTHONPATH="{machine.directory}" exec {sys.executable} -c "$3"\n'
    )
    package = machine.directory / "torch"
    package.mkdir()
    (package / "cuda.py").write_text(_NOT_INITIALIZED)
    (package / "__init__.py").write_text("from torch import cuda\n")
    mended = dataclasses.replace(context, python=(str(broken),))
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    (found,) = results(software.CUDA_DEVICES, mended)
    assert (found.outcome.value, found.value) == ("warning", "0")
    assert found.text.endswith("NVML sees 8: Error 802: system not yet initialized")
    (package / "cuda.py").write_text(
        "def device_count():\n    return 8\n\n\ndef is_available():\n    return True\n"
    )
    assert outcomes(software.CUDA_DEVICES, mended) == ["ok"]
