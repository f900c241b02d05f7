"""A user's FUSE mount that hangs: number 63 of the fault catalogue."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dshealthd.config import registry
from dshealthd.linux.mounts import parse_served_by_users
from tests.agents import Scrape, running
from tests.collectors.bench import sleeper
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
    ("36 35 0:50 / /home/u/m rw,nosuid - fuse.sshfs u@h:/ rw,user_id=1000,group_id=5", {36: 1000}),
    ("36 35 0:50 / /m rw shared:7 - fuse /dev/fuse rw,user_id=7,group_id=7,allow_other", {36: 7}),
    ("36 35 0:50 / /m rw - fuse.juicefs fs rw,user_id=0,group_id=0,allow_other", {}),
    ("36 35 0:50 / / rw - fuse.fuse-overlayfs fuse-overlayfs rw,user_id=0,group_id=0", {}),
    ("36 35 0:50 / /m\\040-\\040fuse rw - nfs4 h:/ rw,user_id=1000", {}),
    ("36 35 0:50 / /sys/fs/fuse/connections rw - fusectl none rw", {}),
    ("36 35 8:1 / /m rw - fuseblk /dev/sda1 rw,user_id=0,group_id=0,allow_other", {}),
])  # fmt: skip
def test_mounts_that_users_serve(line: str, served: dict[int, int]) -> None:
    """Those of root, and the root of a container that root runs, are read as any other."""
    text = f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{line}\n24 22 0:5 / /proc rw - proc proc rw\n"
    assert parse_served_by_users(text.encode()) == served


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
            command = [sys.executable, "-c", LOOK, str(pid), str(public_path / name)]
            reader = readers.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            )
            try:
                printed, _ = reader.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                reader.kill()
                pytest.fail("it asks the mount, and hangs")
            assert answer in printed


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
