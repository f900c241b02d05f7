"""The plugin of node-problem-detector: its exit status and its line, by what the agent answers."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.http.impostors import nobody, serving
from tests.web import certificates

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes" / "node-problem-detector"


def plugin(port: int, **environment: str) -> tuple[int, str]:
    """Run the plugin as node-problem-detector does; return its exit status and its line."""
    done = subprocess.run(
        [str(DIRECTORY / "dshealthd-fit")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "DSHEALTHD_PORT": str(port), **environment},
    )
    (line,) = done.stdout.splitlines()
    assert len(line) <= 80
    assert not done.stderr
    return done.returncode, line


def answering(text: bytes | None) -> contextlib.AbstractContextManager[int]:
    """Answer with these bytes, or with None never; the port is yielded."""
    return serving(
        lambda connection, _: connection.recv(1) if text is None else connection.sendall(text)
    )


@pytest.mark.parametrize(("answer", "status", "line"), [
    (b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\nfit\n", 0, "fit"),
    (
        b"HTTP/1.1 503 Service Unavailable\r\n\r\nunfit: gpu_lost (GPU 3)\n", 1,
        "unfit: gpu_lost (GPU 3)",
    ),
    (b"HTTP/1.1 503 x\r\n\r\nunknown: gpu: timeout\n", 2, "unknown: gpu: timeout"),
    (b"HTTP/1.1 200 OK\r\n\r\n<html>\n", 2, "unknown: the agent answers 200 <html>"),
    (b"HTTP/1.1 401 x\r\n\r\nUnauthorized\n", 2, "unknown: the agent answers 401 Unauthorized"),
    (b"HTTP/1.1 503 x\r\n\r\nunfit: " + b"x" * 200 + b"\n", 1, "unfit: " + "x" * 73),
    (b"nonsense", 2, None),
    (b"", 2, None),
    (None, 2, None),
])  # fmt: skip
def test_answers(answer: bytes | None, status: int, line: str | None) -> None:
    """Only `fit` is 0 and only `unfit` is 1; all else, nobody too, is unknown within seconds."""
    started = time.monotonic()
    with nobody() as port:
        assert plugin(port) == (2, f"unknown: the agent on 127.0.0.1:{port} does not answer")
    alone = time.monotonic() - started
    with answering(answer) as port:
        found = plugin(port)
    assert found[0] == status
    assert found[1] == (line or f"unknown: the agent on 127.0.0.1:{port} does not answer")
    assert time.monotonic() - started < 10 + 20 * alone  # of bash, on a busy machine


def test_its_configuration() -> None:
    """What node-problem-detector reads. The plugin's place, and no more characters than it
    takes.
    """
    document = json.loads((DIRECTORY / "dshealthd.json").read_text(encoding="utf-8"))
    assert document["pluginConfig"]["max_output_length"] == 80
    assert Path(document["rules"][0]["path"]).name == "dshealthd-fit"


class _Fit(http.server.BaseHTTPRequestHandler):
    """Answers as an agent that is fit."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"fit\n")

    def log_message(self, *_: object) -> None:
        """Be silent."""


class _IPv6(http.server.ThreadingHTTPServer):
    """A server at an IPv6 address."""

    address_family = socket.AF_INET6


@pytest.mark.parametrize(
    ("host", "issuer", "found"),
    [
        ("127.0.0.1", "ca", (0, "fit")),
        ("127.0.0.1", "other", (2, "unknown: the agent on 127.0.0.1:")),
        ("::1", "ca", (0, "fit")),
        ("::1", "other", (2, "unknown: the agent on [::1]:")),
    ],
)
def test_agent_with_tls(host: str, issuer: str, found: tuple[int, str], tmp_path: Path) -> None:
    """With a CA, the plugin asks by TLS, and believes no certificate of another one."""
    for name in ("ca", "other"):
        certificates.authority(tmp_path, name)
    certificates.certificate(tmp_path, "agent", issuer, "DNS:dshealthd")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "agent.pem", tmp_path / "agent.key")
    kind = _IPv6 if ":" in host else http.server.ThreadingHTTPServer
    server = kind((host, 0), _Fit, bind_and_activate=False)
    # Of the client that refuses.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.server_bind()
    server.server_activate()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        ca = str(tmp_path / "ca.pem")
        status, line = plugin(server.server_port, DSHEALTHD_HOST=host, DSHEALTHD_CA_FILE=ca)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (status, line[: len(found[1])]) == found
