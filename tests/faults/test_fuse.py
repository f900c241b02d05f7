"""A user's FUSE mount that hangs: number 63 of the fault catalogue."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dshealthd.config import registry
from dshealthd.core.host import Host
from dshealthd.evidence import stacks
from dshealthd.linux import forked, process_root
from dshealthd.linux.forked import Emit
from dshealthd.linux.mounts import parse_fuse
from tests.agents import Scrape, running
from tests.collectors.bench import sleeper
from tests.evidence.steps import DEADLINE, clock_ahead, take
from tests.fuse import PAGE, hung_mount
from tests.jobs.machines import TORCH
from tests.waiting import until

USER = 4321
CONFIG = "\n".join(
    f"[collectors.{name}]\n"
    + ("interval = '1s'\n" if kind.worker in {"storage", "logs"} else "enabled = false\n")
    for name, kind in registry.all_collectors().items()
)
LOOK = """
import os, sys
from pathlib import Path
from dshealthd.core.host import Host
from dshealthd.linux.process_root import Root
try:
    with Root.of_process(Host(), int(sys.argv[1])) as root:
        print(root.read(sys.argv[2]))
except PermissionError as error:
    print(error)
"""
WITHOUT_FDINFO = f"""
import os
def refuse(path, limit=0):
    raise PermissionError(13, "as before Linux 5.14", path)
from dshealthd.linux import mounts
mounts.read = refuse
{LOOK}
"""
MAP = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
file = os.open(sys.argv[1], os.O_RDONLY)
libc.mmap(None, ctypes.c_size_t(4096), 5, 2, file, ctypes.c_long(0))
print(flush=True)
time.sleep(600)
"""
"""Has Python's library mapped, as it seems."""
POLL = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
file = os.open(sys.argv[1], os.O_RDONLY)
page = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, file, ctypes.c_long(0))
print(flush=True)
libc.poll(ctypes.c_void_p(page), 64, -1)
"""
"""Waits for what a page says that never comes."""
PEERS = """
import sys
from dshealthd.core.host import Host
from dshealthd.linux.socket_waits import peers_awaited
print(peers_awaited(Host(), [int(sys.argv[1])]))
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, and runs processes of another user")


@pytest.mark.parametrize(("line", "served"), [
    ("36 35 0:50 / /home/u/m rw,nosuid - fuse.sshfs u@h:/ rw,user_id=1000,group_id=5", [1000]),
    ("36 35 0:50 / /m rw shared:7 - fuse /dev/fuse rw,user_id=7,group_id=7,allow_other", [7]),
    ("36 35 0:50 / /m rw - fuse.juicefs fs rw,user_id=0,group_id=0,allow_other", [0]),
    ("36 35 0:50 / / rw - fuse.fuse-overlayfs fuse-overlayfs rw,user_id=0,group_id=0", [0]),
    ("36 35 0:50 / /m\\040-\\040fuse rw - nfs4 h:/ rw,user_id=1000", []),
    ("36 35 0:50 / /sys/fs/fuse/connections rw - fusectl none rw", []),
    ("36 35 0:50 / /m rw - fuseblk /dev/sda1 rw,user_id=0,group_id=0,allow_other", [0]),
])  # fmt: skip
def test_mounts_that_processes_serve(line: str, served: list[int]) -> None:
    """Each with its user."""
    text = f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{line}\n24 22 0:5 / /proc rw - proc proc rw\n"
    assert parse_fuse(text.encode()) == [(36, b"0:50", user) for user in served]


def looked(readers: contextlib.ExitStack, program: str, pid: int, path: Path) -> str:
    """Return what a program prints of a path of a process; it fails if it hangs, and is left to
    `readers`.
    """
    command = [sys.executable, "-c", program, str(pid), str(path)]
    reader = readers.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        printed, _ = reader.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        reader.kill()
        pytest.fail("it asks the mount, and hangs")
    return printed


@as_root
@pytest.mark.parametrize(
    "path", ["mount/env", "mount", "link/env", "up/../mount/env", "relative/x"]
)
def test_nothing_there_is_asked(public_path: Path, path: str) -> None:
    """A path to the mount, by links too, is refused; one beside it is read."""
    (public_path / "link").symlink_to(public_path / "mount")
    (public_path / "relative").symlink_to("./up/../link/y")
    (public_path / "up").mkdir()
    (public_path / "beside").write_text("content")
    (public_path / "to").symlink_to("up/../beside")
    with (
        contextlib.ExitStack() as readers,  # ends last: one that hangs ends with the mount alone
        hung_mount(public_path / "mount", USER),
        sleeper(USER, {"HOME": "/"}) as pid,
    ):
        for name, answer in (("to", "b'content'"), (path, f"is on a FUSE mount of user {USER}")):
            assert answer in looked(readers, LOOK, pid, public_path / name)


@as_root
@pytest.mark.parametrize(
    ("how", "program"),
    [((), WITHOUT_FDINFO), (("namespace",), LOOK)],
    ids=["before Linux 5.14", "in a user namespace"],
)
def test_what_is_not_served_by_root(public_path: Path, how: tuple[str, ...], program: str) -> None:
    """In a user namespace its user is root, by that namespace's numbers."""
    (public_path / "file").write_text("content")
    mount = public_path / "mount"
    with (
        contextlib.ExitStack() as readers,
        hung_mount(mount, 0 if how else USER, *how) as server,
        sleeper(USER, {"HOME": "/"}) as other,
    ):
        pid = server if how else other
        for path, answer in ((public_path / "file", "b'content'"), (mount / "x", "is on a FUSE")):
            assert answer in looked(readers, program, pid, path)


