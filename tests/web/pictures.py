"""Takes the pictures of the page for the docs: `python -m tests.web.pictures docs/pictures`.

Each is what a real Chromium shows of a real agent, or of a real server over made-up samples, in one
state: well, a GPU lost, a hung job, no GPU, NVML hung; on a phone, and in the dark.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.agents import running
from tests.web.browser import PHONE, Visit, chromium
from tests.web.node import Node, node
from tests.web.serving import serving
from tests.web.test_page_findings import HANGING, JOB, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser

    Scheme = Literal["light", "dark"]

NAME = "gpu-node-17.simulated"
CLONE_NEWUTS = 0x04000000
SIZE = (1200, 620)
SECONDS = 12
"""How long a page is watched, so that its trends show something."""


def call_the_node(name: str) -> None:
    """Give this process and its children another host name, in a namespace of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    socket.sethostname(name)


def take(visit: Visit, target: Path) -> None:
    """Write one picture."""
    visit.page.screenshot(path=target)
    visit.page.close()
    print(f"{target}: {target.stat().st_size >> 10} KiB", flush=True)


def simulated(
    browser: Browser,
    target: Path,
    *,
    ail: Callable[[Node], object] = lambda _: None,
    wait: str = ".verdict",
    size: tuple[int, int] = SIZE,
    scheme: Scheme = "light",
) -> None:
    """Take a picture of a node with eight simulated GPUs under a training's load."""
    with tempfile.TemporaryDirectory() as directory, node(Path(directory)) as made:
        made.train(0)
        with made.agent() as agent:
            visit = Visit(browser, f"http://127.0.0.1:{agent.port}/", size, scheme)
            for second in range(SECONDS):
                made.train(second)
                visit.page.wait_for_timeout(1000)
            ail(made)
            visit.page.wait_for_selector(wait, timeout=60_000)
            take(visit, target)


def lose(made: Node) -> None:
    """Let the last GPU fall off the bus."""
    made.nvml.fault("fail", 15, gpu=7)


def hang(made: Node) -> None:
    """Let no call to NVML return."""
    made.nvml.fault("hang", 1)


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    call_the_node(NAME)
    with chromium() as browser:
        simulated(browser, directory / "healthy.png")
        simulated(browser, directory / "gpu-lost.png", ail=lose, wait=".verdict.bad")
        simulated(browser, directory / "nvml-hung.png", ail=hang, wait=".verdict.bad")
        simulated(browser, directory / "dark.png", ail=lose, wait=".verdict.bad", scheme="dark")
        simulated(browser, directory / "phone.png", ail=lose, wait=".verdict.bad", size=PHONE)
        with serving(snapshot(*JOB, *HANGING), guarded=False) as served:
            visit = Visit(browser, f"http://127.0.0.1:{served.port}/", SIZE)
            visit.page.wait_for_selector(".verdict.bad")
            take(visit, directory / "hang.png")
        with tempfile.TemporaryDirectory() as place, running(Path(place)) as agent:
            agent.wait(lambda scrape: scrape.value("dshealthd_memory_total_bytes"))
            take(Visit(browser, f"http://127.0.0.1:{agent.port}/", SIZE), directory / "no-gpu.png")


if __name__ == "__main__":
    main()
