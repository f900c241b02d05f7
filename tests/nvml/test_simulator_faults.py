"""Each fault of the simulated NVML, as the genuine pynvml and the kernel show it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.frozen import mounted
from tests.nvml.client import Client
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.frozen import Mount

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "gcc")) is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="NVML is simulated for Linux only"),
]

TEMPERATURE = "n.nvmlDeviceGetTemperature(h({}), 0)"
POWER = "n.nvmlDeviceGetPowerUsage(h({}))"
COUNT = "n.nvmlDeviceGetCount()"


@pytest.fixture
def simulator(tmp_path: Path) -> Simulator:
    """Eight H100."""
    return Simulator(tmp_path / "nvml")


@pytest.fixture
def client(simulator: Simulator) -> Iterator[Client]:
    """A process that has initialised NVML."""
    with Client(simulator) as client:
        yield client


CODES = {
    1: "Uninitialized",
    3: "NotSupported",
    4: "NoPermission",
    6: "NotFound",
    9: "DriverNotLoaded",
    10: "Timeout",
    13: "FunctionNotFound",
    15: "GpuIsLost",
    16: "ResetRequired",
    18: "LibRmVersionMismatch",
    999: "Unknown",
}


def test_any_code_for_any_call(client: Client, simulator: Simulator) -> None:
    """A function fails with each code as its own exception class, for one GPU or all, and recovers."""
    for code, name in CODES.items():
        simulator.fault("fail", code, function="nvmlDeviceGetTemperature")
        assert client.ask(TEMPERATURE.format(1)) == f"NVMLError_{name} {code}"
    assert client.ask(POWER.format(1)) == 305_000
    simulator.fault("fail", 0, gpu=3, function="nvmlDeviceGetTemperature")
    assert client.ask(TEMPERATURE.format(3)) == 38
    simulator.clear_faults()
    assert client.ask(TEMPERATURE.format(1)) == 36


def test_any_code_for_init(simulator: Simulator) -> None:
    """Init fails with each code, and succeeds in the same process when the fault is gone."""
    with Client(simulator, init=False) as client:
        assert client.ask(COUNT) == "NVMLError_Uninitialized 1"
        for code, name in CODES.items():
            simulator.fault("fail", code, function="init")
            assert client.ask("n.nvmlInit()") == f"NVMLError_{name} {code}"
        simulator.clear_faults()
        assert client.ask("n.nvmlInit()") is None
        assert client.ask(COUNT) == 8


def test_lost_gpu_leaves_seven(client: Client, simulator: Simulator) -> None:
    """A lost GPU refuses its handle and its values, outranks a fault of the function, and the other
    seven answer.
    """
    simulator.fault("fail", 15, gpu=3)
    simulator.fault("fail", 3, function="nvmlDeviceGetUUID")
    assert [client.ask(TEMPERATURE.format(gpu)) for gpu in (2, 3, 4)] == [
        37,
        "NVMLError_GpuIsLost 15",
        39,
    ]
    assert client.ask(COUNT) == 8
    assert client.ask("n.nvmlDeviceGetUUID(h(2))") == "NVMLError_NotSupported 3"


def test_patterns_and_versions(client: Client, simulator: Simulator) -> None:
    """A fault's function may be named without its version or by a pattern."""
    simulator.fault("fail", 4, function="nvmlDeviceGetCount")
    simulator.fault("fail", 10, function="nvmlDeviceGetNvLink*")
    assert client.ask(COUNT) == "NVMLError_NoPermission 4"
    assert client.ask("n.nvmlDeviceGetNvLinkState(h(0), 0)") == "NVMLError_Timeout 10"


def test_count_and_order_change(client: Client, simulator: Simulator) -> None:
    """A GPU that goes shifts the indices behind it, its handle is lost, and UUIDs still name the
    same GPUs.
    """
    uuids = [simulator.value(gpu, "uuid") for gpu in range(8)]
    assert client.ask("globals().update(old=h(2))") is None
    simulator.order(7, 0, 1, 3, 4, 5, 6)
    assert client.ask(f"[n.nvmlDeviceGetUUID(h(i)) for i in range({COUNT})]") == [
        uuids[i] for i in (7, 0, 1, 3, 4, 5, 6)
    ]
    assert client.ask("n.nvmlDeviceGetPowerUsage(old)") == "NVMLError_GpuIsLost 15"
    assert (
        client.ask(f"n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByUUID('{uuids[3]}'), 0)")
        == 38
    )
    assert client.ask(f"n.nvmlDeviceGetHandleByUUID('{uuids[2]}')") == "NVMLError_NotFound 6"
    simulator.order()
    assert client.ask(COUNT) == 8


def test_order_latched_until_init(client: Client, simulator: Simulator) -> None:
    """With order_latched a change of count waits for the next first init, as it does with the real
    library.
    """
    simulator.set(None, "order_latched", 1)
    simulator.order(0, 1)
    assert client.ask(COUNT) == 8
    assert client.ask("[n.nvmlShutdown(), n.nvmlInit(), n.nvmlDeviceGetCount()][-1]") == 2


