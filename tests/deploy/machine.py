"""Booted machines: Debian with its own systemd, in systemd-nspawn over a cached tree.

A machine is a container in all but its systemd, which boots, starts units, watches and reboots as
on a node. It shares the kernel, and with it /dev/kmsg. Takes root, mmdebstrap, systemd-container.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Scrape

PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "iproute2", "procps", "passwd")
CACHE = Path("/var/tmp/dshealthd-test-trees")
LONGEST = 3600
"""Seconds for one test with what it sets up: ten times what a machine without other work takes."""
BOOT_SECONDS = 300.0
REBOOTED = 133
"""Status with which nspawn ends where whoever started it is to start it again."""
WHERE = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")
"""Where hierarchies of control groups can be mounted, in which systemd keeps its units."""
FETCH = (
    "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], "
    "timeout=60).read().decode())"
)


def require_tools() -> None:
    """Skip where machines cannot be booted."""
    missing = [
        tool for tool in ("systemd-nspawn", "mmdebstrap", "dpkg") if shutil.which(tool) is None
    ]
    if missing or os.geteuid() != 0:
        pytest.skip(f"booting takes root and {', '.join(missing) or 'nothing else'}")


def tree(suite: str, more: tuple[str, ...] = (), base: tuple[str, ...] = PACKAGES) -> Path:
    """Return the root of a fresh Debian with some more packages, made once and kept."""
    packages = (*base, *more)
    wanted = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]
    CACHE.mkdir(mode=0o755, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = CACHE / f"{suite}-{wanted}"
        if not made.exists():
            building = Path(tempfile.mkdtemp(dir=CACHE))
            command = ["mmdebstrap", "--quiet", "--variant=minbase"]
            command += [f"--include={','.join(packages)}", suite, str(building)]
            subprocess.run(command, check=True, timeout=1800)
            building.chmod(0o755)
            building.rename(made)
    return made


class Machine:
    """One booted machine; `root` is its file system as seen from outside."""

    def __init__(self, name: str, lower: Path, work: Path, namespace: str = "") -> None:
        """Name it; it lies over `lower`, and its network is that of a named namespace or none."""
        self.name = name
        self.root = work / "root"
        self._work = work
        self._lower = lower
        self._namespace = namespace
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._groups: list[Path] = []

    def mount(self) -> None:
        """Lay the machine's own changes over the fresh tree."""
        for folder in ("upper", "work", "root"):
            (self._work / folder).mkdir()
        options = f"lowerdir={self._lower},upperdir={self._work}/upper,workdir={self._work}/work"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)]
        subprocess.run(command, check=True)
        (self.root / "etc/hostname").write_text(f"{self.name}\n")
        (self.root / "etc/machine-id").write_text("")

    def boot(self) -> None:
        """Start it, and wait until its systemd has nothing more to start."""
        self._groups = []
        for place in WHERE:
            if os.access(f"{place}/cgroup.procs", os.W_OK):  # nspawn uses "payload" below its own
                group = Path(place) / f"dshealthd-test-{os.getpid()}-{self.name}"
                group.mkdir(exist_ok=True)
                self._groups.append(group)
        script = "".join(f"echo $$ >{group}/cgroup.procs; " for group in self._groups)
        command = ["systemd-nspawn", "--quiet", "-D", str(self.root), "--boot", "--register=no"]
        command += ["--keep-unit", "--console=pipe", "--capability=all", "--bind=/dev/kmsg"]
        command += [f"--machine=dshealthd-{os.getpid()}-{self.name}", f"--hostname={self.name}"]
        command += ["--resolv-conf=off", "--timezone=off", "--system-call-filter=bpf"]
        command += [
            f"--network-namespace-path=/run/netns/{self._namespace}"
            if self._namespace
            else "--private-network"
        ]
        with (self._work / "console").open("ab") as console:
            self._nspawn = subprocess.Popen(
                ["sh", "-c", f'{script}exec "$@"', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        end = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < end:
            if self._init():
                done = self.run("systemctl", "is-system-running", check=False)
                if done.stdout.strip() in {"running", "degraded"}:
                    return
            time.sleep(0.2)
        said = (self._work / "console").read_text(errors="replace")
        pytest.fail(f"{self.name} has not booted within {BOOT_SECONDS:g} s:\n{said}")

    def reboot(self) -> None:
        """Reboot it by its own command, upon which nspawn asks to be started again."""
        assert self._nspawn is not None
        self.run("systemctl", "--no-block", "reboot")
        assert self._nspawn.wait(BOOT_SECONDS) == REBOOTED
        self.boot()

    def close(self) -> None:
        """Power it off, and take away all that it was."""
        if self._nspawn is not None:
            self._nspawn.send_signal(signal.SIGTERM)
            try:
                self._nspawn.wait(30)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait(10)
        for group in self._groups:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        subprocess.run(["umount", "--lazy", str(self.root)], check=True)

    def run(
        self, *command: str, check: bool = True, timeout: float = 600.0, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it as root; its output is text."""
        enter = ["nsenter", "--target", str(self._init()), "--all", "--wd=/"]
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            [*enter, "--", "/usr/bin/env", "-i", path, "LANG=C.UTF-8", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            input=stdin,
        )
        if check and done.returncode != 0:
            message = f"{self.name}: {' '.join(command)}: status {done.returncode}\n"
            raise AssertionError(message + done.stdout + done.stderr)
        return done

    def sh(self, script: str, *, check: bool = True) -> str:
        """Run a shell script in it and return what it prints."""
        return self.run("sh", "-c", script, check=check).stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of it."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)

    def property(self, name: str, unit: str = "dshealthd.service") -> str:
        """Return a property of a unit as systemctl shows it."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def log(self, since: float = 0.0) -> str:
        """Return what the service has logged since a moment of this boot, in Unix time."""
        command = ["journalctl", "-b", "-u", "dshealthd", "-o", "cat", "--no-pager"]
        return self.run(*command, f"--since=@{since:.3f}").stdout

    def get(self, path: str, port: int = 10061) -> str:
        """Return what the agent answers; AssertionError if it does not."""
        return self.run("python3", "-c", FETCH, f"http://127.0.0.1:{port}{path}").stdout

    def scrape(self) -> Scrape:
        """Return its metrics."""
        started = time.monotonic()
        return Scrape(self.get("/metrics"), time.monotonic() - started)

    def status(self) -> Any:
        """Return its status document."""
        return json.loads(self.get("/api/v1/status"))

    def wait(
        self, condition: Callable[[], object], what: str = "it", seconds: float = 300.0
    ) -> Any:
        """Return the first true answer; an agent that does not answer yet is waited for too."""
        end = time.monotonic() + seconds
        while True:
            problem = ""
            try:
                if answer := condition():
                    return answer
            except (AssertionError, OSError, KeyError, ValueError) as error:
                problem = str(error)
            if time.monotonic() > end:
                status = self.run("systemctl", "status", "--no-pager", "dshealthd", check=False)
                pytest.fail(f"{what}: not within {seconds:g} s {problem}\n{status.stdout}")
            time.sleep(0.3)

    def _init(self) -> int:
        """Return its first process; 0 while there is none."""
        if self._nspawn is None or self._nspawn.poll() is not None:
            return 0
        try:
            children = Path(
                f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children"
            ).read_text()
        except OSError:
            return 0
        for pid in map(int, children.split()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                    return pid
        return 0


@contextlib.contextmanager
def lan(number: int, network: str) -> Iterator[list[str]]:
    """Give network namespaces on one bridge, by name; addresses are NETWORK.1 and up."""
    prefix = f"dshealthd-{os.getpid()}"
    names = [f"{prefix}-{one}" for one in range(1, number + 1)]

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        for name in (prefix, *names):
            ip(f"netns add {name}")
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        ip(f"-n {prefix} link add lan type bridge")
        ip(f"-n {prefix} link set lan up")
        for one, name in enumerate(names, 1):
            ip(f"-n {prefix} link add port{one} type veth peer eth0 netns {name}")
            ip(f"-n {prefix} link set port{one} master lan up")
            ip(f"-n {name} address add {network}.{one}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        yield names


@contextlib.contextmanager
def booted(
    name: str, suite: str = "bookworm", namespace: str = "", packages: tuple[str, ...] = ()
) -> Iterator[Machine]:
    """Run a machine, with some packages more than a fresh one has."""
    require_tools()
    with tempfile.TemporaryDirectory(prefix=f"dshealthd-{name}-", dir="/var/tmp") as work:
        machine = Machine(name, tree(suite, packages), Path(work), namespace)
        machine.mount()
        try:
            machine.boot()
            yield machine
        finally:
            machine.close()
