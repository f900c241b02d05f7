"""`make test-hardware` without a GPU, and on simulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dshealthd import __version__
from dshealthd.config import registry
from dshealthd.core.options import settable
from dshealthd.doctor import node as doctor
from tests.command_line import shell_script
from tests.hardware.checks import TORCH
from tests.hardware.collectives import judge
from tests.hardware.item import State, ran
from tests.hardware.node import look, objection
from tests.hardware.programs import Ran
from tests.nvml.simulator import Simulator

ROOT = Path(__file__).parents[2]
READ = {"gpu", "gpu_bus", "gpu_processes", "ecc", "nvlink", "nvlink_domain"}
READ |= {"pcie", "mig", "infiniband"}
"""Collectors that run: of simulated hardware alone, so that nothing here depends on this
machine."""


class Node:
    """A node with as many simulated GPUs, idle unless the test says otherwise."""

    def __init__(self, directory: Path, gpus: int) -> None:
        """Write its configuration, `/sys`, `/dev`, `/proc` and programs."""
        self.directory, self.programs = directory, directory / "bin"
        for name in ("sys/bus/pci/devices", "dev", "proc/1"):
            (directory / name).mkdir(parents=True)
        self.simulator = Simulator(directory / "simulator", gpus=gpus or 1)
        self.environment = os.environ | self.simulator.environment()
        if gpus:
            self.simulator.pci_sysfs(directory / "sys")
            (directory / "dev/nvidiactl").touch()
            self.simulator.set(None, "utilization_gpu", 0)
        else:
            self.simulator.hide_library()  # whatever library this machine has
        lines = ["[path]"]
        lines += [f'{name}fs = "{directory / name}"' for name in ("sys", "proc")]
        lines += [f'dev = "{directory / "dev"}"', f'state = "{directory / "state"}"']
        skipped = {check.name for check in doctor.CHECKS} - {"gpus", "gpu-metrics"}
        lines += ["[doctor]", f"skip = {sorted(skipped)}"]
        lines += ["[web]", 'listen_address = "127.0.0.1:1"']  # no agent ever answers there
        for name in sorted(registry.all_collectors()):
            # A machine under load is slow to start a worker; that is no GPU that hangs.
            kind = registry.load(name).Options
            patient = any(option.name == "deadline" for option in settable(kind))
            option = 'deadline = "60s"' if patient else "enabled = true"
            option = option if name in READ else "enabled = false"
            lines += [f"[collectors.{name}]", option]
        self.config = directory / "dshealthd.toml"
        self.config.write_text("\n".join(lines), encoding="utf-8")
        self.program("nvidia-smi", "exit 9")
        self.program("ibstat", "exit 9")
        # Without its site-packages, and so without torch; notes that it was started.
        note = f'echo "$2" >>{directory / "started"}'
        self.program("python", f'{note}; exec {sys.executable} -S -s "$@"')

    def program(self, name: str, script: str) -> None:
        """Put a program in the PATH before this machine's own."""
        shell_script(self.programs / name, script)

    def smi(self, gpus: int) -> None:
        """Have nvidia-smi list so many GPUs."""
        lines = "".join(f"GPU {number}: H100 (UUID: GPU-{number})\\n" for number in range(gpus))
        models = "NVIDIA H100 80GB HBM3, 570.1\\n" * gpus
        self.program("nvidia-smi", f'[ "$1" = -L ] && printf "{lines}" || printf "{models}"')

    def check(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        path = f"{self.programs}:{self.environment['PATH']}"
        return subprocess.run(
            [
                *(sys.executable, "-m", "tests.hardware", "--config.file", str(self.config)),
                *("--python", str(self.programs / "python"), *arguments),
            ],
            cwd=ROOT,
            env=self.environment | {"PATH": path},
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )


def rows(output: str) -> Mapping[str, tuple[str, str]]:
    """Return result and finding of each item, from the block that is to be pasted."""
    cells = [line.split(" | ") for line in output.splitlines() if line.startswith("| ")]
    return {row[1]: (row[2], row[3].removesuffix(" |")) for row in cells[1:]}


def test_no_gpu(tmp_path: Path) -> None:
    """Without a GPU it says so, starts nothing, prints no block to paste, and exits with 3."""
    node = Node(tmp_path, 0)
    done = node.check()
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith("No NVIDIA GPU on this node")
    assert "docs/hardware.md" not in done.stdout
    assert not (tmp_path / "started").exists()


def test_bus_that_cannot_be_read(tmp_path: Path) -> None:
    """Where the PCI bus cannot be read, whether there is a GPU is unknown; that is no 0 either."""
    node = Node(tmp_path, 0)
    (tmp_path / "sys/bus/pci/devices").rmdir()
    (tmp_path / "sys/bus/pci/devices").touch()
    done = node.check()
    assert done.returncode == 3
    assert done.stdout.startswith("Whether this node has an NVIDIA GPU is unknown")
    assert "gpu_bus" in done.stderr


def test_idle_gpus(tmp_path: Path) -> None:
    """GPUs that are as they should be: 0, and what could not run says why. The probe is announced
    and tried; its interpreter has no torch.
    """
    node = Node(tmp_path, 4)
    node.smi(4)
    done = node.check()
    found = rows(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    as_expected = {
        "GPUs and driver, here": "4 x NVIDIA H100 80GB HBM3, 570.1",
        "every GPU is there and up": "NVML 4, PCI bus 4, nvidia-smi -L: 4",
        "the doctor finds nothing": "nothing",
    }
    assert {name: found[name] for name in as_expected} == {
        name: ("ran, as expected", text) for name, text in as_expected.items()
    }
    assert found["NVML answers all calls"][0] == "ran, as expected"
    for name in ("torch, CUDA, NCCL, here", "InfiniBand ports are up", "a stopped rank is named"):
        assert found[name][0] == "could not run"
    assert "--- Next: all-reduces" in done.stdout
    result, why = found["a collective within the node"]
    assert (result, why[:8]) == ("could not run", "no_torch")
    assert found["a collective between the nodes"] == ("could not run", "no --peer was named")
    assert f"dshealthd {__version__}" in done.stdout


@pytest.mark.parametrize(("what", "why"), [
    ("", ""),
    ("process", "busy_gpu"),
    ("utilization", "GPU 1 is at work"),
    ("training", "a training runs"),
])  # fmt: skip
def test_why_no_collective_may_run(
    tmp_path: Path, what: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is in use, by what NVML names or by what it does not, or may be soon."""
    node = Node(tmp_path, 2)
    if what == "process":
        node.simulator.set(1, "processes", f"{os.getpid()}:1000000")
    elif what == "utilization":
        node.simulator.set(1, "utilization_gpu", 40)
    elif what == "training":
        _training(tmp_path / "proc/4711")
    for name, value in node.simulator.environment().items():
        monkeypatch.setenv(name, value)
    found = objection(look(node.config))
    assert why in found
    assert bool(found) == bool(why)


def test_busy_gpus(tmp_path: Path) -> None:
    """No collective is run, nor announced, where a GPU is in use; what reads goes on."""
    node = Node(tmp_path, 2)
    node.smi(2)
    node.simulator.set(1, "utilization_gpu", 40)
    done = node.check()
    found = rows(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["a collective within the node"][0] == "could not run"
    assert "GPU 1 is at work" in found["a collective within the node"][1]
    assert "--- Next" not in done.stdout
    # Asked for the version of torch, and nothing else.
    assert (tmp_path / "started").read_text() == f"{TORCH}\n"
    assert found["every GPU is there and up"][0] == "ran, as expected"


def _training(process: Path) -> None:
    """Write the `/proc` of a rank that torchrun started."""
    process.mkdir()
    stat = f"4711 (python) S 1 4711 4711 0 -1 0 {'0 ' * 12}1 0 5000 {'0 ' * 30}"
    (process / "stat").write_text(stat)
    (process / "environ").write_bytes(
        b"RANK=0\0LOCAL_RANK=0\0WORLD_SIZE=2\0MASTER_ADDR=n1\0MASTER_PORT=29500\0"
        b"TORCHELASTIC_RUN_ID=one\0"
    )
    (process / "cmdline").write_bytes(b"python\0train.py\0")


def test_lost_gpu(tmp_path: Path) -> None:
    """A GPU that NVML cannot read, and one that nvidia-smi does not list, are not as expected:
    1.
    """
    node = Node(tmp_path, 4)
    node.smi(3)
    node.simulator.fault("fail", 15, gpu=2)
    done = node.check("--read-only")
    result, text = rows(done.stdout)["every GPU is there and up"]
    assert done.returncode == 1
    assert result == "ran, NOT as expected"
    assert "1 of NVML's GPUs are not up" in text
    assert "nvidia-smi lists another number" in text
    assert rows(done.stdout)["a collective within the node"][1] == "left out by --read-only"


def test_no_driver(tmp_path: Path) -> None:
    """GPUs on the bus that no driver shows are not as expected, not none."""
    node = Node(tmp_path, 2)
    node.simulator.hide_library()
    done = node.check("--read-only")
    assert done.returncode == 1
    assert rows(done.stdout)["every GPU is there and up"][1].startswith("the PCI bus has 2 GPUs")


def test_peer(tmp_path: Path) -> None:
    """The other node is asked by SSH, and the block names it only as the peer."""
    node = Node(tmp_path, 2)
    node.smi(2)
    node.program("ssh", 'echo "$*" >>"$0.asked"; echo "no route to node-b" >&2; exit 255')
    done = node.check("--read-only", "--peer", "node-b", "--ssh", str(node.programs / "ssh"))
    block = done.stdout.partition("For docs/hardware.md")[2]
    gpus = rows(block)["GPUs and driver, peer"]
    assert gpus == ("could not run", "exit status 255: no route to peer")
    result, why = rows(block)["the doctor finds nothing, on both nodes"]
    assert (result, "not reachable over SSH" in why) == ("could not run", True)
    assert done.returncode == 0, done.stdout
    assert "node-b" not in block
    assert rows(block)["a collective between the nodes"][1] == "left out by --read-only"
    asked = (node.programs / "ssh.asked").read_text().splitlines()
    assert all("BatchMode=yes" in line for line in asked)
    assert any("-- node-b nvidia-smi --query-gpu=name,driver_version" in line for line in asked)


def _probed(outcome: str, backend: str = "nccl", reason: str = "", status: int = 0) -> Ran:
    timing = {"op": "all_reduce", "size": 64 << 20, "seconds": 0.0004, "busbw": 3e11}
    document = {
        "outcome": outcome,
        "reason": reason,
        "backend": backend,
        "timings": [timing, timing | {"size": 8, "seconds": 2e-5}],
    }
    return Ran(status, json.dumps(document), "no message")


@pytest.mark.parametrize(("answer", "state", "text"), [
    (
        _probed("ok"), State.EXPECTED,
        "all-reduce of 67108864 bytes at 300.00 GB/s bus bandwidth, of 8 bytes in 20 µs",
    ),
    (_probed("corrupted", status=8), State.UNEXPECTED, "corrupted; all-reduce"),
    (_probed("hung", reason="no_answer", status=7), State.UNEXPECTED, "hung; all-reduce"),
    (_probed("declined", reason="busy_gpu", status=3), State.NOT_RUN, "declined: busy_gpu"),
    (_probed("unreachable", status=4), State.NOT_RUN, "unreachable: no reason given"),
    (_probed("ok", "gloo"), State.NOT_RUN, "no GPU was used, but gloo"),
    (_probed("ok", ""), State.NOT_RUN, "no GPU was used, but an echo"),
    (_probed("failed", reason="no_torch", status=1), State.NOT_RUN, "no_torch: --python"),
    (Ran(2, "", "probe.peer: no key"), State.NOT_RUN, "exit status 2: probe.peer: no key"),
    (Ran(1, "", "a traceback"), State.UNEXPECTED, "it printed no result"),
    (Ran(1, "[]", "a traceback"), State.UNEXPECTED, "it printed no result"),
    (Ran(problem="hung: no answer", hung=True), State.UNEXPECTED, "hung: no answer"),
])  # fmt: skip
def test_outcome_of_a_probe(answer: Ran, state: State, text: str) -> None:
    """Only a collective over NCCL counts as run; one that was declined shows nothing, good or
    bad.
    """
    item = judge("a collective", "dshealthd probe", answer)
    assert item.state is state
    assert item.text.startswith(text)


def test_text_of_others_is_safe() -> None:
    """What a program printed neither breaks the table nor sends controls to a terminal."""
    item = ran("one", "two", "a|b\n\x1b[31mred" + "x" * 1000)
    assert item.row(1).count(" | ") == 3
    assert "\x1b" not in item.line(1) + item.row(1)
    assert len(item.row(1)) < 600


def test_wrong_configuration(tmp_path: Path) -> None:
    """A mistake in the configuration names its key and exits with 2."""
    node = Node(tmp_path, 0)
    node.config.write_text("[probe]\nperiod = 'x'\n", encoding="utf-8")
    done = node.check()
    assert done.returncode == 2
    assert "probe.period" in done.stderr
