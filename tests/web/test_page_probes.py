"""The page's panel of probes, over two real agents that probe each other by light rounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.processes import free_port
from tests.agents import running
from tests.web.browser import CHROMIUM, PHONE, Visit, chromium

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

NODES = ("127.0.0.41", "127.0.0.42")
# Other tests train on this machine meanwhile, and no round runs beside ranks.
CONFIG = """
[collectors.job_environment]
enabled = false
[probe]
period = "1s"
[probe.members]
nodes = ["127.0.0.41", "127.0.0.42"]
name = "{name}"
[probe.peer]
listen_address = "{name}:{port}"
key_file = "{key}"
off_file = "{key}.off"
"""


def test_rounds_and_accusations_are_shown(tmp_path: Path) -> None:
    """Members, their list and the last rounds are shown. Once the other agent is gone, its absence
    is, and nothing overflows a phone.
    """
    key = tmp_path / "key"
    with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as secret:
        secret.write("0123456789abcdef" * 4 + "\n")
    port = free_port()
    directories = [tmp_path / name for name in NODES]
    for directory in directories:
        directory.mkdir()
    configs = [CONFIG.format(name=name, port=port, key=key) for name in NODES]
    with running(directories[0], configs[0]) as agent, chromium() as browser:
        with running(directories[1], configs[1]):
            agent.wait(
                lambda scrape: scrape.value(
                    "dshealthd_probe_rounds_total", kind="light", outcome="ok"
                )
            )
            visit = Visit(browser, f"http://127.0.0.1:{agent.port}/", PHONE)
            visit.wait("section[aria-label='Probes']", "2 members, every 1 s")
            visit.wait("section[aria-label='Probes'] td", NODES[1])
            visit.wait("section[aria-label='Probes']", "none")
            assert visit.is_as_wide_as_its_window()
        agent.wait(lambda scrape: scrape.all("dshealthd_suspect"))
        visit.wait("section[aria-label='Probes'] td", "refused")
        visit.wait("section[aria-label='Probes'] .warn", NODES[1])
        assert "suspect" in visit.panel("Probes")
        visit.wait("section[aria-label='Probes'] .warn", "last seen in the round at ")
        assert visit.complaints == []
        visit.page.close()
