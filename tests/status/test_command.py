"""`dshealthd status` and `dshealthd jobs` against real servers, and what they print."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bcrypt
import pytest

from dshealthd.collectors.gpu import FAULT
from dshealthd.collectors.memory import AVAILABLE, TOTAL
from dshealthd.collectors.pressure import STALLED_RATIO
from dshealthd.core.collector import Sample
from dshealthd.core.snapshot import Snapshot
from dshealthd.http import client
from dshealthd.http.client import Client
from dshealthd.http.exchange import Request
from dshealthd.status import query
from dshealthd.status.query import query_agents
from tests.http import impostors
from tests.status.nodes import HEALTHY, HUNG, JOB, answering, run, snapshot
from tests.status_documents import document, finding, job, rank
from tests.waiting import PATIENT
from tests.web.certificates import authority, certificate
from tests.web.serving import serving


@pytest.mark.parametrize(
    ("samples", "code", "words"),
    [
        (HEALTHY, 0, "OK  healthy, 1 collector OK"),
        (
            (*HEALTHY, AVAILABLE(1e9), TOTAL(1e11), STALLED_RATIO(0.9, "memory", "some")),
            1,
            "WARNING  1 problem found",
        ),
        ((*HEALTHY, FAULT(1, "0", "GPU-a", "gpu_lost")), 2, "CRITICAL  1 problem found"),
        ((*HEALTHY, *HUNG), 2, "CRITICAL  1 problem found"),
    ],
)
def test_exit_status_is_the_verdict(
    samples: tuple[Sample, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is exit status and first line, asked on the configured address or by name."""
    with serving(snapshot(*samples)) as served:
        for arguments in (
            ("status", "--web.listen-address", f"127.0.0.1:{served.port}"),
            ("status", f"127.0.0.1:{served.port}"),
        ):
            assert run(*arguments) == code
            assert words in capsys.readouterr().out.splitlines()[0]


def test_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """An agent that has not looked yet, or does not answer, is unknown, with the reason."""
    made = Snapshot(time.monotonic, time.time)
    made.expect("gpu", 3600)
    with serving(made) as served:
        assert run("status", f"127.0.0.1:{served.port}") == 3
        assert "UNKNOWN  not all sources read yet" in capsys.readouterr().out
    with impostors.nobody() as port:
        assert run("status", f"127.0.0.1:{port}") == 3
    said = capsys.readouterr().out
    assert f"UNKNOWN  http://127.0.0.1:{port} does not answer: " in said
    assert "refused" in said


def test_worst_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    """The worst node comes first and makes the exit status; no answer is worse than a well node."""
    with (
        serving(snapshot(*HEALTHY)) as well,
        serving(snapshot(*HEALTHY, FAULT(1, "0", "GPU-a", "gpu_lost"))) as ill,
    ):
        names = [f"127.0.0.1:{served.port}" for served in (well, ill)]
        assert run("status", *names) == 2
        said = capsys.readouterr().out
        assert said.index("CRITICAL") < said.index("OK  healthy")
        assert run("status", names[0], "127.0.0.1:1") == 3