@pytest.mark.parametrize(("how", "number"), [("segv", signal.SIGSEGV), ("abort", signal.SIGABRT)])
def test_crash(client: Client, simulator: Simulator, how: str, number: int) -> None:
    """A crash ends the process by its signal, at the call that it is armed for and not before."""
    simulator.fault("crash", how, gpu=5)
    assert client.ask(TEMPERATURE.format(4)) == 39
    client.tell(TEMPERATURE.format(5))
    assert client.process.wait(60) == -number


def test_hang_is_killable(client: Client, simulator: Simulator) -> None:
    """A hang never returns, sleeps interruptibly, spares the other GPUs' handles, and SIGKILL ends
    it.
    """
    simulator.fault("hang", gpu=2, function="nvmlDeviceGetTemperature")
    assert client.ask(POWER.format(2)) == 310_000
    client.tell(TEMPERATURE.format(2))
    assert not client.answered(0.5)
    client.until_state("S")
    client.process.kill()
    assert client.process.wait(60) == -signal.SIGKILL


def test_hang_in_init_leaves_other_threads(simulator: Simulator) -> None:
    """A call that hangs holds neither the interpreter nor the library.

    Another thread of the process goes on.
    """
    with Client(simulator) as client:
        simulator.fault("hang", gpu=0)
        assert (
            client.ask("__import__('threading').Thread(target=h, args=(0,), daemon=True).start()")
            is None
        )
        assert client.ask(TEMPERATURE.format(1)) == 36


def test_delay(client: Client, simulator: Simulator) -> None:
    """A delayed call takes its time, then answers with the value of the time of its end."""
    simulator.fault("delay", 2.0, function="nvmlDeviceGetTemperature")
    begin = time.monotonic()
    client.tell(TEMPERATURE.format(0))
    time.sleep(0.1)
    simulator.set(0, "temperature", 99)
    assert client.answer() == 99
    assert 1.9 < time.monotonic() - begin < 60


def test_no_driver_and_missing_scenario(simulator: Simulator) -> None:
    """Without driver every call answers 9; without scenario init does; both recover."""
    with Client(simulator, init=False) as client:
        moved = simulator.scenario.rename(simulator.directory / "away")
        assert client.ask("n.nvmlInit()") == "NVMLError_DriverNotLoaded 9"
        moved.rename(simulator.scenario)
        assert client.ask("n.nvmlInit()") is None
        simulator.set(None, "no_driver", 1)
        assert client.ask(COUNT) == "NVMLError_DriverNotLoaded 9"


def test_library_absent_then_appears(simulator: Simulator) -> None:
    """A library that is not installed is LibraryNotFound, and init works in the same process once
    it is.
    """
    simulator.hide_library()
    with Client(simulator, init=False) as client:
        assert client.ask("n.nvmlInit()") == "NVMLError_LibraryNotFound 12"
        simulator.show_library()
        assert client.ask("n.nvmlInit()") is None


def test_mismatch_needs_a_new_process(client: Client, simulator: Simulator) -> None:
    """After a driver upgrade init answers 18 in a process that has the old library, and works in a
    new one.
    """
    assert client.ask("n.nvmlShutdown()") is None
    simulator.set(None, "driver_version", "580.95.05")
    assert client.ask("n.nvmlInit()") == "NVMLError_LibRmVersionMismatch 18"
    with Client(simulator) as fresh:
        assert fresh.ask("n.nvmlSystemGetDriverVersion()") == "580.95.05"
        assert fresh.ask("n.nvmlSystemGetNVMLVersion()") == "13.580.95.05"


def test_handles_released(simulator: Simulator, tmp_path: Path) -> None:
    """The trace and the open device file show that the last shutdown, and only that, lets go of the
    driver.
    """
    device = tmp_path / "nvidiactl"
    device.touch()
    simulator.set(None, "device_file", str(device))
    simulator.watch()
    with Client(simulator) as client:
        held = f"[p for p in __import__('os').scandir('/proc/self/fd') if __import__('os').path.realpath(p.path) == '{device}'] != []"
        assert client.ask("n.nvmlInit()") is None
        assert client.ask("n.nvmlShutdown()") is None
        assert client.ask(held) is True
        assert client.ask("n.nvmlShutdown()") is None
        assert client.ask(held) is False
        assert client.ask("n.nvmlShutdown()") == "NVMLError_Uninitialized 1"
        pid = client.process.pid
    assert simulator.trace() == [
        ("init", pid, 1),
        ("init", pid, 2),
        ("shutdown", pid, 1),
        ("shutdown", pid, 0),
    ]
    assert simulator.calls() == {"nvmlInitWithFlags": 2, "nvmlShutdown": 3}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A file system that can be frozen."""
    with mounted(tmp_path) as mount:
        yield mount


def test_unkillable_until_thaw(client: Client, simulator: Simulator, mount: Mount) -> None:
    """On a frozen file system the call is in D state, SIGKILL waits with it, and a thaw lets
    another one go on.
    """
    simulator.fault("dstate", str(mount.directory / "written"), gpu=1)
    assert client.ask(TEMPERATURE.format(1)) == 36
    with Client(simulator) as killed:
        mount.freeze()
        for stuck in (client, killed):
            stuck.tell(TEMPERATURE.format(1))
            stuck.until_state("D")
            assert not stuck.answered(0.5)
        killed.process.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            killed.process.wait(0.5)
        mount.thaw()
        assert killed.process.wait(60) == -signal.SIGKILL
    assert client.answer() == 36
