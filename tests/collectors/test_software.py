"""Versions and fingerprints: of a small machine with a job in a container, and of this one."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.collectors import software
from dshealthd.collectors.software import (
    Software,
    fingerprint,
    parse_command_line,
    parse_configuration,
    parse_os_release,
)
from dshealthd.core.collector import Reason
from dshealthd.core.options import Errors, decode
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.jobs.environment import launch
from dshealthd.jobs.processes import TrainingProcess
from tests.collectors.bench import FIXTURES, Bench, Values, child, copied, reasons, values, write
from tests.jobs.machines import TORCH


def versions(result: CollectionResult) -> dict[tuple[str, str, str], str]:
    """Return versions by component, environment and job."""
    return {
        (component, environment, job): version
        for component, version, environment, job in values(result, software.INFO)
    }


def fingerprints(result: CollectionResult) -> Values:
    """Return fingerprints by component, environment and job."""
    return values(result, software.FINGERPRINT)


def sweep(base: Path, *environments: str) -> CollectionResult:
    """Collect once."""
    return Bench("software", base, environments=tuple(map(Path, environments))).collect()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the fixture, to change."""
    return copied("software", tmp_path)


def test_this_node() -> None:
    """Kernel, system and this interpreter's environment are those of this machine."""
    result = Bench("software", environments=(Path(sys.prefix),)).collect()
    found = versions(result)
    assert result.outcome is CollectionOutcome.OK
    assert found["kernel", "", ""] == os.uname().release
    assert found["os", "", ""].startswith(platform.freedesktop_os_release()["ID"])
    assert found["python", sys.prefix, ""] == platform.python_version()


def test_real_job() -> None:
    """A real process of a launcher is asked what it runs with, through its own root."""
    variables = {**os.environ, **TORCH, "SLURM_JOB_ID": str(os.getpid())}
    with child("", env=variables):
        result = Bench("software").collect()
    assert versions(result)["python", "", f"slurm-{os.getpid()}"] == platform.python_version()


def test_same_software_has_the_same_fingerprint(base: Path) -> None:
    """Two nodes that differ in their own disks, boot and comments only have equal fingerprints."""
    (base / "proc/cmdline").write_text(
        "root=/dev/nvme0n1p2 BOOT_IMAGE=x hugepages=1024 quiet iommu=pt ro\n"
    )
    (base / "root/etc/nccl.conf").write_text("NCCL_SOCKET_IFNAME=bond0\n\nNCCL_IB_HCA=mlx5\n")
    whole = FIXTURES / "software"
    assert fingerprints(sweep(base, "/opt/venv")) == fingerprints(sweep(whole, "/opt/venv"))


@pytest.mark.parametrize(("file", "text", "component"), [
    ("proc/sys/kernel/osrelease", "6.8.0-31-generic\n", "kernel"),
    (
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n", "driver",
    ),
    ("proc/driver/nvidia/params", "EnableMSI: 0\n", "driver_parameters"),
    ("proc/cmdline", "iommu=off\n", "kernel_command_line"),
    ("proc/sys/kernel/numa_balancing", "1\n", "sysctl"),
    ("root/etc/nccl.conf", "NCCL_IB_DISABLE=1\n", "nccl_configuration"),
])  # fmt: skip
def test_drift(base: Path, file: str, text: str, component: str) -> None:
    """What differs between nodes changes the fingerprint of its component, and no other."""
    (base / file).write_text(text)
    before, after = fingerprints(sweep(FIXTURES / "software")), fingerprints(sweep(base))
    assert {key[0] for key, value in after.items() if before[key] != value} == {component}


@pytest.mark.parametrize("own", [
    "root=UUID=0a1b ip=10.0.0.1::::n1:eth0:none rd.luks.uuid=0a1b", "BOOTIF=01-aa",
    "systemd.machine_id=0a1b", "systemd.hostname=n1", "wwid=aa:bb:cc:00:00:01",
    "boot=UUID=0a1b ostree=/ostree/boot.1/rhcos/5c2d/0",
])  # fmt: skip
def test_a_node_s_own_arguments(own: str) -> None:
    """Names, addresses and disks of a node are no difference to the others."""
    common = "quiet systemd.unified_cgroup_hierarchy=1 iommu=pt"
    assert parse_command_line(f"{own} {common}") == " ".join(sorted(common.split()))


def test_upgrade_is_noticed(base: Path) -> None:
    """Packages and environments that change while the agent runs show their new versions."""
    node = Bench("software", base, environments=(Path("/opt/venv"),))
    node.collect()
    site = base / "root/opt/venv/lib/python3.10/site-packages"
    (site / "deepspeed-0.14.4.dist-info").rename(site / "deepspeed-0.15.0.dist-info")
    link = base / "root/usr/lib64/libibverbs.so.1"
    link.unlink()
    link.symlink_to("libibverbs.so.1.14.59.0")
    found = versions(node.collect())
    assert found["deepspeed", "/opt/venv", ""] == "0.15.0"
    assert found["rdma_core", "", ""] == "59.0"


