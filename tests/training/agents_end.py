"""The agent's end of the heartbeats, for tests of the sender.

Finds the pages of this process and its children, and reads them when asked.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from dshealthd.core.host import Host
from dshealthd.jobs.heartbeats.page import open_page
from dshealthd.training.message import PAGE, Message, newest_message
from dshealthd.training.saved import Saved
from dshealthd.training.saved import decode as decode_saved


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[None]:
    """Have a forked child do something; it lives on until the end of the block."""
    (done, does), (ends, end) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        work()
        os.write(does, b"x")
        os.close(end)
        os.read(ends, 1)
        os._exit(0)
    os.read(done, 1)
    try:
        yield
    finally:
        for pipe in (done, does, ends, end):
            os.close(pipe)
        os.waitpid(child, 0)


LINGER = """
import os, time
if "ENDS" in os.environ:
    place = os.path.join(os.environ["ENDS"], str(os.getpid()))
    open(place, "w").close()
    while os.path.exists(place):
        time.sleep(0.01)
"""
"""What a program has at its end, so that its page is found before it is gone."""


class AgentsEnd:
    """What becomes of the pages that are made from now on; a page that was found is kept."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self._known: set[int] = set()
        self.look()
        self.close()  # what is left of another test

    def look(self) -> None:
        """Find new pages: those of a process that has ended later remain."""
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
                for number in os.listdir(f"/proc/{process.pid}/fd"):
                    page = open_page(Host(), process.pid, int(number))
                    if page is not None:
                        self._keep(page)

    def watch(
        self, command: Sequence[str], *environs: Mapping[str, str], cwd: Path
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a program in several environments at once, to their ends, and find the pages of those
        that LINGER until then.
        """
        ends = cwd / "ends"
        ends.mkdir(exist_ok=True)
        processes = [
            subprocess.Popen(
                command,
                env={**environ, "ENDS": str(ends)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for environ in environs
        ]
        ended: list[subprocess.CompletedProcess[str]] = []
        while len(ended) < len(processes):
            process = processes[len(ended)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, error = process.communicate(timeout=0.1)
                ended.append(subprocess.CompletedProcess(command, process.returncode, out, error))
            self.release(ends)
        return ended

    def release(self, ends: Path) -> None:
        """Find the pages of programs that LINGER, and let these end."""
        waiting = [*ends.iterdir()]
        if waiting:
            self.look()
        for each in waiting:
            each.unlink()

    def messages(self) -> list[Message]:
        """Return what stands in each page that there has ever been, in order."""
        self.look()
        found = []
        for page in self.pages:
            data = os.pread(page, PAGE, 0)
            if any(data):  # it was made just now
                found.append(newest_message(data))
        return found

    def message(self) -> Message:
        """Return what stands in the only page."""
        (message,) = self.messages()
        return message

    def saved(self) -> Saved | None:
        """Return what the only page says of checkpoints."""
        self.message()
        (page,) = self.pages
        return decode_saved(os.pread(page, PAGE, 0))

    def close(self) -> None:
        """Let go of the pages, and never find them again."""
        for page in self.pages:
            os.close(page)
        self.pages.clear()

    def _keep(self, page: int) -> None:
        inode = os.fstat(page).st_ino
        if inode in self._known:
            os.close(page)
        else:
            self._known.add(inode)
            self.pages.append(page)
