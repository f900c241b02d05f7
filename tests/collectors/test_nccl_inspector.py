"""Inspector files of jobs on this node.

Found, taken if fresh and their job's own, dropped and counted otherwise.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collectors import nccl_inspector
from dshealthd.collectors.nccl_inspector import NcclInspector
from dshealthd.core.collector import Reason
from dshealthd.core.exposition import render
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, CollectionResult
from tests.collectors.bench import Bench, Values, reasons, values
from tests.jobs.machines import TORCH, Machine
from tests.jobs.nccl.inspector_plugin import UUID, file_name, line
from tests.stopwatch import Stopwatch

OTHER = "00000000-0000-0000-0000-00000000000b"
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


class Node(Bench):
    """A node with a rank whose file system is a directory, in which it has /dump for the
    Inspector.
    """

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__("nccl_inspector", root, **options)
        self.machine = Machine(root / "proc")
        self.inside = root / "container"
        self.dump = self.inside / "dump"
        self.dump.mkdir(parents=True)

    def rank(self, pid: int = 50, path: str = "/dump", **variables: str) -> None:
        """Start a rank that names a directory."""
        directory = self.machine.process(
            pid, {**TORCH, "NCCL_INSPECTOR_DUMP_DIR": path, **variables}
        )
        (directory / "root").symlink_to(self.inside)
        (directory / "cwd").symlink_to(self.inside)

    def gpus(self, *uuids: str) -> None:
        """Have the driver tell of these GPUs."""
        for number, uuid in enumerate(uuids):
            slot = self.machine.root / f"driver/nvidia/gpus/0000:{number:02x}:00.0"
            slot.mkdir(parents=True)
            (slot / "information").write_text(
                f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{uuid}\nVideo BIOS: \t 96.00\n"
            )

    def write(self, text: str, uuid: str = UUID, age: float = 10.0) -> Path:
        """Write a GPU's file."""
        place = self.dump / file_name(uuid)
        place.write_text(text)
        os.utime(place, (time.time() - age,) * 2)
        return place


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node without ranks."""
    return Node(tmp_path)


def files(result: CollectionResult) -> dict[str, float]:
    """Return what became of files, without what there is none of."""
    found = values(result, nccl_inspector.FILES)
    return {state: count for (state,), count in found.items() if count}


def bandwidths(result: CollectionResult) -> Values:
    """Return the bandwidths in GB/s."""
    found = values(result, nccl_inspector.BANDWIDTH)
    return {labels: speed / 1e9 for labels, speed in found.items()}


@pytest.mark.parametrize("has_plugin", [True, False])
def test_where_the_switch_of_a_site_has_files_written(tmp_path: Path, *, has_plugin: bool) -> None:
    """A rank that names no directory has the one of its user, if the site has the plugin."""
    node = Node(tmp_path)
    plugin = Path(node.context.host.root(nccl_inspector.SITE_PLUGIN))
    assert plugin.is_relative_to(tmp_path)
    plugin.parent.mkdir(parents=True)
    if has_plugin:
        plugin.touch()
    place = node.inside / (nccl_inspector.SITE_DIRECTORY % os.getuid()).lstrip("/")
    place.mkdir(parents=True, mode=0o700)
    node.dump = place
    node.rank(path="")
    node.write(line(400, 1000))
    assert files(node.collect()) == ({"taken": 1} if has_plugin else {})


def test_exposition(node: Node) -> None:
    """A rank's file becomes series in base units, under the name of its job and the UUID that NVML
    has.
    """
    node.rank(SLURM_JOB_ID="12")
    place = node.write(
        line(400, 1000, job="12")
        + line(20, 50, operation="Send", ranks="8", nodes="1", message="1-2MB")
    )
    os.utime(place, (1000, int(time.time())))
    result = node.collect()
    text = render(result.samples)
    prefix = "dshealthd_job_nccl_"
    large = (
        f'{{message="256MiB-",nodes="2",operation="AllReduce",size="16",'
        f'training_job="slurm-12",uuid="GPU-{UUID}"}}'
    )
    small = (
        f'{{message="1MiB-16MiB",nodes="1",operation="Send",size="8",'
        f'training_job="slurm-12",uuid="GPU-{UUID}"}}'
    )
    assert f"\n{prefix}bus_bandwidth_bytes_per_second{large} 4e+11\n" in text
    assert f"\n{prefix}operation_seconds{small} 5e-05\n" in text


def test_stale(node: Node) -> None:
    """Old numbers are not healthy numbers."""
    node.rank()
    place = node.write(line(400, 1000), age=121)
    node.write(line(400, 1000), OTHER, age=-3600)
    result = node.collect()
    assert (bandwidths(result), files(result)) == ({}, {"stale": 2})
    os.utime(place)
    assert files(node.collect()) == {"taken": 1, "stale": 1}


@pytest.mark.parametrize(("first", "second", "shown"), [(20, 10, 400), (10, 20, 300)])
def test_two_files_of_a_gpu(node: Node, first: float, second: float, shown: float) -> None:
    """Of two that tell of one operation, that counts which was written last."""
    node.rank()
    node.write(line(300, 1000), age=first)
    node.dump = node.inside / "other"
    node.dump.mkdir()
    node.rank(51, path="/other")
    node.write(line(400, 1000), age=second)
    assert [*bandwidths(node.collect()).values()] == [shown]


def test_directory_named_twice(node: Node) -> None:
    """A directory that several processes name is read once."""
    node.rank()
    node.rank(51)
    node.rank(52, path="./dump/")
    node.write(line(400, 1000))
    result = node.collect()
    assert files(result) == {"taken": 1}
    assert {labels[0][:4] for labels in bandwidths(result)} == {"run-"}


def test_job_of_another_owner(node: Node) -> None:
    """A file that names a Slurm job of which its owner has no process here is not shown as that
    job's, but as its owner's only one; of one that has, as that job's.
    """
    node.rank(SLURM_JOB_ID="12")
    node.write(line(400, 1000, job="99"))
    assert {labels[0] for labels in bandwidths(node.collect())} == {"slurm-12"}
    node.rank(51, SLURM_JOB_ID="13")
    node.write(line(400, 1000, job="13"))
    assert {labels[0] for labels in bandwidths(node.collect())} == {"slurm-13"}


def test_shared_directory(node: Node) -> None:
    """In a directory that nodes share, this node's files are those of the GPUs that its driver
    tells, whatever host they name.
    """
    node.gpus(UUID)
    node.rank()
    node.write(line(400, 1000, node="container-7"))
    node.write(line(300, 1000), OTHER)
    result = node.collect()
    assert files(result) == {"taken": 1, "elsewhere": 1}
    assert {labels[1] for labels in bandwidths(result)} == {f"GPU-{UUID}"}


def test_shared_directory_without_driver(node: Node) -> None:
    """Where the driver tells nothing, the host's name in the file does."""
    node.rank()
    node.write(line(400, 1000, node="elsewhere"))
    result = node.collect()
    assert (bandwidths(result), files(result)) == ({}, {"elsewhere": 1})


