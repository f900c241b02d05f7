"""What a user names is opened with that user's rights, below that user's root, if it is a file."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import pty
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux import process_root
from dshealthd.linux.credentials import User, assumed, is_secure, parse_real_user, parse_user
from dshealthd.linux.process_root import Root
from dshealthd.linux.regular_files import Irregular
from tests.collectors.bench import sleeper
from tests.processes import wait_for_environment

USER = 4321
HOST = Host()
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="runs processes of another user")


@pytest.fixture
def place(public_path: Path) -> Path:
    """A directory of the user, which this user can get to."""
    found = public_path / "user"
    found.mkdir()
    if os.geteuid() == 0:
        os.chown(found, USER, USER)
    return found


process = functools.partial(sleeper, USER)
"""Runs a process of the user that does nothing."""


@contextlib.contextmanager
def contained(root: Path, directory: str = "etc") -> Iterator[int]:
    """Run a process of the user whose root is one directory, in another; give its pid."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(root / directory)
            os.chroot(root)
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            os.write(write_end, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    try:
        assert os.read(read_end, 1) == b"1"
        yield child
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def attempt(root: Root, path: str) -> int | None:
    """Return why a file is not opened; None if it is."""
    try:
        os.close(root.open(path))
    except OSError as error:
        return error.errno
    return None


def test_ordinary_files_are_read(place: Path) -> None:
    """Absolute and relative paths, links, directories: as the process itself would read them."""
    (place / "version.py").write_text("cuda = '12.1'")
    (place / "link").symlink_to("version.py")
    with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
        assert root.read(str(place / "version.py")) == b"cuda = '12.1'"
        assert root.read("link") == b"cuda = '12.1'"
        assert root.link("link") == "version.py"
        assert sorted(root.names(".")) == ["link", "version.py"]
        assert root.stat("missing") is None


@root_only
def test_a_file_of_root_s_is_not_read_through_a_link(place: Path, public_path: Path) -> None:
    """A link, or the path itself, to a file that only root can read gives nothing."""
    secret = public_path / "secret"
    secret.write_text("__version__ = 'of root'")
    secret.chmod(0o600)
    (place / "version.py").symlink_to(secret)
    with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
        assert attempt(root, "version.py") == errno.EACCES
        with pytest.raises(PermissionError, match=str(secret)):
            root.open(str(secret))
    assert secret.read_text() == "__version__ = 'of root'"  # this thread is root again


@root_only
def test_neither_groups_nor_capabilities_of_the_agent_help(place: Path, public_path: Path) -> None:
    """A file of root's group and a directory that nobody may enter stay closed."""
    closed = public_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "file").touch()
    group = public_path / "group"
    group.touch()
    group.chmod(0o040)
    with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
        for path in (closed / "file", group):
            assert attempt(root, str(path)) == errno.EACCES
        with pytest.raises(PermissionError):
            root.names(str(closed))
    before = Path("/proc/thread-self/status").read_bytes()
    with assumed(User(USER, USER)):
        within = Path("/proc/thread-self/status").read_bytes()
    after = Path("/proc/thread-self/status").read_bytes()
    fields = [
        {line.partition(b":")[0]: line for line in text.splitlines()}
        for text in (before, within, after)
    ]
    capabilities = (b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb")
    for name in (b"Uid", b"Gid", b"Groups", *capabilities):
        assert fields[0][name] == fields[2][name]
    assert int(fields[1][b"CapEff"].split()[1], 16) == 0
    assert fields[1][b"Uid"].split()[1:] == [b"0", b"0", b"0", b"%d" % USER]


@root_only
@pytest.mark.parametrize("capabilities", ["-all", "-all,+setgid", "-all,+setuid"])
def test_own_rights_take_no_capability(capabilities: str) -> None:
    """Root without capabilities, as in a pod, opens files as itself, and as nobody else."""
    program = (
        "import os; from dshealthd.linux.credentials import User, assumed\n"
        "for uid in (0, 1):\n    try:\n"
        "        with assumed(User(uid, os.getegid(), tuple(os.getgroups()))): print(uid)\n"
        "    except PermissionError: print('denied')"
    )
    bare = ["setpriv", f"--bounding-set={capabilities}", "--inh-caps=-all"]
    command = [*bare, sys.executable, "-c", program]
    assert subprocess.check_output(command, text=True, timeout=60).split() == ["0", "denied"]


@root_only
def test_other_threads_keep_their_rights(public_path: Path) -> None:
    """Only the thread that opens is the user; glibc's wrappers would change all threads."""
    secret = public_path / "secret"
    secret.write_text("of root")
    secret.chmod(0o600)
    begun, found = threading.Event(), []

    def look() -> None:
        assert begun.wait(60)
        found.append(secret.read_text())

    thread = threading.Thread(target=look)
    thread.start()
    with assumed(User(USER, USER)):
        begun.set()
        thread.join()
        with pytest.raises(PermissionError):
            secret.read_text()
    assert found == ["of root"]


def test_what_is_no_file_is_never_opened(place: Path) -> None:
    """FIFOs, sockets, devices, terminals and directories are told from files without an open."""
    os.mkfifo(place / "fifo")
    writable = os.open(place, os.O_RDONLY)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(f"/proc/self/fd/{writable}/socket")
        leader, follower = pty.openpty()
        paths = ["fifo", "socket", ".", "/dev/null", "/dev/full", os.ttyname(follower)]
        with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
            for path in paths:
                with pytest.raises(Irregular):
                    root.open(path)
            (place / "link").symlink_to("fifo")
            with pytest.raises(Irregular):
                root.open("link")
        os.close(leader)
        os.close(follower)
    os.close(writable)
    with pytest.raises(OSError, match="No such device or address"):
        os.open(place / "fifo", os.O_WRONLY | os.O_NONBLOCK)


def test_a_terminal_does_not_become_the_controlling_one(place: Path) -> None:
    """A session leader without a terminal, as the agent is, has none after all looks."""
    leader, follower = pty.openpty()
    name = os.ttyname(follower)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            with (
                process(cwd=place) as pid,
                Root.of_process(HOST, pid) as root,
                contextlib.suppress(Irregular),
            ):
                root.open(name)
            try:
                os.open("/dev/tty", os.O_RDWR)
            except OSError as error:
                status = 0 if error.errno == errno.ENXIO else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    os.close(leader)
    os.close(follower)


def test_pseudo_files_are_not_read(place: Path) -> None:
    """`/proc/self` would be the reader's own, and reading sysfs may ask a device."""
    with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
        for path in ("/proc/self/maps", "/proc/self/environ", "/sys/kernel/uevent_seqnum"):
            assert attempt(root, path) in {errno.EINVAL, errno.EACCES}
        assert attempt(root, f"/proc/{pid}/root/etc/passwd") in {errno.ELOOP, errno.EACCES}


@root_only
def test_an_absolute_link_stays_in_the_process_s_root(place: Path) -> None:
    """In a container, `/etc/nccl.conf -> /etc/shadow` is the container's, not the host's."""
    (place / "etc").mkdir()
    (place / "etc/passwd").write_text("of the container")
    (place / "etc/nccl.conf").symlink_to("/etc/passwd")
    (place / "up").symlink_to("../../../../etc/passwd")
    with contained(place) as pid, Root.of_process(HOST, pid) as root:
        assert root.read("/etc/nccl.conf") == b"of the container"
        assert root.read("/up") == b"of the container"
        assert root.read("passwd") == b"of the container"
        assert root.read("/../../etc/passwd") == b"of the container"
    with contained(place, "/") as pid, Root.of_process(HOST, pid) as root:
        assert attempt(root, "etc/passwd") == errno.ENOENT, "it is not below its root"


def test_size_is_bounded(place: Path) -> None:
    """A sparse file of a TiB, and one that grows, give as much as was asked for."""
    sparse = place / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
        assert len(root.read("sparse")) == 1 << 20
        assert len(root.read("sparse", 7)) == 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_crowded_directory_is_cut(place: Path) -> None:
    """A listing ends at its limit."""
    for number in range(20_001):
        (place / f"torch-{number}.dist-info").symlink_to("nowhere")
    with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
        assert len(root.names(".")) == 20_000
        assert len(root.names(".", 20)) == 20


@pytest.mark.parametrize(("links", "error"), [(40, None), (41, errno.ELOOP)])
def test_links_of_a_path(place: Path, links: int, error: int | None) -> None:
    """As many are followed as by the kernel, also where each is looked at first."""
    (place / "0").write_text("end")
    for number in range(links):
        (place / str(number + 1)).symlink_to(str(number))
    own = User(os.geteuid(), os.getegid(), tuple(os.getgroups()))
    with Root(os.open(place, os.O_PATH | os.O_DIRECTORY), own, "/", {-2: 1}) as root:
        assert attempt(root, f"/{links}") == error


@pytest.mark.parametrize(("size", "error"), [((4 << 20) - 1, None), (4 << 20, errno.EACCES)])
def test_a_list_of_mounts_that_is_too_long(tmp_path: Path, size: int, error: int | None) -> None:
    """It may have been made to hide a mount beyond what is read."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/root").symlink_to("/")
    (tmp_path / "7/mountinfo").write_bytes(bytes(size))
    with pytest.raises(PermissionError) if error else contextlib.nullcontext():
        Root.of_process(Host(procfs=tmp_path), 7).close()


@root_only
def test_rights_that_were_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is root since it was executed belongs to the user who did that."""
    Root.of_process(HOST, os.getpid()).close()
    monkeypatch.setattr(process_root, "is_secure", lambda _: True)
    with pytest.raises(PermissionError, match="by another user"):
        Root.of_process(HOST, os.getpid())


def test_mixed_rights() -> None:
    """A program that runs with another user's rights is nobody's to read for."""
    status = b"Name:\tsu\nUid:\t1000\t0\t0\t0\nGid:\t1000\t1000\t1000\t1000\nGroups:\t1000 \n"
    with pytest.raises(PermissionError):
        parse_user(status)
    with pytest.raises(PermissionError):
        parse_user(
            status.replace(b"1000\t0\t0\t0", b"7\t7\t7\t7").replace(b"Gid:\t1000", b"Gid:\t0")
        )
    same = status.replace(b"1000\t0\t0\t0", b"7\t7\t7\t7")
    assert parse_user(same) == User(7, 1000, (1000,))
    for parse in (parse_user, parse_real_user):
        with pytest.raises(ValueError, match="no user"):
            parse(b"Name:\tx\n")


def test_programs_that_gained_rights_are_known() -> None:
    """AT_SECURE tells of `sudo` at its prompt, whose ids are all root's."""
    assert not is_secure(Path("/proc/self/auxv").read_bytes())
    assert is_secure(struct.pack("=6Q", 6, 4096, 23, 1, 0, 0))
    assert not is_secure(struct.pack("=6Q", 6, 4096, 0, 0, 23, 1))
    assert not is_secure(b"\x17")


@root_only
def test_a_set_user_id_program_is_refused(place: Path) -> None:
    """A user who executes a set-user-id program gets no file read with its rights."""
    program = place / "sleep"
    shutil.copy("/bin/sleep", program)
    os.chown(program, 0, 0)
    program.chmod(0o4755)
    others = {"user": USER, "group": USER, "extra_groups": []}
    # of several types
    with subprocess.Popen([str(program), "600"], **others) as child:  # type: ignore[call-overload]
        try:
            wait_for_environment(child.pid)  # the kernel gives the rights as it executes
            with pytest.raises(PermissionError, match="more than one user"):
                Root.of_process(HOST, child.pid)
        finally:
            child.kill()


def test_a_kernel_without_openat2_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.6 nothing is opened, rather than opened otherwise."""
    (place / "file").touch()
    monkeypatch.setattr(process_root, "_OPENAT2", 99_999)
    with process(cwd=place) as pid, Root.of_process(HOST, pid) as root:
        assert attempt(root, "file") == errno.ENOSYS


def test_no_descriptor_is_left(place: Path) -> None:
    """Whatever comes of a look, it leaves nothing open."""
    os.mkfifo(place / "fifo")
    (place / "file").touch()
    with process(cwd=place) as pid:
        gc.collect()  # what earlier tests have left is closed before, not meanwhile
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with Root.of_process(HOST, pid) as root:
                for path in ("fifo", "file", "missing", "\0", "/dev/null"):
                    attempt(root, path)
                root.names(".")
        assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match=r"No such (file|process)"):
        Root.of_process(HOST, pid)
