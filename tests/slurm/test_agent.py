"""The findings of the agent are taken from the agent alone, and never waited for."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from dshealthd.config import config
from dshealthd.config.config import Config
from dshealthd.core import schema
from dshealthd.findings.finding import Finding
from dshealthd.slurm import agent
from dshealthd.slurm.agent import AgentSilent, AgentVerdict
from dshealthd.slurm.options import DRAIN_FOR, SlurmOptions
from tests import status_documents
from tests.agents import end, first_line, launch
from tests.http.impostors import impostor, nobody, saying, serving
from tests.status_documents import finding
from tests.stopwatch import Stopwatch
from tests.web import certificates

SHIPPED = agent.TIMEOUT


def document(**other: Any) -> dict[str, Any]:
    """Return a status document with one lost GPU."""
    return status_documents.document(
        **{
            "verdict": "critical",
            "findings": [finding(reason="Xid 79")],
            "metrics": {
                "dshealthd_xid_last_timestamp_seconds": {
                    "samples": [{"labels": {"gpu": "3", "xid": "45"}, "value": 991.0}]
                }
            },
            **other,
        }
    )


def judged(**other: Any) -> AgentVerdict:
    """Return the verdict in a status document."""
    told = document(**other)
    told["findings"] = schema.of(list[Finding]).read(told["findings"], "findings")
    return agent.judge(told, frozenset(DRAIN_FOR))


def configured(port: int) -> Config:
    """Return a configuration with the agent on a port."""
    loaded = config.load(None)
    return replace(loaded, web=replace(loaded.web, listen_address=f"127.0.0.1:{port}"))


def ask(port: int) -> AgentVerdict:
    """Ask the agent of a port."""
    return agent.query(configured(port), DRAIN_FOR)


def test_finding_and_its_xid() -> None:
    """A critical finding is named as the reason has it, with the Xid that shows it, and not one
    that followed from that.
    """
    with serving(saying(json.dumps(document()))) as port:
        verdict = ask(port)
    assert verdict.critical == {"gpu-lost gpu=3": "gpu-lost gpu=3 xid=79"}
    assert not verdict.clean


@pytest.mark.parametrize(
    ("reason", "xid"), [("Xid 154: gpu reset required", " xid=154"), ("NVML: GPU is lost", "")]
)
def test_a_finding_that_an_xid_shows(reason: str, xid: str) -> None:
    """Its reason says which; what NVML alone says has none, whatever the log has of that GPU."""
    verdict = judged(findings=[finding(reason=reason)])
    assert verdict.critical["gpu-lost gpu=3"] == f"gpu-lost gpu=3{xid}"


@pytest.mark.parametrize(("change", "found", "clean"), [
    ({"findings": [], "verdict": "ok"}, 0, True),
    ({"findings": [], "verdict": "warning"}, 0, True),
    ({"findings": [], "verdict": "unknown"}, 0, False),
    ({"findings": [], "verdict": "critical"}, 0, False),
    ({"findings": [], "verdict": "ok", "ready": False}, 0, False),
    ({"ready": False}, 1, False),
])  # fmt: skip
def test_verdicts(change: dict[str, Any], found: int, clean: bool) -> None:  # noqa: FBT001 - a case
    """Unknown is not clean, neither is critical for what does not drain, nor an agent that has not
    judged yet, whose remembered findings count.
    """
    verdict = judged(**change)
    assert (len(verdict.critical), verdict.clean) == (found, clean)


def test_missing_gpus_have_no_name() -> None:
    """GPUs of which only the number is known are not taken for one called `GPUs`."""
    found = judged(findings=[finding(part="GPUs")]).critical
    assert [*found] == ["gpu-lost"]


def test_only_critical_ones_that_were_asked_for() -> None:
    """A warning, another alert, an unknown source and unmonitored GPUs drain nothing."""
    others = [
        finding(severity="warning"),
        finding(severity="unknown"),
        finding(alert="DshealthdFilesystemFull"),
        finding(alert="DshealthdGpusUnwatched", severity="warning"),
    ]
    assert not judged(findings=others).critical


def test_reason_is_made_of_harmless_characters() -> None:
    """What a part or a slug holds cannot leave the reason, nor become a field of scontrol."""
    evil = finding(
        slug="gpu-lost]\nState=DOWN",
        component="path",
        part="/x\n[dshealthd: y]|a=b" + "z" * 100,
    )
    (reason,) = judged(findings=[evil]).critical.values()
    assert not set(reason) & set("\n[]|;'\"$`")
    assert len(reason.rpartition("=")[2]) == 40


@pytest.mark.parametrize(("status", "says"), [
    ("401 Unauthorized", "requires a password (401)"),
    ("503 Service Unavailable", "503"),
])  # fmt: skip
def test_refusal(status: str, says: str) -> None:
    """An agent that asks for a password says nothing of the node, nor does one that fails."""
    with serving(saying("", status)) as port, pytest.raises(AgentSilent) as silent:
        ask(port)
    assert says in str(silent.value)
    assert ("password" in str(silent.value)) == ("401" in status)


def test_absent() -> None:
    """No agent."""
    with nobody() as port, pytest.raises(AgentSilent, match="refused"):
        ask(port)


@contextlib.contextmanager
def guarded(directory: Path, text: str, **slurm: Any) -> Iterator[Config]:
    """Run a real agent with a web config file; yield a configuration that asks it."""
    file = directory / "web.yml"
    file.write_text(text, encoding="utf-8")
    process = launch(directory, f'[web]\nconfig_file = "{file}"\n')
    try:
        url = re.search(r"https?://[^/]*:(\d+)/", first_line(process, 60))
        assert url, (directory / "agent.log").read_text(encoding="utf-8")
        loaded = configured(int(url[1]))
        yield replace(loaded, web=replace(loaded.web, config_file=file)).with_section(
            replace(loaded.section(SlurmOptions), **slurm)
        )
    finally:
        end(process)


def test_password(tmp_path: Path) -> None:
    """With a name and a password file, an agent that asks for them is understood. Without, or with
    a wrong one, the message says which options to set, and nothing is known.
    """
    good, wrong = tmp_path / "good", tmp_path / "wrong"
    good.write_text("secret\n", encoding="utf-8")
    wrong.write_text("Secret\n", encoding="utf-8")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    web = f'basic_auth_users:\n  slurm: "{hashed}"\n'
    with guarded(tmp_path, web, user="slurm", password_file=good) as loaded:
        agent.query(loaded, DRAIN_FOR)
        for slurm, said in (
            (
                replace(loaded.section(SlurmOptions), user="", password_file=None),
                r"set slurm\.user and",
            ),
            (
                replace(loaded.section(SlurmOptions), password_file=wrong),
                r"rejects slurm\.user and",
            ),
            (
                replace(loaded.section(SlurmOptions), password_file=tmp_path / "none"),
                "No such file",
            ),
        ):
            with pytest.raises(AgentSilent, match=said):
                agent.query(loaded.with_section(slurm), DRAIN_FOR)


def test_client_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate of its own, a hook is let in where client certificates are required."""
    certificates.authority(tmp_path, "ca")
    for name in ("agent", "slurm"):
        certificates.certificate(tmp_path, name, "ca", f"DNS:{name}.example")
    web = (
        "tls_server_config:\n  cert_file: agent.pem\n  key_file: agent.key\n"
        "  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
    )
    files = {"cert_file": tmp_path / "slurm.pem", "key_file": tmp_path / "slurm.key"}
    with guarded(tmp_path, web, **files) as loaded:
        agent.query(loaded, DRAIN_FOR)
        bare = replace(loaded.section(SlurmOptions), cert_file=None, key_file=None)
        monkeypatch.setattr(agent, "TIMEOUT", SHIPPED)
        with pytest.raises(AgentSilent, match="does not answer"):
            agent.query(loaded.with_section(bare), DRAIN_FOR)
        absent = replace(loaded.section(SlurmOptions), key_file=tmp_path / "none")
        with pytest.raises(AgentSilent, match=r"slurm\.pem and .*/none cannot be used"):
            agent.query(loaded.with_section(absent), DRAIN_FOR)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be another user")
def test_password_is_not_sent_to_another_user(tmp_path: Path) -> None:
    """Whoever listens where no agent runs gets no password, and is not believed."""
    password = tmp_path / "password"
    password.write_text("secret\n", encoding="utf-8")
    with impostor(tmp_path, document()) as found:
        loaded = configured(found.port)
        slurm = replace(loaded.section(SlurmOptions), user="slurm", password_file=password)
        with pytest.raises(AgentSilent, match="not trusted"):
            agent.query(loaded.with_section(slurm), DRAIN_FOR)
        assert found.heard() == b""


def test_hung_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts and says nothing is waited for 1.5 s and no longer."""
    monkeypatch.setattr(agent, "TIMEOUT", SHIPPED)
    with serving(lambda connection, _: connection.recv(1)) as port:
        watch = Stopwatch()
        with pytest.raises(AgentSilent, match=r"within 1.5 s"):
            ask(port)
        assert watch.seconds() < SHIPPED + 2