def test_a_finding_leads_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A finding is printed with its part, its first step and a runbook that the agent serves."""
    with serving(snapshot(*HEALTHY, FAULT(1, "3", "GPU-d", "gpu_lost"))) as served:
        run("status", f"127.0.0.1:{served.port}")
        said = capsys.readouterr().out
        assert "GPU 3: A GPU is lost to the driver" in said
        assert "First step: drain n1, restart the job without it" in said
        (runbook,) = (line.split()[1] for line in said.splitlines() if "Runbook: " in line)
        assert runbook == f"http://127.0.0.1:{served.port}/runbooks/gpu-lost"
        asked = Request(host="127.0.0.1", port=served.port, path="/")
        assert b"## Remedy" in Client(asked).get("/runbooks/gpu-lost")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is one document with a version, and has the same exit status."""
    with serving(snapshot(*HEALTHY, *HUNG)) as served:
        assert run("status", "--json", f"127.0.0.1:{served.port}", "127.0.0.1:1") == 2
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (printed["schema"], printed["verdict"]) == (1, "critical")
    node, gone = printed["nodes"]
    assert [finding["alert"] for finding in node["findings"]] == ["DshealthdJobHang"]
    assert node["watched"] == []
    assert (gone["verdict"], gone["findings"]) == ("unknown", None)
    assert "refused" in gone["error"]


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no node, and a file that is not there, is said in one line."""
    assert run("status", "https://n1/") == 3  # without TLS here
    assert "UNKNOWN  https://n1/ is not a node: give NODE" in capsys.readouterr().out
    assert run("status", "--user", "x", "--password-file", "/nonexistent", "n1") == 3
    assert "/nonexistent" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "jobs"])
def test_terminals_are_not_commanded_by_an_answer(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No text of an answer reaches the terminal as it is: an agent may be anybody's."""
    evil = "\x1b]0;owned\x07\x1b[2J"
    culprit = {"rank": 0, "reason": evil, "says": evil}
    hang = {"cause": evil, "says": evil, "overdue_seconds": 1, "culprits": [culprit]}
    failures = [{"slug": evil, "rank": 1, "node": evil}]
    ranks = [rank(phase=evil, stage=evil, process=evil, gpu=evil)]
    texts = dict.fromkeys(("job", "loss", "state", "evidence"), evil)
    found = finding(
        **dict.fromkeys(("part", "summary", "detail", "first_step", "runbook", "reason"), evil)
    )
    told = document(
        node=evil,
        verdict="critical",
        findings=[found],
        jobs=[job(hang=hang, failures=failures, ranks=ranks, **texts)],
    )
    with answering(told) as agents:
        assert run(command, *agents) == 2
    said = capsys.readouterr()
    assert said.out.count("owned") > 5
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("command", ["status", "jobs"])
def test_60_a_wrong_agent_does_not_end_a_list(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that answer nonsense or too slowly are unknown, status 3; the others are shown."""
    monkeypatch.setattr(client, "TIMEOUT", 10.0)

    def drip(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.1)

    deep = impostors.saying(b'{"schema":1,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    odd = document(verdict="critical", findings=[{}]), document(jobs=None)
    with (
        answering(document(node="n9", jobs=[job()])) as good,
        answering(*odd) as wrong,
        impostors.serving(deep) as nested,
        impostors.serving(drip) as slow,
    ):
        wrong += [f"127.0.0.1:{port}" for port in (nested, slow)]
        assert run(command, "not/a/node", "n..x", *wrong, *good) == 3
        for agent in wrong:
            assert run(command, "--json", agent) == 3
    said = capsys.readouterr().out
    assert "run-1  training" in said
    assert "not/a/node is not a node" in said
    assert all(agent in said for agent in wrong)


def test_password_and_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An agent with TLS and a password is asked with both; what is missing is told."""
    authority(tmp_path, "ca")
    certificate(tmp_path, "server", "ca", "IP:127.0.0.1")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    config = tmp_path / "web.yml"
    config.write_text(
        f"tls_server_config: {{cert_file: server.pem, key_file: server.key}}\n"
        f"basic_auth_users: {{prometheus: '{hashed}'}}\n"
    )
    password = tmp_path / "password"
    password.write_text("secret\n")
    known = ("--user", "prometheus", "--password-file", str(password))
    with serving(snapshot(*HEALTHY), config_file=config) as served:
        address = f"127.0.0.1:{served.port}"
        own = ("--web.listen-address", address, "--web.config-file", str(config))
        assert run("status", address, "--ca-file", str(tmp_path / "ca.pem"), *known) == 0
        assert run("status", *own, *known) == 0
        capsys.readouterr()
        assert run("status", *own) == 3
        assert "401 Unauthorized (--user and --password-file)" in capsys.readouterr().out
        assert run("status", address, "--tls", *known) == 3
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().out
        assert run("status", address) == 3
        assert "without response (it may serve TLS only)\n" in capsys.readouterr().out
    with serving(snapshot(*HEALTHY)) as served:
        assert run("status", f"127.0.0.1:{served.port}", "--tls") == 3
        assert "does not answer: it does not speak TLS\n" in capsys.readouterr().out


def test_what_is_waited_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are down each take their deadline: meanwhile those that have yet to answer are
    named, which no name may abuse to move the cursor of a terminal; answers keep their order.
    """
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    asked, patience = threading.Event(), []

    def wait(waiting: Any, seconds: float, until: str) -> Any:
        patience.append(seconds)
        return futures.wait(waiting, 0.01, until)

    monkeypatch.setattr(query, "wait", wait)

    def get(client: Any) -> dict[str, Any]:
        if client.slow:
            assert asked.wait(60)
        return {"node": ""}

    names = ["slow\x1b[2J", "fast", "faster"]
    clients: Any = [(name, SimpleNamespace(url="", slow="slow" in name)) for name in names]
    threading.Timer(0.5, asked.set).start()
    assert [answer.name for answer in query.query_agents(clients, get)] == names
    assert "2/3 nodes, waiting for slow\\u001b[2J" in shown.getvalue()
    assert {*patience} == {1.0}
    assert shown.getvalue().endswith("\r\x1b[K")


def test_agent_that_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is in words; the first step is for the agent of this node alone."""
    for command in ("status", "jobs", "history"):
        assert run(command, "--web.listen-address", "127.0.0.1:1") == 3
        said = capsys.readouterr().out
        end = "does not answer: Connection refused"
        assert f"{end} (does the agent run? `systemctl status dshealthd`)\n" in said
        assert run(command, "127.0.0.1:1") == 3
        assert f"{end}\n" in capsys.readouterr().out


def test_members(capsys: pytest.CaptureFixture[str]) -> None:
    """`--members` asks all nodes that the agent probes; where it probes none, it says so."""
    made = snapshot(*HEALTHY, FAULT(1, "0", "GPU-a", "gpu_lost"))

    def both() -> bytes:
        return json.dumps([{"targets": [f"127.0.0.1:{served.port}", "127.0.0.1:1"]}]).encode()

    with serving(made, targets=both) as served:
        assert run("status", "--members", "--web.listen-address", f"127.0.0.1:{served.port}") == 2
    said = capsys.readouterr().out
    assert "CRITICAL" in said
    assert "127.0.0.1:1  UNKNOWN" in said
    with serving(snapshot(*HEALTHY)) as served:
        assert run("status", "--members", "--web.listen-address", f"127.0.0.1:{served.port}") == 3
    assert "/api/v1/targets: 404" in capsys.readouterr().err


@contextlib.contextmanager
def listing(*targets: str) -> Iterator[tuple[int, list[bytes]]]:
    """Run an agent that lists these members and itself is well; yield its port and requests."""
    requests: list[bytes] = []

    def talk(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        told: Any = document()
        if impostors.path(request) == "/api/v1/targets":
            told = [{"targets": targets}]
        impostors.saying(json.dumps(told))(connection, request)

    with impostors.serving(talk) as port:
        yield port, requests


def test_59_members_that_an_agent_lists_get_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address that an answer names is asked without credentials; a bad one ends nothing."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    known = ("--user", "x", "--password-file", str(password))
    requests: list[bytes] = []

    def guarded(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        impostors.saying("", "401 Unauthorized")(connection, request)

    with (
        impostors.serving(guarded) as port,
        listing("a/b", "\x1b[2J", "n:99999999", f"127.0.0.1:{port}") as (own, asked),
    ):
        assert run("status", "--members", *known, "--web.listen-address", f"127.0.0.1:{own}") == 3
    said = capsys.readouterr().out
    assert "a/b is not a node" in said
    assert "401 Unauthorized (a password is not sent to members that only an agent names" in said
    assert "\x1b" not in said
    assert [b"Authorization" in one for one in (*asked, *requests)] == [True, False]


def test_members_of_the_configuration_get_the_password(tmp_path: Path) -> None:
    """Members that the configuration names are asked with it, and no agent is asked for a list."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    with listing() as (port, requests):
        file = tmp_path / "dshealthd.toml"
        file.write_text(
            f'[web]\nlisten_address = ":{port}"\n[probe.members]\nnodes = ["127.0.0.1"]\n'
        )
        known = ("--user", "x", "--password-file", str(password))
        assert run("status", "--members", "--config.file", str(file), *known) == 0
    (request,) = requests
    assert b"Authorization" in request


def test_members_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hostfile that is not there is said in one line."""
    file = tmp_path / "dshealthd.toml"
    file.write_text(f'[probe.members]\nhostfile = "{tmp_path}/none"\n')
    assert run("status", "--members", "--config.file", str(file)) == 3
    assert f"{tmp_path}/none" in capsys.readouterr().err


def test_many_agents_are_queried_at_once() -> None:
    """Thirty-two, as each takes a thread that waits."""
    agents = [(f"n{number}", Client(Request(host="", port=1, path="/"))) for number in range(64)]
    waiting: list[Client] = []
    seen: list[int] = []
    all_wait = threading.Barrier(32)

    def get(agent: Client) -> Mapping[str, Any]:
        waiting.append(agent)
        all_wait.wait(PATIENT)
        seen.append(len(waiting))
        waiting.remove(agent)
        return {"node": ""}

    assert [one.name for one in query_agents(agents, get)] == [name for name, _ in agents]
    assert max(seen) == 32


def test_a_node_that_is_given_twice_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many ranks as a job has are several runs, which cannot be hung together."""
    with serving(snapshot(*HEALTHY, *JOB)) as served:
        node = f"127.0.0.1:{served.port}"
        assert run("jobs", node, node) == 0
    assert "2 ranks here" in capsys.readouterr().out