def test_without_driver_and_fabric(base: Path) -> None:
    """On a machine without GPU and InfiniBand their components are left out, without an error."""
    for path in ("proc/driver", "sys", "root/usr", "root/etc"):
        shutil.rmtree(base / path)
    result = sweep(base)
    assert (result.outcome, result.faults) == (CollectionOutcome.OK, ())
    assert {component for component, _, job in versions(result) if not job} == {"kernel"}
    assert fingerprints(result)["nccl_configuration", "", ""] == fingerprint("")


@pytest.mark.parametrize(
    ("content", "told"), [("1", "enforcing"), ("0", "permissive"), (None, "disabled")]
)
def test_selinux(base: Path, content: str | None, told: str) -> None:
    """Whether SELinux enforces is told, so that a node that differs is seen."""
    place = base / "sys/fs/selinux"
    place.mkdir(parents=True)
    if content is not None:
        (place / "enforce").write_text(content, encoding="utf-8")
    assert versions(sweep(base))["selinux", "", ""] == told


def test_other_sources(base: Path) -> None:
    """Without its first source, the driver's version comes from its module; so does the system's
    from the distribution's own file.
    """
    write(base / "root/usr/lib", {"os-release": "ID=other"})
    assert versions(sweep(base))["os", "", ""] != "other"
    (base / "root/etc/os-release").unlink()
    assert versions(sweep(base))["os", "", ""] == "other"
    shutil.rmtree(base / "proc/driver")
    assert versions(sweep(base))["driver", "", ""] == "550.54.15"


def test_configured_environment_that_is_not_there() -> None:
    """A configured environment without a Python is a fault; the others are told."""
    result = sweep(FIXTURES / "software", "/missing", "/opt/venv")
    assert reasons(result) == {"environment /missing": Reason.NOT_FOUND}
    assert ("torch", "/opt/venv", "") in versions(result)


def test_hung_environment() -> None:
    """An environment on a file system that hung is left out, with its fault."""
    node = Bench("software", FIXTURES / "software", environments=(Path("/opt/venv"),))
    node.hung = {"environment /opt/venv": Reason.TIMEOUT}
    result = node.collect()
    assert reasons(result) == node.hung
    assert {environment for _, environment, _ in versions(result)} == {""}
    assert {"job slurm-123", "driver", "rdma_core", "process 5100"} <= set(node.entered)


def test_damaged_driver_file(base: Path) -> None:
    """A driver whose file says no version is a fault: there is one, and it is unknown."""
    (base / "proc/driver/nvidia/version").write_text("NVRM version: \n")
    result = sweep(base)
    assert reasons(result) == {"driver": Reason.MALFORMED}
    assert "driver" not in {component for component, _, _ in versions(result)}


def test_library_replaced_under_a_job(base: Path) -> None:
    """A job whose NCCL was upgraded on disk is a fault."""
    maps = base / "proc/5100/maps"
    maps.write_text(maps.read_text().replace("libnccl.so.2", "libnccl.so.2 (deleted)"))
    result = sweep(base)
    assert reasons(result) == {"job slurm-123": Reason.NOT_FOUND}
    assert not [job for _, _, job in versions(result) if job]


def test_loaded_libraries_are_asked_for_once(base: Path) -> None:
    """Mappings are read until torch is there, and then no more in the life of the process."""
    node = Bench("software", base)
    first = versions(node.collect())
    (base / "proc/5100/maps").write_text("")
    assert versions(node.collect()) == first


def test_processes_that_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of a job."""
    searched, place = list[str](), launch(TORCH)
    assert place is not None

    def ended(where: str) -> NoReturn:
        searched.append(where)
        raise FileNotFoundError

    monkeypatch.setattr(software, "libraries", ended)
    members = [TrainingProcess(pid, 7, 0, "run-1", place, {}) for pid in range(1, 10)]
    Bench("software").collector._job(members, {})
    assert len(searched) == 8


def test_ended_job(base: Path) -> None:
    """A job whose process vanishes while it is looked at has no versions, and is no fault."""
    (base / "proc/5100/maps").unlink()
    result = sweep(base)
    assert result.faults == ()
    assert not [job for _, _, job in versions(result) if job]


def test_nothing_can_be_read(tmp_path: Path) -> None:
    """If all that there is cannot be read, the collector as a whole is down."""
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    for path in ("proc/sys/kernel/osrelease", "proc/cmdline", "proc/sys/vm", "proc/driver"):
        (tmp_path / path).symlink_to(Path(path).name)  # ELOOP
    (tmp_path / "root").symlink_to("root")
    (tmp_path / "sys").symlink_to("sys")
    result = sweep(tmp_path)
    assert (result.outcome, result.samples) == (CollectionOutcome.ERROR, ())


def test_relative_environment_is_refused() -> None:
    """The config says which environment is no absolute path."""
    errors = Errors()
    decode(Software.Options, {"environments": ["venv", "/opt/venv"]}, "collectors.software", errors)
    assert errors == ["collectors.software.environments: venv must be an absolute path"]


@given(st.text())
def test_any_text(text: str) -> None:
    """No text makes a parser fail; a float holds every fingerprint exactly."""
    parse_os_release(text)
    for settings in (parse_command_line(text), parse_configuration(text)):
        number = fingerprint(settings)
        assert int(float(number)) == number < 1 << 48
