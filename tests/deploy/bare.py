"""The first hour on a bare Debian: seconds to the first answer and to the demo's first page, and
what is installed for them. `python -m tests.deploy.bare` prints it.

A fresh minimal Debian 12 with `make` and nothing of Python, and a clone of the commit that is
checked out. It takes packages from where this machine takes them, so the seconds have its
network's speed in them. Takes root and mmdebstrap.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.deploy.machine import CACHE, tree

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in the clone, as somebody who has just cloned it."""
        inside = ["env", "-C", "/root/dshealthd", "HOME=/root", "LC_ALL=C.UTF-8", *command]
        return subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                ENTER,
                "sh",
                self._root,
                *inside,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def megabytes(self) -> int:
        """Return what has been installed since it was fresh.

        What a demo that was killed has left in /tmp is not installed.
        """
        command = ["du", "-sm", f"--exclude={self._upper}/tmp", str(self._upper)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(ended.stdout.split()[0])


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    """Give a fresh machine with a clone, and take it away again."""
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


def _stop(process: subprocess.Popen[str]) -> None:
    """End a command with all that it started: the first process of its namespace goes."""
    process.kill()
    process.communicate()


def first_answer(machine: Bare) -> float:
    """Return the seconds from `make run` (with a port of its own) to the agent's first answer."""
    began, said = time.monotonic(), []
    process = machine.start("./dev", "run", "--web.listen-address=127.0.0.1:0")
    try:
        for line in process.stdout or ():
            said.append(line)
            if (page := PAGE.search(line)) is not None:
                with urllib.request.urlopen(f"{page[0]}api/v1/status", timeout=60) as answer:
                    answer.read()
                return time.monotonic() - began
    finally:
        _stop(process)
    message = f"the agent ended without an answer: {''.join(said)}"
    raise RuntimeError(message)


def first_page(machine: Bare) -> dict[str, float]:
    """Return the seconds from `make demo` until its links are there, and to the first page."""
    began = time.monotonic()
    found: dict[str, float] = {}
    said: list[str] = []
    process = machine.start("./dev", "demo", "--fault", "gpu-lost")
    try:
        for line in process.stdout or ():
            said.append(line)
            for name, sign in (("links", "http://127.0.0.1"), ("page", "PAGE, ")):
                if sign in line:
                    found.setdefault(name, time.monotonic() - began)
            if "page" in found:
                return found
    finally:
        _stop(process)
    message = f"the demo ended without a page: {''.join(said)}"
    raise RuntimeError(message)


def measure() -> dict[str, float]:
    """Return all figures: seconds and megabytes."""
    with bare() as machine:
        before = machine.megabytes()
        took = {
            "run: seconds to the first answer": round(first_answer(machine), 1),
            "run: seconds to the first answer, again": round(first_answer(machine), 1),
            "run: megabytes installed": machine.megabytes() - before,
        }
    with bare() as machine:
        page = first_page(machine)
        took |= {
            "demo: seconds to its links": round(page["links"], 1),
            "demo: seconds to the first page": round(page["page"], 1),
            "demo: megabytes installed": machine.megabytes() - before,
        }
        again = first_page(machine)
        took |= {
            "demo: seconds to its links, again": round(again["links"], 1),
            "demo: seconds to the first page, again": round(again["page"], 1),
        }
    return took


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
