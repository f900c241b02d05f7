"""What listens on the agent's port is identified before it is sent anything."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dshealthd.cli import main as cli
from dshealthd.config import config
from dshealthd.config.config import Config
from dshealthd.evidence.command import _from_agent
from dshealthd.http import client
from dshealthd.http.client import Access, Impostor, _reachable, identify, local, remote
from dshealthd.http.exchange import Rejected, Unreachable
from tests import no_netlink
from tests.command_line import dshealthd
from tests.http.impostors import impostor, saying, serving
from tests.status_documents import document, job
from tests.stopwatch import Stopwatch
from tests.web.certificates import authority

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to be another user")


def configured(port: int) -> Config:
    """Return a configuration with the agent on a port."""
    loaded = config.load(None)
    return replace(loaded, web=replace(loaded.web, listen_address=f"127.0.0.1:{port}"))


@pytest.fixture
def access(tmp_path: Path) -> Access:
    """Credentials that nobody but the agent may see."""
    password = tmp_path / "password"
    password.write_text("S3CRET\n", encoding="utf-8")
    return Access(user="prom", password_file=password)


@AS_ROOT
@pytest.mark.parametrize("command", ["status", "status --json", "status --members", "jobs"])
def test_59_commands_send_an_impostor_nothing(
    command: str, access: Access, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's process on the port receives no byte, and neither verdict nor jobs are believed."""
    with impostor(tmp_path, document(jobs=[job(job="forged")])) as found:
        words = [
            *(*command.split(), "--web.listen-address", f"127.0.0.1:{found.port}"),
            *("--user", access.user, "--password-file", str(access.password_file)),
        ]
        assert cli.main(words) == 3
        assert found.heard() == b""
    said = capsys.readouterr()
    assert "answered by a process of uid 65534, which is not trusted" in said.out + said.err
    assert "forged" not in said.out
    assert '"verdict": "ok"' not in said.out


@AS_ROOT
def test_59_doctor_sends_an_impostor_nothing(access: Access, tmp_path: Path) -> None:
    """The doctor collects by itself where a user's process is on the port."""
    with impostor(tmp_path, document()) as found:
        done = dshealthd(
            *("doctor", "--only", "clock", "--web.listen-address", f"127.0.0.1:{found.port}"),
            *("--user", access.user, "--password-file", str(access.password_file)),
        )
        assert "not trusted" in done.stdout, done
        assert found.heard() == b""


