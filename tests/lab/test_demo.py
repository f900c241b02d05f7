"""The demonstration, as `make demo` runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from typing import Any

import pytest

from tests.agents import Scrape
from tests.lab.catalogue import FAULTS, WITHOUT_PROBES
from tests.waiting import until

SECONDS = 700
"""All that the demonstration waits for itself, before it says what did not come."""
QUIET_SECONDS = 120.0
"""In which each rule is evaluated at least once after Prometheus knows everything."""


def fetched(url: str) -> str:
    """Return what a server of the demonstration answers."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def require_health(places: dict[str, str]) -> None:
    """Require no alert but the Watchdog, not even pending; no errors, retired rows or unknown
    nodes, by the addresses that the demonstration has printed.
    """
    assert json.loads(fetched(f"{places['fleet']}/api/v1/fleet"))["states"] == {"ok": 2}
    for node in ("node-1", "node-2"):
        scrape = Scrape(fetched(f"{places[node]}/metrics"), 0.0)
        for metric in ("infiniband_port_errors_total", "gpu_remapped_rows"):
            assert set(scrape.all(f"dshealthd_{metric}")) == {0.0}
    query = urllib.parse.urlencode({"query": 'ALERTS{alertname!="DshealthdWatchdog"}'})

    def alerts() -> list[Any]:
        answer = fetched(f"{places['Prometheus']}/api/v1/query?{query}")
        return list(json.loads(answer)["data"]["result"])

    until(lambda: not alerts(), alerts, QUIET_SECONDS)


@pytest.mark.timeout(SECONDS + 10)
def test_a_fault_is_shown_from_beginning_to_end() -> None:
    """The demonstration brings a cluster up in which nothing looks like a fault, says where to
    look, and shows the page of the fault that is chosen, with node, GPU and first step, and its
    end.
    """
    command = [sys.executable, "-m", "tests.lab.demo", "--nodes", "2", "--gpus", "2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.endswith(f"  {FAULTS[WITHOUT_PROBES[-1]].title}\n"):  # the end of the menu
                break
        if "not permitted here" in said:
            pytest.skip(said)
        places = dict(re.findall(r"^  (\S+) +(http://127\.0\.0\.1:\d+)/", said, re.MULTILINE))
        require_health(places)
        shown, errors = process.communicate("row-remap\n\nq\n", SECONDS)
    assert (process.returncode, errors) == (0, ""), said + shown + errors
    page = re.search(r"PAGE, [\d.]+ s later\n\n(.*?)└", shown, re.DOTALL)
    assert page, shown
    assert "node-2 GPU 1" in page[1]
    assert "first step: " in page[1]
    assert f"runbook: {places['node-2']}/runbooks/" in page[1]
    # A ticket may come in between: the kernel's count of processes that it has killed is the
    # machine's, and other tests have it kill some.
    assert re.search(r"fault over: .*?OVER, [\d.]+ s later", shown, re.DOTALL), shown


@pytest.mark.skipif(os.geteuid() != 0, reason="a capability is given up")
def test_without_namespaces_nothing_is_shown() -> None:
    """Where namespaces are not permitted the demonstration says so, and fails."""
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-m", "tests.lab.demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    refused = "nothing is shown: a pid namespace: Operation not permitted"
    assert (done.returncode, done.stderr, refused in done.stdout) == (1, "", True)


def test_it_needs_nothing_that_only_tests_do() -> None:
    """`make demo` installs the agent's own dependencies: whatever it imports is among them."""
    only_tests = ("pytest", "torch", "playwright", "blockbuster", "hypothesis", "psutil")
    code = "import sys\n"
    code += f"sys.modules.update(dict.fromkeys({only_tests!r}))\n"  # an import of None fails
    code += "import tests.lab.demo, tests.frozen, tests.netns"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
