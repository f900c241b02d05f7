"""The demonstration, as `make demo` runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.lab import demo
from tests.lab.forward import forwarded

SECONDS = 700
"""All that the demonstration waits for itself, before it says what did not come."""
QUIET_SECONDS = 120.0
"""In which each rule is evaluated at least once after Prometheus knows everything."""


@pytest.mark.timeout(SECONDS + 10)
def test_a_fault_is_shown_from_beginning_to_end() -> None:
    """`--fault` brings a cluster up, says where to look, shows the page with node, GPU and first
    step, and that it is over.
    """
    words = ["-m", "tests.lab.demo", "--nodes", "1", "--gpus", "2", "--fault", "row-remap"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if "not permitted here" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"node-1 +http://127\.0\.0\.1:\d+/\n", done.stdout)
    page = re.search(r"PAGE, [\d.]+ s later\n\n(.*?)└", done.stdout, re.DOTALL)
    assert page, done.stdout
    assert "node-1 GPU 1" in page[1]
    assert "first step: " in page[1]
    link = re.search(r"runbook: (http://127\.0\.0\.1:\d+/runbooks/[a-z-]+)#", page[1])
    assert link, page[1]
    assert f"node-1        {link[1].partition('/runbooks')[0]}/\n" in done.stdout
    # A ticket may come in between: the kernel's count of processes that it has killed is the
    # machine's, and other tests have it kill some.
    assert re.search(r"fault over: .*?OVER, [\d.]+ s later", done.stdout, re.DOTALL), done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a capability is given up")
def test_without_namespaces_nothing_is_shown() -> None:
    """Where namespaces are not permitted the demonstration says so, and fails."""
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-m", "tests.lab.demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    refused = "nothing is shown: a pid namespace: Operation not permitted"
    assert (done.returncode, done.stderr, refused in done.stdout) == (1, "", True)


@pytest.mark.timeout(SECONDS + 10)
def test_a_healthy_cluster_shows_nothing_that_looks_like_a_fault(tmp_path: Path) -> None:
    """No alert but the Watchdog, not even pending; no errors, retired rows or unknown nodes."""
    with demo.Demo(tmp_path, 2, 2).paging as cluster:
        cluster.until_watched()
        first = cluster.lab.nodes[0]
        with (
            forwarded(first.station, first.agent.port) as way,
            urllib.request.urlopen(f"http://{way}/api/v1/fleet", timeout=60) as fleet,
        ):
            assert json.load(fleet)["states"] == {"ok": 2}
        for node in cluster.lab.nodes:
            scrape = node.scrape()
            for metric in ("infiniband_port_errors_total", "gpu_remapped_rows"):
                assert set(scrape.all(f"dshealthd_{metric}")) == {0.0}
        expression = 'ALERTS{alertname!="DshealthdWatchdog"}'
        end = time.monotonic() + QUIET_SECONDS
        while found := cluster.prometheus.query(expression):
            assert time.monotonic() < end, found
            time.sleep(1)


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
