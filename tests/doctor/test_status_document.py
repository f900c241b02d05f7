"""The status of a node for the doctor: of its agent, or collected in little time."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from dshealthd.doctor.status_document import DEADLINE, _hurried, status_document
from dshealthd.http.client import Access
from tests.doctor.looks import look, named, outcomes, results

HUNG = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection = server.accept()
time.sleep(600)
"""


def test_an_agent_that_hangs() -> None:
    """An agent that does not answer is not waited for: the sources are read without it."""
    command = [sys.executable, "-c", HUNG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout
            address = f"127.0.0.1:{int(agent.stdout.readline())}"
            web = dataclasses.replace(look().config.web, listen_address=address)
            config = dataclasses.replace(look().config, web=web)
            document = status_document(config, Access())
        finally:
            agent.kill()
    assert document["source"].startswith("collected without an agent: ")
    assert "does not answer within 1.5 s" in document["source"]
    context = dataclasses.replace(look(), config=config, document=document)
    (found,) = results(named("agent"), context)
    assert found.outcome.value == "unknown"
    assert "does not answer within 1.5 s" in found.text
    (nothing,) = document["findings"]  # the configuration has no collectors
    assert (nothing["severity"], nothing["detail"]) == ("unknown", "no collector runs")


def test_no_agent() -> None:
    """Where none listens, what only an agent knows does not apply."""
    web = dataclasses.replace(look().config.web, listen_address="127.0.0.1:1")
    config = dataclasses.replace(look().config, web=web)
    document = status_document(config, Access())
    context = dataclasses.replace(look(), config=config, document=document)
    assert outcomes(named("agent"), context) == ["ok"]


def test_sources_have_little_time() -> None:
    """Each has three seconds at most, as somebody waits; those that need less keep their own. The
    agent has 1.5, and all of it takes ten.
    """
    assert pytest.approx(10.0) == DEADLINE
    deadlines = {
        name: (options.deadline, hurried.deadline)
        for name, options in look().config.collectors.items()
        for hurried in (_hurried(look().config).collectors[name],)
    }
    assert all(hurried == min(usual, 3.0) for usual, hurried in deadlines.values()), deadlines
    assert {usual > 3.0 for usual, _ in deadlines.values()} == {True, False}