@AS_ROOT
def test_59_evidence_takes_nothing_of_an_impostor(
    access: Access, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forged probe rounds and metrics do not become evidence."""
    with impostor(tmp_path, document()) as found:
        answered, metrics = _from_agent(configured(found.port), access)
        assert (answered, metrics()) == ({}, "")
        assert found.heard() == b""
    assert "not trusted" in capsys.readouterr().err


@AS_ROOT
def test_tls_begins_after_the_identification(access: Access, tmp_path: Path) -> None:
    """Not even a handshake, which may carry a client certificate, begins with an impostor."""
    web = tmp_path / "web.yml"
    web.write_text("tls_server_config: {cert_file: a.pem, key_file: a.key}\n", encoding="utf-8")
    with impostor(tmp_path, document()) as found:
        loaded = configured(found.port)
        loaded = replace(loaded, web=replace(loaded.web, config_file=web))
        with pytest.raises(Impostor):
            local(loaded, access).status()
        assert found.heard() == b""


def test_an_agent_of_this_user_is_believed(access: Access) -> None:
    """The agent is asked with the credentials, once it is known to be the agent."""
    requests: list[bytes] = []

    def talk(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        saying(json.dumps(document()))(connection, request)

    with serving(talk) as port:
        assert local(configured(port), access).status()["node"] == "n1"
    (request,) = requests
    assert b"Authorization: Basic " in request


@pytest.mark.parametrize(("given", "seconds"), [((), 5.0), ((1.5,), 1.5)])
def test_how_long_an_agent_is_waited_for(
    given: tuple[float, ...], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seconds, unless the caller has less."""
    monkeypatch.setattr(client, "exchange", lambda *call: json.dumps(call[1:]).encode())
    assert json.loads(local(config.load(None), Access(), *given).get("/")) == [seconds, 8 << 20]


@pytest.mark.parametrize(("status", "says"), [
    ("401 Unauthorized", "401 Unauthorized (--user and --password-file)"),
    ("503 Service Unavailable", "503 Service Unavailable (no probes are configured)"),
])  # fmt: skip
def test_what_to_do_about_a_refusal(status: str, says: str) -> None:
    """Credentials are asked for where the agent wants some, and nowhere else, where the agent's own
    words tell.
    """
    with (
        serving(saying("no probes are configured\n", status)) as port,
        pytest.raises(Rejected) as caught,
    ):
        local(configured(port), Access()).status()
    assert str(caught.value).endswith(says)


@pytest.mark.parametrize("text", ["<html>503 Service Unavailable</html>", "Not Found\n", ""])
def test_refusal_without_words_of_its_own(text: str) -> None:
    """A proxy's page, or the status again, adds nothing."""
    with serving(saying(text, "404 Not Found")) as port, pytest.raises(Rejected) as caught:
        local(configured(port), Access()).status()
    assert str(caught.value).endswith(": 404 Not Found")


def test_password_that_is_refused(tmp_path: Path) -> None:
    """Whoever has sent one is not told to send one; a password alone is sent to nobody."""
    password = tmp_path / "password"
    password.write_text("secret\n", encoding="utf-8")
    access = Access(user="ops", password_file=password)
    with serving(saying("no", "401 Unauthorized")) as port:
        with pytest.raises(Rejected, match=r"401 Unauthorized \(the user or the password is wrong"):
            local(configured(port), access).status()
        with pytest.raises(Unreachable, match=f"the password in {password} needs a user name"):
            local(configured(port), Access(password_file=password))


def test_web_configuration_that_only_the_agent_may_read(
    access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has a password can query the agent of a node, whose installed configuration names
    that file; with TLS, the user says so.
    """

    def read(path: Path, *_limit: int) -> bytes:
        if path == tmp_path / "web.yml":
            raise PermissionError(13, "Permission denied", str(path))
        return path.read_bytes()

    monkeypatch.setattr(client, "read_named", read)
    with serving(saying(json.dumps(document()))) as port:
        loaded = configured(port)
        loaded = replace(loaded, web=replace(loaded.web, config_file=tmp_path / "web.yml"))
        assert local(loaded, access).status()["node"] == "n1"


def test_an_agent_that_does_not_accept() -> None:
    """A connection that nobody accepts is given up at the deadline, with nothing sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = Stopwatch()
        with pytest.raises(Impostor, match="no process of this machine"):
            local(configured(server.getsockname()[1]), Access(), 0.5).status()
        assert watch.seconds() < 5
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60)
            assert connection.recv(1) == b""


def test_an_agent_that_accepts_late() -> None:
    """A starved agent that accepts after a while is recognized."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []
        late = threading.Timer(0.3, lambda: accepted.append(server.accept()[0]))
        late.start()
        with socket.create_connection(server.getsockname()) as client:
            identify(client, time.monotonic() + 60)
        late.join()
        accepted[0].close()


def test_looks_at_a_connection_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long each time, from a millisecond to a tenth of a second, and five times as long as
    a look takes; to the deadline at most.
    """
    now, takes, slept = [0.0], 0.0, list[float]()

    def look(_connection: socket.socket) -> None:
        now[0] += takes

    def sleep(seconds: float) -> None:
        now[0] += seconds + 1e-6
        slept.append(round(seconds, 3))

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(client, "peer_uid", look)
    with socket.socket() as connection:
        with pytest.raises(Impostor):
            identify(connection, 0.4)
        assert slept == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.1, 0.1, 0.073]
        slept.clear()
        takes = 0.03
        with pytest.raises(Impostor):
            identify(connection, now[0] + 0.2)
        assert slept == [0.15]


