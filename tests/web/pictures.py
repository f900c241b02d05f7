"""Takes the pictures of the page for the docs: `python -m tests.web.pictures docs/pictures`.

Each is what a real Chromium shows of a real agent in one state: healthy, a GPU lost, a hung job, no
GPU, NVML hung; on a phone, and in the dark. The job is eight real processes that send heartbeats.
As root: the node has processes and a host name of its own, so that nothing of this machine shows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, Route

from tests.agents import running
from tests.findings.test_trends import WALL
from tests.findings.test_trends import Node as Past
from tests.web.browser import PHONE, Visit, chromium
from tests.web.node import Node, node
from tests.web.serving import serving
from tests.web.test_page_trends import LOSS, LOST, lived

Scheme = Literal["light", "dark"]

NAME = "gpu-node-17.simulated"
SIZE, WHOLE = (1200, 620), (1200, 1000)
"""A window's size; the second has room for the panels below the GPUs."""
SECONDS = 12
"""How long a page is watched, so that its job has made steps and ports have rates."""


OWN = "in-namespaces"
"""The word by which this program knows that it runs in namespaces of its own."""
ENTER = 'hostname "$0" && exec "$@"'
RANKS, STOPPED = 8, 2
GONE = LOSS.part
"""The GPU that was lost half an hour ago."""
RANK = Path(__file__).parents[1] / "jobs" / "rank.py"
WITHOUT_CLOCK = "[collectors.clock]\nenabled = false\n"
"""Whether this machine's clock is synchronized is no part of the pictures."""


def enter(arguments: list[str]) -> int:
    """Run this program again with processes, mounts and a host name of its own."""
    again = [sys.executable, "-m", "tests.web.pictures", *arguments, "--own", OWN]
    command = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.run([*command, "sh", "-c", ENTER, NAME, *again], check=False).returncode


@contextlib.contextmanager
def training() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the ranks of a job that send heartbeats until they are written a line."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "SLURM_JOB_ID": "4711",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            }
            started.append(
                subprocess.Popen(
                    [sys.executable, RANK], env=os.environ | variables, stdin=subprocess.PIPE
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def stop_a_rank(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Stop one rank, and have the others wait in the backward pass, as for a collective."""
    ranks[STOPPED].send_signal(signal.SIGSTOP)
    for process in ranks:
        if process is not ranks[STOPPED] and process.stdin is not None:
            process.stdin.write(b"wait\n")
            process.stdin.flush()


def remember(page: Page, past: Past, gone: str = "") -> None:
    """Give the page of a young agent the hour before. Findings about the part `gone` began half an
    hour ago.
    """
    begun = [LOSS] if gone else []

    def trends(route: Route) -> None:
        route.fulfill(body=past.trends.document(NAME, WALL, begun))

    def status(route: Route) -> None:
        document = route.fetch().json()
        for finding in document["findings"]:
            if finding["part"] == gone:
                finding["since"] -= 1800
        route.fulfill(json=document)

    page.route("**/api/v1/trends", trends)
    if gone:
        page.route("**/api/v1/status", status)


def fleet(browser: Browser, target: Path, scheme: Scheme = "light") -> None:
    """Take a picture of the page of a fleet of 48 nodes, one with a lost GPU."""
    lost = [{"slug": "gpu-lost", "severity": "critical", "part": "GPU 7", "summary": LOSS.says}]
    nodes = []
    for at in range(48):
        hours = "." * 22 + "CC" if at == 17 else "." * (at % 20) + "w" * (at % 9 == 4)
        node: dict[str, Any] = {"name": f"gpu-node-{at}", "leaf": f"leaf-{at // 16}", "state": "ok"}
        node |= {"time": WALL, "hours": hours.ljust(24, "."), "version": "0.1.0"}
        if at == 17:
            node |= {"state": "critical", "problems": 1, "findings": lost}
        nodes.append(node)
    answer: dict[str, Any] = {
        "schema": 1,
        "node": NAME,
        "time": WALL,
        "asking": False,
        "suspects": [],
    }
    answer |= {"members": len(nodes), "states": {"ok": len(nodes) - 1, "critical": 1}}
    answer |= {"nodes": nodes, "leaves": [], "jobs": [], "jobs_left_out": 0}
    with serving(guarded=False) as served:
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme=scheme)
        page.route("**/api/v1/fleet", lambda route: route.fulfill(json=answer))
        page.goto(f"http://127.0.0.1:{served.port}/fleet")
        page.wait_for_selector(".hours")
        take(page, target)


def take(page: Page, target: Path) -> None:
    """Write one picture."""
    page.unroute_all(behavior="wait")
    page.screenshot(path=target)
    page.close()
    print(f"{target}: {target.stat().st_size >> 10} KiB", flush=True)


def simulated(
    browser: Browser,
    target: Path,
    *,
    ail: Callable[[Node], object] = lambda _: None,
    ail_job: Callable[[list[subprocess.Popen[bytes]]], object] = lambda _: None,
    wait: str = ".verdict",
    settle: float = 2,
    size: tuple[int, int] = SIZE,
    scheme: Scheme = "light",
    gone: str = "",
) -> None:
    """Take a picture of a node with eight simulated GPUs under a training's load."""
    with tempfile.TemporaryDirectory() as directory, node(Path(directory)) as made:
        made.train(0)
        with made.agent(WITHOUT_CLOCK) as agent, training() as ranks:
            url = f"http://127.0.0.1:{agent.port}/"
            past = lived(LOST if gone else None, hot=None)
            visit = Visit(browser, url, size, scheme, lambda page: remember(page, past, gone))
            for second in range(SECONDS):
                made.train(second)
                visit.page.wait_for_timeout(1000)
            ail(made)
            ail_job(ranks)
            visit.page.wait_for_selector(wait, timeout=180_000)
            visit.page.wait_for_timeout(1000 * settle)
            take(visit.page, target)


def lose(made: Node) -> None:
    """Let the last GPU fall off the bus."""
    made.nvml.fault("fail", 15, gpu=7)


def hang(made: Node) -> None:
    """Let no call to NVML return."""
    made.nvml.fault("hang", 1)


def main() -> int:
    """Take all pictures; status 0 if all could be taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--own", help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory: Path = options.directory
    if options.own != OWN:
        return enter(sys.argv[1:])
    directory.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        simulated(browser, directory / "healthy.png", wait=".verdict.good", size=WHOLE)
        simulated(
            browser,
            directory / "gpu-lost.png",
            ail=lose,
            wait=".verdict.bad",
            size=WHOLE,
            gone=GONE,
        )
        simulated(
            browser, directory / "nvml-hung.png", ail=hang, wait=".verdict.bad", settle=SECONDS
        )
        simulated(
            browser, directory / "dark.png", ail=lose, wait=".verdict.bad", scheme="dark", gone=GONE
        )
        simulated(
            browser, directory / "phone.png", ail=lose, wait=".verdict.bad", size=PHONE, gone=GONE
        )
        simulated(
            browser,
            directory / "hang.png",
            ail_job=stop_a_rank,
            wait=".verdict.bad:has-text('hung')",
            size=WHOLE,
        )
        with tempfile.TemporaryDirectory() as place, running(Path(place), WITHOUT_CLOCK) as agent:
            agent.wait(lambda scrape: scrape.value("dshealthd_memory_total_bytes"))
            visit = Visit(browser, f"http://127.0.0.1:{agent.port}/", SIZE)
            visit.page.wait_for_selector(".verdict.good")
            take(visit.page, directory / "no-gpu.png")
        fleet(browser, directory / "fleet.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
