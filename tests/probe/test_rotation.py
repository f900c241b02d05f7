"""Keys and certificates are replaced while agents probe each other, and no round fails because of
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dshealthd.cli import main as cli
from tests.probe.peering import until
from tests.probe.services import NAMES, agents
from tests.web import certificates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dshealthd.probe.options import ProbeOptions
    from dshealthd.probe.peers.secret_files import Secrets
    from tests.probe.services import Agent

PAIR = 2


def put(source: Path, target: Path) -> None:
    """Replace a file atomically, like tools that distribute files."""
    new = target.with_name(f"{target.name}.new")
    shutil.copyfile(source, new)
    new.chmod(0o600)
    new.replace(target)


def good(agent: Agent) -> float:
    """Return the number of an agent's successful rounds."""
    return agent.value("probe_rounds_total", "light", "ok")


def secrets(agent: Agent) -> Secrets:
    """Return the credentials that an agent uses."""
    running = agent.service._running
    assert running is not None
    return running.credentials.secrets


@contextlib.asynccontextmanager
async def changing(members: list[Agent], agent: Agent) -> AsyncIterator[None]:
    """Let an agent notice changed files, and require that all have good rounds afterwards."""
    old = secrets(agent)
    yield
    await until(lambda: secrets(agent) is not old)
    before = [good(agent) for agent in members]
    await until(lambda: all(good(agent) > had for agent, had in zip(members, before, strict=True)))


def failures(members: list[Agent]) -> list[dict[tuple[str, ...], float]]:
    """Return each agent's rounds that failed, by their labels."""
    return [
        {
            sample.labels: sample.value
            for sample in agent.all("probe_rounds_total")
            if sample.value and "ok" not in sample.labels
        }
        for agent in members
    ]


def require_no_failure(members: list[Agent], at_first: list[dict[tuple[str, ...], float]]) -> None:
    """Require that every round since succeeded, no call was refused, and every file was good.

    `at_first` are the rounds that failed while the other agent had not started to listen.
    """
    assert failures(members) == at_first
    for agent in members:
        for reason in ("key", "certificate", "no_credentials"):
            assert agent.value("probe_peer_requests_refused_total", reason) == 0
        assert agent.value("probe_peer_connections_refused_total", "tls_handshake") == 0
        assert agent.value("probe_peer_credentials_last_reload_successful") == 1


async def test_key(tmp_path: Path) -> None:
    """`keys rotate` three times, with each file on one node seconds before the other: no round
    fails. After that nobody accepts the first key.
    """
    keys = [tmp_path / name / "key" for name in NAMES[:PAIR]]
    async with agents(tmp_path, PAIR) as members:
        first = keys[0].read_bytes()
        rotate = ["keys", "rotate", "--file", str(keys[0])]
        await until(lambda: all(good(agent) for agent in members))
        at_first = failures(members)
        for _ in range(3):
            async with changing(members, members[0]):
                assert await asyncio.to_thread(cli.main, rotate) == 0
            async with changing(members, members[1]):
                put(keys[0], keys[1])
        require_no_failure(members, at_first)
        assert keys[0].read_bytes() == keys[1].read_bytes()
        assert first.strip() not in keys[0].read_bytes()


async def test_certificates_and_their_authority(tmp_path: Path) -> None:
    """Certificates of one authority are replaced by those of its successor: no round fails. Node by
    node, the successor is trusted, then signs, then the old authority is removed.
    """
    issued = tmp_path / "issued"
    issued.mkdir()
    for authority in ("old", "new"):
        certificates.authority(issued, authority)
        for name in NAMES[:PAIR]:
            certificates.certificate(issued, f"{name}-{authority}", authority, f"DNS:{name}")
    (issued / "both.pem").write_bytes(
        (issued / "old.pem").read_bytes() + (issued / "new.pem").read_bytes()
    )

    def change(options: ProbeOptions) -> ProbeOptions:
        name = options.members.name
        state = tmp_path / name
        put(issued / "old.pem", state / "ca.pem")
        put(issued / f"{name}-old.pem", state / "node.pem")
        put(issued / f"{name}-old.key", state / "node.key")
        peer = replace(
            options.peer,
            key_file=None,
            tls_cert_file=state / "node.pem",
            tls_key_file=state / "node.key",
            tls_ca_file=state / "ca.pem",
        )
        return replace(options, peer=peer)

    # Their certificates are valid from now on.
    async with agents(tmp_path, PAIR, change=change, begin=time.time()) as members:
        await until(lambda: all(good(agent) for agent in members))
        at_first = failures(members)
        for step in ("trust", "sign", "forget"):
            for agent in members:
                state = tmp_path / agent.name
                async with changing(members, agent):
                    if step == "sign":
                        put(issued / f"{agent.name}-new.pem", state / "node.pem")
                        put(issued / f"{agent.name}-new.key", state / "node.key")
                    else:
                        source = "both.pem" if step == "trust" else "new.pem"
                        put(issued / source, state / "ca.pem")
        require_no_failure(members, at_first)
