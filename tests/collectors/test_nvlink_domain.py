"""The NVLink domain of a node's GPUs: registration, health, clique; IMEX where it spans nodes."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.processes import free_port
from dshealthd.core.collector import Reason
from dshealthd.linux import imex
from dshealthd.linux.nvswitch import ENABLED, FABRIC_MANAGER, SUBNET_MANAGER
from tests.collectors.bench import write
from tests.nvml.node import Node, nodes
from tests.waiting import until

node = nodes(gpus=2)

DOMAIN = "6f1c2d9a-5b3e-4870-a100-c3d4e5f60718"


def kernel(directory: Path) -> None:
    """Have `proc` be the kernel's first PID namespace, in which it starts pid 2."""
    (directory / "proc/2").mkdir(parents=True)
    (directory / "proc/2/comm").write_text("kthreadd\n")


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Node]:
    """Give the four GPUs of a GB200 node, whose processes are those of `tmp_path/proc`."""
    kernel(tmp_path)
    with Node(tmp_path, profile="gb200", gpus=4) as made:
        yield made


@pytest.mark.parametrize(("state", "status", "summary", "mask", "healthy", "problems"), [
    (3, 0, 1, 0x0, 1, set()),
    (3, 0, 1, 0x51AA, 1, set()),
    (3, 0, 0, 0x51AA, 1, set()),
    (3, 0, 0, 0xAA, 1, set()),
    (3, 0, 2, 0x0, 0, set()),
    (3, 0, 3, 0x51AA, 0, {"limited_capacity"}),
    (3, 999, 1, 0x0, 0, {"registration_failed"}),
    (3, 0, 0, 0x1, 0, {"degraded_bandwidth"}),
    (3, 0, 2, 0x55, 0, {"degraded_bandwidth", "route_recovery", "route_unhealthy",
    "access_timeout_recovery"}), (3, 0, 0, 0x2000, 0, {"no_partition_assigned"}),
    (3, 0, 2, 0xA4AA, 0, {"no_partition_assigned", "manager_disconnected", "no_partition"}),
    (3, 0, 0, 0x200, 0, {"incorrect_system_guid"}),
    (3, 0, 0, 0x300, 0, {"incorrect_chassis_serial"}),
    (3, 0, 0, 0x500, 0, {"insufficient_nvlinks"}),
    (3, 0, 0, 0x600, 0, {"incompatible_firmware"}),
    (3, 0, 0, 0x700, 0, {"invalid_location"}),
    (3, 0, 0, 0x800, 0, {"gpu_state_invalid"}),
    (3, 0, 0, 0x900, 0, {"incorrect_configuration"}),
    (3, 0, 2, 0x0F00, 0, {"incorrect_configuration"}),
    (2, 0, 1, 0x0, None, set()),
    (0, 0, 1, 0x0, None, set()),
])  # fmt: skip
def test_fabric(
    node: Node, state: int, status: int, summary: int, mask: int, healthy: int | None,
    problems: set[str],
) -> None:  # fmt: skip
    """The fabric is healthy by its own summary, or by its mask where there is none; what is wrong
    has a name of its own, and what it does not tell has none.
    """
    for key, value in {
        "state": state,
        "status": status,
        "health_summary": summary,
        "health_mask": mask,
    }.items():
        node.simulator.set(0, f"fabric_{key}", value)
    seen, labels = node.collect("nvlink_domain"), {"gpu": "0", "uuid": node.uuid(0)}
    assert seen.value("gpu_fabric_state", gpu="0") == state
    assert seen.values("gpu_fabric_healthy", **labels) == ({} if healthy is None else {(): healthy})
    assert {problem for (problem,) in seen.values("gpu_fabric_problem", **labels)} == problems


def test_driver_without_a_fabric(node: Node) -> None:
    """A driver that knows of no fabric is a machine without one: nothing is said, and no fault."""
    node.simulator.fault("fail", 13, function="nvmlDeviceGetGpuFabricInfoV")
    seen = node.collect("nvlink_domain")
    assert seen.results["nvlink_domain"].samples == ()
    assert not seen.reasons("nvlink_domain")


def test_fabric_of_one_node(node: Node) -> None:
    """A fabric of one node has no cluster UUID, so no domain, and IMEX is not looked for."""
    seen = node.collect("nvlink_domain")
    assert seen.value("gpu_fabric_state", gpu="0") == 3
    assert not seen.values("nvlink_domain_info")
    assert not seen.values("imex_nodes")