@as_root
def test_what_root_serves_is_read_in_a_user_namespace(public_path: Path) -> None:
    """A container sees the node's mounts by its own numbers; root's are known by device."""
    command = "unshare", "--user", "--map-root-user", "--mount", "sleep", "600"
    with hung_mount(public_path / "mount", 0), subprocess.Popen(command) as inside:
        try:
            proc = Path(f"/proc/{inside.pid}")
            until(lambda: (proc / "comm").read_text() == "sleep\n")
            assert " - fuse.hung " in (proc / "mountinfo").read_text()
            place = os.open(proc, os.O_PATH | os.O_DIRECTORY)
            assert process_root._served(place, USER) == {}
            os.close(place)
        finally:
            inside.kill()


@as_root
def test_py_spy_asks_no_mount(public_path: Path) -> None:
    """It would open Python's library, and no signal would end it."""
    with (
        contextlib.ExitStack() as started,  # ends last: what hangs ends with the mount alone
        hung_mount(public_path / "mount", USER),
    ):
        rank = started.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", MAP, str(public_path / "mount" / PAGE)],
                stdout=subprocess.PIPE,
            )
        )
        started.callback(rank.kill)
        assert rank.stdout is not None
        rank.stdout.readline()
        step, files = take(
            functools.partial(
                stacks.collect, host=Host(), pid=rank.pid, rank=0, program=stacks.find_py_spy()
            ),
            seconds=20.0,
        )
    assert f"is on a FUSE mount of user {USER}" in step.problem
    assert files == {}


@as_root
def test_what_a_step_has_started_is_left(
    public_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ends at its deadline, what it has started may not: that is known."""
    pass_deadline = clock_ahead(monkeypatch)

    def read(emit: Emit) -> None:
        with subprocess.Popen(["cat", str(public_path / "mount" / PAGE)]) as process:
            emit("pid", str(process.pid).encode())

    def keep(_name: str, data: bytes) -> None:
        proc = f"/proc/{int(data)}"
        until(
            lambda: (
                os.readlink(f"{proc}/fd/3").endswith(PAGE)
                and Path(proc, "wchan").read_text().startswith("request_wait")
            ),
            errors=(OSError,),
        )
        pass_deadline()

    with hung_mount(public_path / "mount", USER):
        step = forked.run("read", read, DEADLINE, 100, keep)
        assert step.left
        assert forked.remains(step.left)
    until(lambda: not forked.remains(step.left))


@as_root
def test_memory_that_never_comes(public_path: Path) -> None:
    """Of a process that waits with a page of such a mount only that is unknown; who reads it goes
    on. Nothing could end a reader that asks for the page.
    """
    with (
        contextlib.ExitStack() as started,  # ends last: what hangs ends with the mount alone
        hung_mount(public_path / "mount", USER),
    ):

        def start(*command: str) -> subprocess.Popen[str]:
            process = started.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True
                )
            )
            started.callback(process.kill)
            return process

        rank = start(POLL, str(public_path / "mount" / PAGE))
        assert rank.stdout is not None
        rank.stdout.readline()
        until(lambda: Path(f"/proc/{rank.pid}/syscall").read_text()[:2] in ("7 ", "73"))
        printed, _ = start(PEERS, str(rank.pid)).communicate(timeout=60)
        assert printed == "{}\n"


@as_root
def test_63_a_hung_mount_of_a_user(public_path: Path) -> None:
    """Environment and Inspector's directory of one user's job are there: no worker gets stuck, the
    job's versions are missing with a reason, and another job's are shown.
    """
    site = public_path / "env/lib/python3.11/site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch/version.py").write_text("__version__ = '2.9.1'\n")
    mount = public_path / "mount"
    hostile = TORCH | {"SLURM_JOB_ID": "63", "VIRTUAL_ENV": str(mount / "env")}
    hostile["NCCL_INSPECTOR_DUMP_DIR"] = str(mount / "dump")
    with (
        hung_mount(mount, USER),
        sleeper(USER, hostile),
        sleeper(USER, TORCH | {"SLURM_JOB_ID": "64", "VIRTUAL_ENV": str(public_path / "env")}),
        running(public_path, CONFIG) as agent,
    ):

        def others_are_shown(scrape: Scrape) -> bool:
            return bool(
                scrape.all("dshealthd_software_info", training_job="slurm-64", version="2.9.1")
            )

        agent.wait(others_are_shown)
        end = time.monotonic() + 12.0
        while time.monotonic() < end:
            scrape = agent.scrape()
            assert others_are_shown(scrape), agent.log.read_text()
            for worker in ("storage", "logs"):
                assert not scrape.value("dshealthd_worker_stuck", worker=worker)
                assert not scrape.value("dshealthd_worker_quarantined", worker=worker)
            assert scrape.value("dshealthd_collector_up", collector="software") == 1
            time.sleep(0.5)
        # A job's own part is no fault of the node's collector; it is counted, with its reason.
        refused = {"collector": "software", "reason": "permission_denied"}
        assert (scrape.value("dshealthd_collector_errors_total", **refused) or 0) > 0