def test_not_regular(node: Node, tmp_path: Path) -> None:
    """Links, FIFOs and directories are not opened."""
    node.rank()
    target = tmp_path / "secret"
    target.write_text(line(400, 1000))
    (node.dump / file_name()).symlink_to(target)
    os.mkfifo(node.dump / file_name(OTHER))
    (node.dump / file_name(OTHER.replace("b", "c"))).mkdir()
    watch = Stopwatch()
    result = node.collect()
    assert watch.seconds() < 1
    assert (bandwidths(result), files(result)) == ({}, {"irregular": 3})


@root_only
def test_foreign(node: Node) -> None:
    """A file of a user other than the rank's is not taken, whoever may write into the directory."""
    node.rank()
    os.chown(node.write(line(400, 1000)), NOBODY, NOBODY)
    result = node.collect()
    assert (bandwidths(result), files(result)) == ({}, {"foreign": 1})


@root_only
def test_owner_of_the_rank(node: Node) -> None:
    """The file of the user who runs the rank is taken from a directory that belongs to root."""
    node.rank()
    os.chown(node.machine.root / "50", NOBODY, NOBODY)
    os.chown(node.write(line(400, 1000)), NOBODY, NOBODY)
    assert files(node.collect()) == {"taken": 1}


@pytest.mark.parametrize(
    "path", ["dump", "/link", "/link/dump/..", "/away/../dump/", "/../../dump"]
)
def test_links_and_parents_stay_inside(node: Node, path: str) -> None:
    """A relative path, links and `..` lead where they lead for the process."""
    (node.inside / "link").symlink_to("/dump")
    (node.dump / "dump").mkdir()
    (node.inside / "away").mkdir()
    node.rank(path=path)
    node.write(line(400, 1000))
    assert files(node.collect()) == {"taken": 1}