def test_domain_of_several_nodes(rack: Node) -> None:
    """GPUs of a GB200 tell their domain and clique; one that lost them is the only one without."""
    seen = rack.collect("nvlink_domain")
    assert set(seen.values("nvlink_domain_info")) == {
        (str(gpu), rack.uuid(gpu), DOMAIN, "32766") for gpu in range(4)
    }
    rack.simulator.set(2, "fabric_cluster_uuid", "0" * 32)
    rack.simulator.set(3, "fabric_clique", 7)
    seen = rack.collect("nvlink_domain")
    assert {labels[0]: labels[3] for labels in seen.values("nvlink_domain_info")} == {
        "0": "32766",
        "1": "32766",
        "3": "7",
    }


def test_gpu_without_a_clique(rack: Node) -> None:
    """In a fabric of several nodes, a registered GPU of clique 0 reaches no other: a fault."""
    rack.simulator.set(1, "fabric_clique", 0)
    rack.simulator.set(2, "fabric_clique", 0)
    rack.simulator.set(2, "fabric_cluster_uuid", "0" * 32)
    seen = rack.collect("nvlink_domain")
    assert {gpu: seen.value("gpu_fabric_healthy", gpu=gpu) for gpu in "0123"} == {
        "0": 1,
        "1": 0,
        "2": 1,
        "3": 1,
    }
    assert set(seen.values("gpu_fabric_problem")) == {("1", rack.uuid(1), "no_clique")}
    assert {labels[0] for labels in seen.values("nvlink_domain_info")} == {"0", "3"}
    assert seen.values("imex_nodes")


@contextmanager
def daemon(directory: Path, name: str = imex.DAEMON) -> Iterator[int]:
    """Run a process of a daemon's name; its pid."""
    program = directory / name
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "3600"]) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == name[:15])
            (directory / f"proc/{process.pid}").symlink_to(f"/proc/{process.pid}")
            yield process.pid
        finally:
            process.kill()


def configure(directory: Path, port: int, *nodes: str) -> None:
    """Write the files of IMEX."""
    place = directory / "root/etc/nvidia-imex"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.cfg").write_text(
        f"# of the service\nSERVER_PORT={port}\nIMEX_NODE_CONFIG_FILE={imex.NODES}\n"
    )
    (place / "nodes_config.cfg").write_text("".join(f"{node}\n" for node in nodes))


def test_imex(rack: Node, tmp_path: Path) -> None:
    """The service runs or not, listens or not; without nodes it is not judged."""
    seen = rack.collect("nvlink_domain")
    assert (seen.value("imex_nodes"), seen.value("imex_channels")) == (0, 0)
    assert not seen.values("imex_running")
    port = free_port()
    configure(tmp_path, port, "10.0.0.1", "10.0.0.2")
    channels = tmp_path / "dev" / imex.CHANNELS
    channels.mkdir(parents=True)
    (channels / "channel0").touch()
    seen = rack.collect("nvlink_domain")
    assert (seen.value("imex_nodes"), seen.value("imex_channels")) == (2, 1)
    assert seen.value("imex_running") == 0
    assert not seen.values("imex_listening")
    with daemon(tmp_path):
        seen = rack.collect("nvlink_domain")
        assert (seen.value("imex_running"), seen.value("imex_listening")) == (1, 0)
        with socket.create_server(("127.0.0.1", port)):
            assert rack.collect("nvlink_domain").value("imex_listening") == 1
        assert rack.collect("nvlink_domain").value("imex_listening") == 0
    for _ in itertools.repeat(None, 2):
        assert rack.collect("nvlink_domain").value("imex_running") == 0
    assert not rack.collect("nvlink_domain").reasons("nvlink_domain")


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")
def test_process_of_a_user_is_not_the_service(rack: Node, tmp_path: Path) -> None:
    """A user's process may have the service's name, and hides no fault by it."""
    configure(tmp_path, free_port(), "10.0.0.1", "10.0.0.2")
    other = tmp_path / "proc/4194304"
    other.mkdir()
    (other / "comm").write_text(f"{imex.DAEMON}\n")
    assert rack.collect("nvlink_domain").value("imex_running") == 1
    os.chown(other, 999, 999)  # an account of the system
    assert rack.collect("nvlink_domain").value("imex_running") == 1
    os.chown(other, 1000, 1000)
    assert rack.collect("nvlink_domain").value("imex_running") == 0


def test_imex_that_cannot_be_known(rack: Node, tmp_path: Path) -> None:
    """Hidden processes and a broken setting are faults, and no service that is down."""
    configure(tmp_path, 0, "10.0.0.1", "10.0.0.2")
    for hidden in ("sh\n", None):  # a container's; hidepid
        (tmp_path / "proc/2/comm").unlink()
        if hidden:
            (tmp_path / "proc/2/comm").write_text(hidden)
        seen = rack.collect("nvlink_domain")
        assert not seen.values("imex_running")
        assert seen.reasons("nvlink_domain") == {"imex": Reason.PERMISSION_DENIED}
    (tmp_path / "proc/2/comm").write_text("kthreadd\n")
    (tmp_path / "root/etc/nvidia-imex/config.cfg").write_text("SERVER_PORT=many\n")
    with daemon(tmp_path):
        seen = rack.collect("nvlink_domain")
    assert not seen.values("imex_listening")
    assert seen.reasons("nvlink_domain") == {"imex": Reason.MALFORMED}


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Node]:
    """Give two H100 of a board with NVSwitches."""
    kernel(tmp_path)
    with Node(tmp_path, gpus=2) as made:
        switch = made.sysfs / "bus/pci/devices/0000:20:00.0"
        switch.mkdir()
        (switch / "class").write_text("0x068000\n")
        (switch / "vendor").write_text("0x10de\n")
        yield made


