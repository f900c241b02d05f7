"""The walk-throughs of docs/walkthroughs.md, timed: `python -m tests.lab.walkthroughs`.

Each question is asked as a user asks it, of a node's page in Chromium, of the shell and of what the
dashboards query, after a real fault in the lab. The seconds are the software's: how long a person
reads is not in them. As root, with torch in this environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.grafana.documents import queries, substituted, variables
from tests.lab import faults, jobs
from tests.lab.catalogue import FAULTS
from tests.lab.forward import forwarded
from tests.lab.hardware import training
from tests.lab.paging import Paging
from tests.lab.receiver import FIRING
from tests.web.browser import Visit, chromium

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser

    from tests.lab.node import Node

STEPS = 40
"""Steps after which what is usual for the job is known."""
RANK = 2
"""The rank that is stopped: on the second node."""
PATIENCE = 180.0
DSHEALTHD = (sys.executable, "-m", "dshealthd")
ALERTS_PANEL = ("dshealthd-node", "Firing alerts")
HUNG_PANEL = ("dshealthd-fleet", "Jobs hung")
CAUSE_PANEL = ("dshealthd-jobs", "Causes of hangs")
"""The panels that answer by dashboard: uid and title. Their queries are read from the shipped
dashboards, so that what is timed is what Grafana asks.
"""


def query_of(panel: tuple[str, str], **chosen: str) -> str:
    """Return a panel's one query as Grafana sends it, with what is chosen in its variables.

    ValueError where the dashboard has no such panel, or the panel more than one query.
    """
    (query,) = (query for query in queries() if (query.board, query.panel) == panel)
    return substituted(query.expr, variables(**chosen))


def until(condition: Callable[[], bool], what: str) -> float:
    """Return the seconds until something is so; AssertionError after three minutes."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE, what
        time.sleep(0.1)
    return time.monotonic() - began


class Walk:
    """One lab, and the places at which its user asks."""

    def __init__(self, lab: Paging, browser: Browser, stack: contextlib.ExitStack) -> None:
        """`stack` closes the ways into the lab."""
        self.lab, self._browser = lab, browser
        self._ways = {
            node.name: stack.enter_context(forwarded(node.station, node.agent.port))
            for node in lab.lab.nodes
        }

    def shell(self, *words: str) -> tuple[float, int, str]:
        """Return how long a command takes, its status, and what it prints."""
        asked = [self._ways.get(word, word) for word in words]
        began = time.monotonic()
        ended = subprocess.run([*DSHEALTHD, *asked], capture_output=True, text=True, check=False)
        return time.monotonic() - began, ended.returncode, ended.stdout

    def page(self, node: str, *texts: str) -> float:
        """Return the seconds from opening a node's page until it shows these texts."""
        began = time.monotonic()
        visit = Visit(self._browser, f"http://{self._ways[node]}/")
        for text in texts:
            visit.wait("body", text, 30.0)
        took = time.monotonic() - began
        visit.page.close()
        return took

    def dashboard(
        self, panel: tuple[str, str], *, value: float | None = None, **wanted: str
    ) -> float:
        """Return how long Prometheus takes for a panel's query.

        Its answer has to have a series with the labels and, where one is given, the value.
        """
        expression = query_of(panel, node=wanted.get("node", ".+"))
        began = time.monotonic()
        series = self.lab.prometheus.query(expression)
        took = time.monotonic() - began
        assert any(
            # A browser shows a run of spaces as one; those of labels that are empty are in it.
            wanted.items()
            <= {name: " ".join(text.split()) for name, text in one["metric"].items()}.items()
            and (value is None or float(one["value"][1]) == value)
            for one in series
        ), f"{panel}: {series}"
        return took

    def paged(self, symptom: str, node: str) -> bool:
        """Tell whether the page of a symptom on a node has come."""
        told = self.lab.receiver.told("page")
        wanted = {"symptom": symptom, "node": node}.items()
        return any(alert.status == FIRING and wanted <= alert.labels.items() for alert in told)


def fit(walk: Walk, node: Node) -> Iterator[tuple[str, float]]:
    """Is the node fit? Before a fault, and after one."""
    until(lambda: walk.shell("status", node.name)[1] != 2, "an earlier fault does not end")
    took, _, _ = walk.shell("status", node.name)
    yield "fit: shell, without a fault", took
    yield "fit: page, without a fault", walk.page(node.name)
    began = time.monotonic()
    with training(node, 0), FAULTS["gpu-lost"].inject(walk.lab, node):
        until(lambda: walk.shell("status", node.name)[1] == 2, "status shows no lost GPU")
        yield "gpu: from the fault until `dshealthd status` has it", time.monotonic() - began
        until(lambda: walk.paged("gpu-lost", node.name), "no page came")
        yield "gpu: from the fault to the page", time.monotonic() - began
        took, status, text = walk.shell("status", node.name)
        assert status == 2
        assert "GPU 3" in text
        yield "fit: shell, names the GPU", took
        yield "fit: page, names the GPU", walk.page(node.name, "GPU 3")
        yield (
            "fit: dashboard's query",
            walk.dashboard(
                ALERTS_PANEL, node=node.name, symptom="gpu-lost", which="GPU 3 NVML: GPU is lost"
            ),
        )
    until(lambda: walk.shell("status", node.name)[1] != 2, "the fault does not end")


def hang(walk: Walk, directory: Path) -> Iterator[tuple[str, float]]:
    """Which rank hangs, and why?"""
    nodes = walk.lab.lab.nodes
    with jobs.torchrun(directory, nodes, "script_ddp.py", "1000000") as job:
        job.until(STEPS)
        culprit = job.node_of(RANK).name
        began = time.monotonic()
        with faults.pause(job.pids()[RANK]):
            names = [node.name for node in nodes]
            until(lambda: walk.shell("jobs", *names)[1] == 2, "`dshealthd jobs` shows no hang")
            yield "hang: from the fault until `dshealthd jobs` has it", time.monotonic() - began
            until(lambda: walk.paged("training-hang", culprit), "no page came")
            yield "hang: from the fault to the page", time.monotonic() - began
            took, _, text = walk.shell("jobs", *names)
            assert f"rank {RANK}" in text, text
            print(text, file=sys.stderr)
            yield "hang: shell, names rank and cause", took
            yield "hang: node page, names rank", walk.page(culprit, f"rank {RANK}")
            yield "hang: dashboard's query, jobs hung", walk.dashboard(HUNG_PANEL, value=1)
            took = walk.dashboard(CAUSE_PANEL, node=culprit, rank=str(RANK))
            yield "hang: dashboard's query, names rank", took


def main() -> int:
    """Print what each step took, as JSON."""
    took: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="dshealthd-walk-")))
        lab = stack.enter_context(Paging(directory, 2, gpus=8, progress=lambda _: None))
        assert not lab.lab.limits, lab.lab.limits
        lab.until_watched()
        walk = Walk(lab, stack.enter_context(chromium()), stack)
        # A page of a part that the job depends on comes in place of the job's: the hang is first.
        for steps in (hang(walk, directory / "job"), fit(walk, lab.lab.nodes[1])):
            for name, seconds in steps:
                took[name] = round(seconds, 2)
                print(f"{name}: {seconds:.2f}", file=sys.stderr, flush=True)
    print(json.dumps(took | {"load": round(os.getloadavg()[0], 1)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
