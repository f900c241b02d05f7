"""Several nodes through their agents: real agents on addresses of the loopback, over the channel that
probes use, and what is done where one does not answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib.util
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bench.processes import free_port
from dshealthd.core.host import Host
from dshealthd.doctor import agents, node
from dshealthd.doctor.agents import node_report, unpacked
from dshealthd.doctor.snapshot_check import SnapshotCheck, is_answered
from dshealthd.findings.finding import State
from dshealthd.fleet.summary import StatusPages
from dshealthd.probe.peers.messages import MAX_DOCUMENT, MAX_PAYLOAD
from dshealthd.probe.peers.protocol import PeerError, Refusal
from tests import status_documents
from tests.agents import RunningAgent, running
from tests.command_line import dshealthd
from tests.doctor.looks import look
from tests.probe.peering import KEY, secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.doctor.machine import Machine

NODES = ("127.0.0.41", "127.0.0.42", "127.0.0.43")
"""Members; nothing runs on the last."""
# An epoch that begins has a round of its own, which a collective at that moment finds busy: those of
# an hour begin in one run of some hundred.
# Other tests train on this machine meanwhile, and no round runs beside ranks.
CONFIG = """
[collectors.job_environment]
enabled = false
[probe]
python = "{python}"
period = "1000h"
[probe.members]
nodes = {nodes}
name = "{name}"
[probe.peer]
listen_address = "{name}:{port}"
key_file = "{key}"
"""


def interpreter() -> str:
    """Return the interpreter beside which torch is installed: a probe's runs without .pth files."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    prefix = spec.origin.partition("/lib/python")[0]
    return f"{prefix}/bin/python" if os.access(f"{prefix}/bin/python", os.X_OK) else sys.executable


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[RunningAgent]]]:
    """Run the agents of two of three members; give the first one's configuration file."""
    base, port = tmp_path_factory.mktemp("cluster"), free_port()
    started = []
    with contextlib.ExitStack() as stack:
        for name in NODES[:2]:
            directory = base / name
            directory.mkdir()
            text = CONFIG.format(
                python=interpreter(),
                nodes=json.dumps(NODES),
                name=name,
                port=port,
                key=secret(directory, "key", KEY),
            )
            started.append(stack.enter_context(running(directory, text)))
        for agent in started:
            agent.wait(lambda scrape: scrape.value("dshealthd_probe_up"))
            status = agent.status
            agent.wait(lambda _, status=status: status()["ready"])  # type: ignore[misc] # bound here
        yield base / NODES[0] / "dshealthd.toml", started


def doctor(
    cluster: tuple[Path, list[RunningAgent]], hosts: tuple[str, ...], *arguments: str
) -> dict[str, Any]:
    """Return what the command says on the first node. Its SSH client reaches nobody."""
    file, (agent, _) = cluster
    client = file.with_name("ssh")
    client.write_text("#!/bin/sh\nexec 2>&1; exit 255\n")
    client.chmod(0o755)
    done = dshealthd(
        *("doctor", "--json", "--hosts", ",".join(hosts), "--ssh", str(client)),
        *("--config.file", str(file), "--web.listen-address", f"127.0.0.1:{agent.port}"),
        *arguments,
    )
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_agents_are_asked(cluster: tuple[Path, list[RunningAgent]]) -> None:
    """The other node is examined by its agent, or over SSH where that does not answer."""
    document = doctor(cluster, NODES)
    here, other, gone = document["nodes"]
    assert here["source"] == "agent"
    assert {"member-connections", "host-name", "process-limits"} <= {
        one["check"] for one in here["checks"]
    }
    assert other["problem"] is None
    assert other["source"].startswith("its agent, over the authenticated channel; ")
    names = {one["check"] for one in other["checks"]}
    assert {"loopback", "disk-space", "nccl-releases", "probe-rounds"} <= names
    assert names.isdisjoint({"member-connections", "host-name", "kernel-settings", "software"})
    assert other["facts"]["kernel"] == here["facts"]["kernel"]
    assert "its agent: refused" in gone["problem"]
    assert "over SSH" in gone["problem"]


def test_what_agents_cannot_answer_goes_over_ssh(cluster: tuple[Path, list[RunningAgent]]) -> None:
    """A check that needs a process on the node, and --no-agent, ask nobody's agent."""
    for arguments in (("--only", "member-connections"), ("--no-agent", "--only", "loopback")):
        (found,) = doctor(cluster, NODES[1:2], *arguments)["nodes"]
        assert "SSH" in found["problem"]
        assert "agent" not in found["problem"]


def test_documents_of_others_are_not_trusted() -> None:
    """What is not gzip, no JSON, no object, cut off, nested without end or huge is refused."""
    good = gzip.compress(json.dumps(status_documents.document()).encode())
    assert unpacked(good)["node"] == "n1"
    deep = b"[" * 100_000
    for bad in (b"", b"x", good[:-9], *map(gzip.compress, (b"[]", b"nan", b"{", deep))):
        with pytest.raises(PeerError, match="malformed"):
            unpacked(bad)


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small packet that unpacks into more than a bound costs no more than the bound."""
    monkeypatch.setattr(agents, "MAX_DOCUMENT", 1 << 16)
    with pytest.raises(PeerError, match="malformed"):
        unpacked(gzip.compress(b'"' + b"x" * (1 << 20) + b'"'))


def test_pages_belong_together() -> None:
    """All pages within a moment are of one rendering; later ones have another stamp."""
    now = [0.0]
    made: list[bytes] = []

    def packed() -> bytes:
        made.append(bytes([len(made)]) * (MAX_PAYLOAD + 5))
        return made[-1]

    pages = StatusPages(packed, lambda: now[0])
    first, second = pages(0), pages(MAX_PAYLOAD)
    assert first["data"] + second["data"] == made[0]
    assert first["stamp"] == second["stamp"]
    now[0] = 60.0
    assert pages(0)["stamp"] != first["stamp"]
    assert len(made) == 2
    with pytest.raises(Refusal, match="too_large"):
        StatusPages(lambda: bytes(MAX_DOCUMENT + 1), lambda: 0.0)(0)


def test_another_nodes_document_is_judged_without_this_host(
    make_machine: Callable[..., Machine], tmp_path: Path
) -> None:
    """A fault in another node's document is found, and nothing of this machine is read for it."""
    machine = make_machine()
    machine.simulator.set(1, "remapped_failure", 1)
    host = Host(sysfs=machine.sys, dev=machine.dev)
    context = look("gpu", "ecc", "mig", "gpu_bus", "pcie", "memory", "pressure", host=host)
    nothing = dataclasses.replace(
        context.config.path,
        **dataclasses.asdict(Host(**dict.fromkeys(dataclasses.asdict(Host()), tmp_path))),
    )
    config = dataclasses.replace(context.config, path=nothing)
    found = [
        node_report(one, node.CHECKS, "other", context.document) for one in (context.config, config)
    ]
    assert found[0].facts == found[1].facts
    both = [{one.name: one.results for one in each.checks} for each in found]
    assert both[0] == both[1]
    (fault,) = [one for one in both[0]["gpu-memory"] if one.outcome is State.CRITICAL]
    assert (fault.component, bool(fault.remedy)) == ("gpu 1", True)
    assert "architecture" not in found[0].facts
    left_out = {check.name for check in node.CHECKS if not is_answered(check)}
    assert left_out & both[0].keys() <= {
        check.name for check in node.CHECKS if isinstance(check, SnapshotCheck)
    }
    assert not any(
        one.outcome is State.OK for name in left_out & both[0].keys() for one in both[0][name]
    )