def test_a_link_does_not_leave_the_container(node: Node, tmp_path: Path) -> None:
    """A link to a directory of the host is one to the container's own, which is not there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / file_name()).write_text(line(400, 1000))
    (node.inside / "link").symlink_to(outside)
    (node.inside / "up").symlink_to("../outside")
    node.rank(path="/link")
    node.rank(51, path="/up")
    assert node.collect().outcome is CollectionOutcome.NOT_AVAILABLE


def test_files_left_out(tmp_path: Path) -> None:
    """Files too large are not read, more files than are read are left out; all are counted."""
    node = Node(tmp_path)
    node.rank()
    for number in range(66):
        node.write(
            line(400, 1000, ranks=str(number + 2)), f"{number:08x}-0000-0000-0000-000000000000"
        )
    for number, size in enumerate((262_144, 262_145)):
        text = line(400, 1000).ljust(size)
        node.write(text, f"{number:08x}-0000-0000-0000-000000000000")
    result = node.collect()
    assert files(result) == {"taken": 63, "too_large": 1, "left_out": 2}


def test_directories_left_out(node: Node) -> None:
    """Of 33 that processes name, 32 are read."""
    for number in range(33):
        node.dump = node.inside / str(number)
        node.dump.mkdir()
        node.rank(100 + number, path=f"/{number}")
        node.write(line(400, 1000))
    assert files(node.collect()) == {"taken": 32}


def test_operations_left_out(node: Node) -> None:
    """Of more operations than have series, those of most ranks have them."""
    node.rank()
    node.write("".join(line(1, 1, ranks=str(ranks)) for ranks in range(2, 516)))
    result = node.collect()
    assert {int(labels[3]) for labels in bandwidths(result)} == {*range(4, 516)}


def test_not_there_yet(node: Node) -> None:
    """A directory that the plugin has not made yet is no fault."""
    node.rank(path="/not/yet")
    result = node.collect()
    assert (result.outcome, result.faults, result.samples) == (
        CollectionOutcome.NOT_AVAILABLE,
        (),
        (),
    )


def test_hung_directory(node: Node) -> None:
    """A directory under quarantine is a fault, and the others are read."""
    node.rank()
    node.write(line(400, 1000))
    (node.inside / "nfs").mkdir()
    node.rank(60, path="/nfs", SLURM_JOB_ID="9")
    node.hung["inspector /nfs"] = Reason.TIMEOUT
    result = node.collect()
    assert files(result) == {"taken": 1}
    assert reasons(result) == node.hung


def test_no_descriptor_is_left(node: Node) -> None:
    """However a collection ends, it leaves nothing open."""
    node.rank()
    node.rank(51, path="/dump/../x")
    node.write(line(400, 1000))
    node.rank(52, path="/not/yet")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        node.collect()
    samples = node.collector.collect()
    next(samples)
    del samples
    assert len(os.listdir("/proc/self/fd")) == before


def test_absent() -> None:
    """A machine without NVIDIA's driver has no NCCL, and is asked for nothing."""
    nowhere = Path("/nowhere")
    assert (
        NcclInspector.absent(NcclInspector.Options(), Host(dev=nowhere, sysfs=nowhere)) is not None
    )