def test_fabric_manager(board: Node, tmp_path: Path) -> None:
    """It runs or not, and is enabled or not; that it ends is seen although NVML shows no change."""
    with daemon(tmp_path, FABRIC_MANAGER):
        seen = board.collect("nvlink_domain")
    assert seen.values("fabric_manager_running") == {(FABRIC_MANAGER,): 1}
    assert seen.value("fabric_manager_enabled") == 0
    link = tmp_path / "root" / ENABLED
    link.parent.mkdir(parents=True)
    link.symlink_to("/usr/lib/systemd/system/nvidia-fabricmanager.service")
    ended = board.collect("nvlink_domain")
    assert ended.values("fabric_manager_running") == {(FABRIC_MANAGER,): 0}
    assert ended.value("fabric_manager_enabled") == 1
    assert ended.values("gpu_fabric_state") == seen.values("gpu_fabric_state")


def test_switches_of_a_virtual_machine(board: Node) -> None:
    """NVSwitches that are passed through are not managed by this node."""
    driver = board.sysfs / "bus/pci/drivers/vfio-pci"
    driver.mkdir(parents=True)
    (board.sysfs / "bus/pci/devices/0000:20:00.0/driver").symlink_to(driver)
    assert not board.collect("nvlink_domain").values("fabric_manager_running")


def test_fabric_manager_that_cannot_be_known(board: Node, tmp_path: Path) -> None:
    """Hidden processes, or a look that hung before, are faults; no daemon is down."""
    reason = {"Fabric Manager": Reason.STUCK}
    seen = board.collect("nvlink_domain", blocked=reason)
    assert not seen.values("fabric_manager_running")
    assert seen.reasons("nvlink_domain") == reason
    (tmp_path / "proc/2/comm").unlink()
    seen = board.collect("nvlink_domain")
    assert not seen.values("fabric_manager_running")
    assert seen.reasons("nvlink_domain") == {"Fabric Manager": Reason.PERMISSION_DENIED}


def test_managers_of_blackwell(rack: Node, tmp_path: Path) -> None:
    """Its switches are known by adapters, each read once, and need the subnet manager, too."""
    data = tmp_path / "sys/class/infiniband/mlx5_0/device/vpd"
    write(data.parent, {"vendor": "0x15b3"})
    data.write_bytes(b"\x82\x1e\x00NVIDIA ConnectX-7 ...\x78")
    assert not rack.collect("nvlink_domain").values("fabric_manager_running")  # NVL72's
    other = tmp_path / "sys/class/infiniband/ibp154s0f0/device/vpd"  # as udev may name it
    write(other.parent, {"vendor": "0x15b3"})
    other.write_bytes(b"\x82\x1e\x00NVIDIA ConnectX-7 ...SMDL=SW_MNG:\x78")
    with daemon(tmp_path, SUBNET_MANAGER):
        seen = rack.collect("nvlink_domain")
    running = {(SUBNET_MANAGER,): 1, (FABRIC_MANAGER,): 0}
    assert seen.values("fabric_manager_running") == running
    other.write_bytes(b"")
    assert rack.collect("nvlink_domain").values("fabric_manager_running") == dict.fromkeys(
        running, 0
    )


def test_vital_data_that_cannot_be_read(rack: Node, tmp_path: Path) -> None:
    """Whether switches are managed is unknown where GPUs are in a fabric, until they can be read;
    elsewhere nobody asks.
    """
    data = tmp_path / "sys/class/infiniband/mlx5_0/device/vpd"
    data.mkdir(parents=True)
    write(data.parent, {"vendor": "0x15b3"})
    reasons = {"Fabric Manager": Reason.IO_ERROR}
    for _ in itertools.repeat(None, 2):
        assert rack.collect("nvlink_domain").reasons("nvlink_domain") == reasons
    rack.simulator.set(None, "fabric_state", 0)
    assert not rack.collect("nvlink_domain").reasons("nvlink_domain")
    rack.simulator.set(None, "fabric_state", 3)
    data.rmdir()
    data.write_bytes(b"\x82\x1e\x00NVIDIA ConnectX-7 ...\x78")
    assert not rack.collect("nvlink_domain").reasons("nvlink_domain")
