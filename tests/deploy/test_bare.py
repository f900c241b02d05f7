"""The first hour on a bare Debian: what README and docs say to type works there as it is.

A fresh minimal Debian 12 with `make` and nothing of Python, and a clone of the commit that is
checked out. It takes packages from where this machine takes them.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.machine import CACHE, LONGEST, require_tools, tree

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

ROOT = Path(__file__).parents[2]
BARE = ("ca-certificates", "make")
"""What is on it beside the packages without which no Debian is."""
SOURCES = (
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/apt.conf.d",
    "etc/apt/preferences.d",
    "etc/pip.conf",
    "etc/resolv.conf",
    "etc/hosts",
    "etc/ssl/certs/ca-certificates.crt",
    "usr/share/keyrings",
)
"""Where this machine takes packages from, and whom it trusts for that."""
ENTER = """
mount --rbind /sys "$1/sys" && mount --rbind /dev "$1/dev" && mount -t tmpfs run "$1/run" &&
mount -t proc proc "$1/proc" && cd "$1" && shift && pivot_root . . && umount -l . && exec "$@"
"""
"""With a mount namespace of its own, whose root the machine is, and one of processes, which ends
all that it started.
"""
PAGE = re.compile(r"http://127\.0\.0\.1:\d+/")
"""Where the agent says that its page is."""


class Bare:
    """A machine on which nothing is installed yet."""

    def __init__(self, root: Path, upper: Path) -> None:
        """`upper` is where all that changes lies."""
        self._root, self._upper = root, upper
        self._before = self._size()

    @contextlib.contextmanager
    def started(self, *command: str) -> Iterator[Iterator[tuple[float, str]]]:
        """Run a command in the clone, as somebody who has just cloned it, and end all of it.

        Yields the lines that it prints, each with the seconds that have passed.
        """
        space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]
        inside = ["env", "-C", "/root/dshealthd", "HOME=/root", "LC_ALL=C.UTF-8", *command]
        began = time.monotonic()
        process = subprocess.Popen(
            [*space, self._root, *inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield ((time.monotonic() - began, line) for line in process.stdout or ())
        finally:
            process.kill()
            process.communicate()

    def installed(self) -> int:
        """Return how many megabytes have been installed since it was fresh."""
        return self._size() - self._before

    def _size(self) -> int:
        # What a demo that was killed has left in /tmp is not installed.
        command = ["du", "-sm", f"--exclude={self._upper}/tmp", str(self._upper)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(ended.stdout.split()[0])


@pytest.fixture
def bare() -> Iterator[Bare]:
    """A fresh machine with a clone."""
    require_tools()
    lower = tree("bookworm", BARE, base=())
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        place = Path(directory)
        for name in ("upper", "work", "root"):
            (place / name).mkdir(mode=0o755)
        options = f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work"
        root = place / "root"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
        try:
            for source in SOURCES:
                _bring(Path("/") / source, root / source)
            archive = ["git", "-C", str(ROOT), "archive", "HEAD"]
            packed = subprocess.run(archive, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as files:
                files.extractall(root / "root/dshealthd", filter="tar")
            yield Bare(root, place / "upper")
        finally:
            subprocess.run(["umount", root], check=True)


def _bring(source: Path, place: Path) -> None:
    """Copy what this machine has there, if it has anything."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place, dirs_exist_ok=True)
    elif source.exists():
        place.unlink(missing_ok=True)
        shutil.copyfile(source, place)


def test_run(bare: Bare) -> None:
    """The agent answers, at the second time within seconds, and little is installed for it."""
    for number in (1, 2):
        with bare.started("./dev", "run", "--web.listen-address=127.0.0.1:0") as lines:
            said = []
            for seconds, line in lines:
                said.append(line)
                if (page := PAGE.search(line)) is not None:
                    urllib.request.urlopen(f"{page[0]}api/v1/status", timeout=60).close()
                    answered = seconds
                    break
            else:
                pytest.fail(f"the agent ended without an answer: {''.join(said)}")
        print(
            f"run {number}: {answered:.1f} s to the first answer, {bare.installed()} MB installed"
        )
    # The seconds have the speed of the network in them: only those of a second time are held.
    assert answered < 10
    assert bare.installed() < 120


def test_demo(bare: Bare) -> None:
    """The demo's first page comes, its links at the second time within half a minute."""
    for number in (1, 2):
        with bare.started("./dev", "demo", "--fault", "gpu-lost") as lines:
            said, links = [], 0.0
            for seconds, line in lines:
                said.append(line)
                if not links and "http://127.0.0.1" in line:
                    links = seconds
                if "PAGE, " in line:
                    break
            else:
                pytest.fail(f"the demo ended without a page: {''.join(said)}")
        print(f"demo {number}: {links:.1f} s to its links, {seconds:.1f} s to the first page")
    assert links < 30
    assert bare.installed() < 200