def test_without_netlink(tmp_path: Path) -> None:
    """Where the kernel refuses netlink, the agent is identified from `/proc/net`."""
    with serving(saying("{}")) as port:
        command = [sys.executable, no_netlink.__file__, sys.executable, "-c", _IDENTIFY, str(port)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        said = subprocess.check_output(
            command, text=True, timeout=120, cwd=tmp_path, env=environment
        )
    assert said == "refused\nidentified\n"


_IDENTIFY = """
import socket, sys, time
try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)
except OSError: print("refused")
from dshealthd.http.client import identify
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    identify(connection, time.monotonic() + 60)
print("identified")
"""


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A password, certificate or web config file that cannot be used is named, and nothing sent."""
    absent = tmp_path / "absent"
    loaded = configured(1)
    served = replace(loaded, web=replace(loaded.web, config_file=absent))
    bad = tmp_path / "bad.yml"
    bad.write_text("a: [", encoding="utf-8")
    odd = replace(loaded, web=replace(loaded.web, config_file=bad))
    for one, given, named in (
        (loaded, Access(user="x", password_file=absent), str(absent)),
        (loaded, Access(ca_file=absent), f"{absent} cannot be used: No such file"),
        (served, Access(), str(absent)),
        (odd, Access(), "web.config_file"),
    ):
        with pytest.raises(Unreachable, match=re.escape(named)):
            local(one, given)


def test_no_certificate_is_needed_of_an_identified_agent() -> None:
    """The context for the local agent verifies none: the kernel has said who answers."""
    assert Access().unverified_context().verify_mode is ssl.CERT_NONE


def test_tls_of_the_local_agent_is_verified_with_authorities_alone(tmp_path: Path) -> None:
    """The local agent is asked at a loopback address, which its certificate does not have: with
    `--tls` alone the kernel's word suffices, as where its web config file says that it serves TLS.
    """
    authority(tmp_path, "ca")
    for given, mode in (
        (Access(tls=True), ssl.CERT_NONE),
        (Access(ca_file=tmp_path / "ca.pem"), ssl.CERT_REQUIRED),
    ):
        context = local(configured(1), given)._request.tls
        assert context is not None
        assert context.verify_mode is mode


@pytest.mark.parametrize(("node", "host", "port"), [
    ("n1", "n1", 10061),
    ("n1:7", "n1", 7),
    ("10.0.0.1:7", "10.0.0.1", 7),
    ("fd00::1", "fd00::1", 10061),
    ("[fd00::1]", "fd00::1", 10061),
    ("[fd00::1]:7", "fd00::1", 7),
    ("http://n1:7/", "n1", 7),
])  # fmt: skip
def test_where_another_nodes_agent_is(node: str, host: str, port: int) -> None:
    """As it is named, at this agent's port if it names none."""
    asked = remote(configured(10061), node, Access())._request
    assert (asked.host, asked.port) == (host, port)


@pytest.mark.parametrize("node", [
    "", ":7", "a/b", "a/", "ops@n1", "https://n1/", "ftp://n1", "http://", "n1:x", "n1:70000",
])  # fmt: skip
def test_what_is_no_node(node: str) -> None:
    """Nothing is asked of it."""
    with pytest.raises(ValueError, match=r"^.* is not a node: give NODE, NODE:PORT or "):
        remote(configured(10061), node, Access())


@pytest.mark.parametrize(("listens", "reached"), [
    (None, "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::2", "::2"), ("n1", "n1"),
])  # fmt: skip
def test_where_this_nodes_agent_is_reached(listens: str | None, reached: str) -> None:
    """At loopback, where it listens on all addresses."""
    assert _reachable(listens) == reached
