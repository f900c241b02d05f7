"""Ranks in containers over one image: one library on disk, a file system and processes of each."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launches import libraries
from tests.jobs.launches.machine import MARKS, Machine
from tests.jobs.launches.service import run, text_of, wait
from tests.nccl.job import Job
from tests.processes import children

pytestmark = [
    *MARKS,
    pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here"),
]
MOUNT = 'mount -t overlay -o "lowerdir=$1:$2" overlay "$3"; shift 3; exec "$@"'


class Container:
    """Mounts and processes of its own; its image is seen at `place`, which the host has empty."""

    def __init__(self, image: Path, place: Path, own: Path, options: tuple[str, ...]) -> None:
        own.mkdir()
        self._command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *options]
        self._command += ["sh", "-ec", MOUNT, "sh", str(own), str(image), str(place)]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process in it."""
        return subprocess.Popen([*self._command, *command], **options)


def contained(job: Job) -> int:
    """Return the pid, on the host, of a job's only rank."""
    (child,) = children(job.ranks[0].pid)
    return child


@pytest.mark.parametrize("options", [(), ("--user", "--map-root-user")], ids=["root", "user"])
def test_two_containers_share_a_layer(options: tuple[str, ...], tmp_path: Path) -> None:
    """Each is counted for itself, and one that is not watched has no breakpoint."""
    image, place = libraries.build(tmp_path / "image"), tmp_path / "place"
    place.mkdir()
    library = place / "libnccl.so.2"
    with contextlib.ExitStack() as stack:
        jobs = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            container = Container(image, place, folder / "layer", options)
            jobs.append(stack.enter_context(Job(place, 1, folder, stations=[container])))
            jobs[-1].ranks[0].ask("sync")
        one, other = map(contained, jobs)
        machine = stack.enter_context(Machine(tmp_path, [jobs[0].ranks[0].pid, one]))
        machine.turn()
        for job, times in zip(jobs, (3, 5), strict=True):
            job.join()
            job.launch("world", "AllReduce", times)
        found = machine.turn()
        assert [rank["collectives"] for rank in found[one]["communicators"]] == [3]
        ((memory, file),) = text_of(other, library, {"ncclAllReduce"}).values()
        assert memory == file
        ((memory, file),) = text_of(one, library, {"ncclAllReduce"}).values()
        assert memory != file
        machine.add(jobs[1].ranks[0].pid, other)
        machine.turn()
        for job, times in zip(jobs, (7, 11), strict=True):
            job.launch("world", "AllReduce", times)
        found = machine.turn()
        assert found.keys() == {one, other}
        assert [rank["collectives"] for rank in found[one]["communicators"]] == [10]
        assert [rank["collectives"] for rank in found[other]["communicators"]] == [11]


def test_the_service_in_a_container_without_the_hosts_processes(tmp_path: Path) -> None:
    """The kernel's programs know pids of the host only, which is what the service then says."""
    service, output = run(tmp_path, Path("/proc"), "unshare", "--pid", "--fork", "--kill-child")
    try:
        found = wait(output, lambda found: found["refused"])
    finally:
        service.kill()
        service.wait(60)
    assert (found["refused"], "PID namespace" in found["detail"]) == ("unsupported", True), found
