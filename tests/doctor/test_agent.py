"""The doctor beside a running agent: its snapshot is taken, and an impostor's is not."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bcrypt

from dshealthd.core import documents
from dshealthd.doctor.check import Result
from dshealthd.doctor.snapshot_check import SnapshotCheck
from dshealthd.doctor.status_document import status_document
from dshealthd.http.client import Access
from tests.agents import RunningAgent, end, first_line, launch, running
from tests.command_line import dshealthd
from tests.doctor.looks import look, named, results
from tests.doctor.machine import Machine
from tests.waiting import until
from tests.web.certificates import authority, certificate

CONFIG = '[collectors.gpu]\ninterval = "200ms"\n[collectors.ecc]\ninterval = "200ms"\n'


def test_findings_come_from_the_agent(make_machine: Callable[..., Machine]) -> None:
    """The doctor says what the agent sees, without a look of its own at the devices."""
    machine = make_machine()
    machine.simulator.set(2, "remapped_failure", 1)
    flags = ("--path.sysfs", str(machine.sys), "--path.dev", str(machine.dev))
    with running(machine.directory, CONFIG, flags=flags) as agent:
        agent.wait(lambda _: agent.status()["ready"] and agent.status()["findings"])
        machine.simulator.watch()
        before = machine.simulator.trace()
        answer = machine.ask(agent.port)
        assert answer.node["source"] == "agent"
        assert answer.found["gpu-memory", "gpu 2"] == ("nccl-all-reduce-failed", "critical")
        assert answer.node["facts"]["gpus"] == "8"
        assert machine.simulator.trace() == before  # nobody else has opened NVML
        machine.simulator.unset(2, "remapped_failure")
        until(lambda: not (agent.status()["verdict"] != "ok" and "GPU 2" in str(agent.status())))
        assert ("gpu-memory", "gpu 2") not in machine.ask(agent.port).found


def said(agent: RunningAgent, check: SnapshotCheck, outcome: str) -> Result:
    """Wait until a check beside this agent has one result of that outcome, and return it."""
    web = dataclasses.replace(look().config.web, listen_address=f"127.0.0.1:{agent.port}")
    config = dataclasses.replace(look().config, web=web)
    seen: list[Any] = []

    def result() -> Result | None:
        document = json.loads(documents.dumps(status_document(config, Access())))  # as of a child
        found = results(check, dataclasses.replace(look(), config=config, document=document))
        seen[:] = document["source"], found
        right = seen[0] == "agent" and [one.outcome.value for one in found] == [outcome]
        return found[0] if right else None

    return until(result, lambda: seen)


def run(words: str, *arguments: str) -> None:
    """Run a command as printed, and more arguments."""
    done = [sys.executable, "-m", *words.split(), *arguments]
    subprocess.run(done, check=True, capture_output=True, timeout=120)


def test_file_that_is_refused(tmp_path: Path) -> None:
    """A configuration that a running agent refuses is found; mended and read again, it passes."""
    with running(tmp_path, CONFIG) as agent:
        file = tmp_path / "dshealthd.toml"
        file.write_text("[collectors.gpu]\nintervall = '1s'\n", encoding="utf-8")
        agent.process.send_signal(signal.SIGHUP)
        found = said(agent, named("agent"), "warning")
        assert (named("agent").slug, found.component) == ("collector-failing", "configuration")
        assert "`dshealthd check-config`" in found.remedy
        file.write_text(CONFIG, encoding="utf-8")
        run("dshealthd check-config", "--config.file", str(file))
        agent.process.send_signal(signal.SIGHUP)
        said(agent, named("agent"), "ok")


def test_maintenance_that_is_over(tmp_path: Path) -> None:
    """A node in maintenance is found; the command of the remedy ends it, and the check passes."""
    state = ("--path.state", str(tmp_path / "state"))
    with running(tmp_path, '[collectors.maintenance]\ninterval = "200ms"\n') as agent:
        run("dshealthd maintenance on --for 1h --reason cable", *state)
        found = said(agent, named("maintenance"), "warning")
        assert named("maintenance").slug == "maintenance"
        (command,) = re.findall("`(dshealthd .*?)`", found.remedy)
        run(command, *state)
        said(agent, named("maintenance"), "ok")


def test_an_agent_with_a_password(tmp_path: Path) -> None:
    """An agent's status is read with TLS and password; without, the doctor collects."""
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    web = tmp_path / "web.yml"
    authority(tmp_path, "ca")
    certificate(tmp_path, "server", "ca", "DNS:n1.example")
    tls = "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"
    web.write_text(f"{tls}basic_auth_users: {{ops: '{hashed}'}}\n", encoding="utf-8")
    password = tmp_path / "password"
    password.write_text("secret\n", encoding="utf-8")
    process = launch(tmp_path, f'[web]\nconfig_file = "{web}"\n')
    try:
        found = re.search(r"https?://[^/]*:(\d+)/", first_line(process, 60))
        assert found
        own = ("--web.listen-address", f"127.0.0.1:{found[1]}", "--web.config-file", str(web))
        for given, source in (
            (("--user", "ops", "--password-file", str(password)), "agent"),
            ((), "401 Unauthorized (--user and --password-file)"),
            (("--user", "ops", "--password-file", str(tmp_path / "none")), "No such file"),
        ):
            done = dshealthd("doctor", "--json", "--only", "clock", *own, *given)
            (node,) = json.loads(done.stdout)["nodes"]
            assert source in node["source"], done
    finally:
        end(process)
