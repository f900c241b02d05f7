"""`dshealthd test-alert`: the whole way to a receiver, and each place where it can stop."""

from __future__ import annotations

import datetime as dt
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.cli import main as cli
from dshealthd.cli import test_alert
from dshealthd.http.exchange import Request
from tests.http import impostors
from tests.lab.receiver import FIRING, RESOLVED, Alert, Receiver
from tests.lab.servers import Server, alertmanager, routes
from tests.lab.station import Loopback


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    """What receives."""
    (tmp_path / "receiver").mkdir()
    with Receiver(Loopback("services", "127.0.0.1", tmp_path / "receiver")) as made:
        yield made


def serve(directory: Path, receiver: Receiver, adapt: Any = lambda _: None) -> Any:
    """Run Alertmanager with the shipped configuration."""
    return alertmanager(Loopback("services", "127.0.0.1", directory), directory, receiver, adapt)


def alerts(receiver: Receiver, status: str) -> list[Alert]:
    """Return the test alerts of a status that have come; the Watchdog is none."""
    return [
        alert
        for alert in receiver.told()
        if alert.status == status and alert.labels["symptom"] == "test-alert"
    ]


def send(server: Server, *flags: str) -> int:
    """Send the test page through a server."""
    return cli.main(["test-alert", "--alertmanager", server.url, *flags])


def test_delivered(tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    """A page arrives by the route of pages, labeled as a test, and ends when it has."""

    def hurry(config: dict[str, Any]) -> None:
        """Do not wait the minutes after which the shipped routes report what has ended."""
        for route in routes(config):
            route["group_interval"] = "1s"

    with serve(tmp_path, receiver, hurry) as server:
        assert send(server) == 0
        out = capsys.readouterr().out
        assert "routed to dshealthd-page" in out
        assert "delivered by webhook" in out
        (page,) = alerts(receiver, FIRING)
        assert (page.receiver, page.labels["symptom"]) == ("page", "test-alert")
        assert "nothing is wrong" in page.annotations["summary"]
        assert receiver.wait(lambda: alerts(receiver, RESOLVED), 60)


@pytest.mark.parametrize(("url", "port", "tls"), [
    ("http://a", 80, False),
    ("https://a", 443, True),
    ("https://a:9093", 9093, True),
])  # fmt: skip
def test_where_a_server_is(
    url: str, port: int, monkeypatch: pytest.MonkeyPatch, *, tls: bool
) -> None:
    """At its scheme's port, unless the URL has one."""
    sent: list[Request] = []

    def exchange(request: Request, seconds: float, largest: int) -> bytes:
        assert (seconds, largest) == (5.0, 32 << 20)  # Prometheus lists a series for each node
        sent.append(request)
        return b"[]"

    monkeypatch.setattr(test_alert, "exchange", exchange)
    assert test_alert._get(url, "/api", "Alertmanager") == []
    assert [(one.port, one.tls is not None) for one in sent] == [(port, tls)]


@pytest.mark.parametrize(("comes", "found", "ends"), [(3, "it", 1.0), (9, "", 2.0)])
def test_a_server_is_polled_twice_a_second(
    comes: int, found: str, ends: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has what is awaited, or for two seconds here."""
    now, looks = [0.0], iter(range(1, 100))

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(test_alert, "time", clock)
    assert test_alert._until(lambda: "it" if next(looks) == comes else "", 2.0) == found
    assert now == [ends]


def test_silenced(tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    """A silence that covers the page is named."""
    with serve(tmp_path, receiver) as server:
        silence = {
            "matchers": [{"name": "severity", "value": "critical", "isRegex": False}],
            "startsAt": "2000-01-01T00:00:00Z",
            "endsAt": "2100-01-01T00:00:00Z",
            "createdBy": "test",
            "comment": "test",
        }
        request = urllib.request.Request(
            f"{server.url}/api/v2/silences",
            json.dumps(silence).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            number = json.load(answer)["silenceID"]
        assert send(server) == 1
        assert f"STOPPED  silence {number}" in capsys.readouterr().err


def test_a_receiver_that_cannot_be_reached(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    """A receiver that refuses the connection is named with its integration."""
    with impostors.nobody() as port:

        def broken(config: dict[str, Any]) -> None:
            for found in config["receivers"]:
                for webhook in found.get("webhook_configs", ()):
                    webhook["url"] = f"http://127.0.0.1:{port}/"

        with serve(tmp_path, receiver, broken) as server:
            assert send(server) == 1
            assert "receiver dshealthd-page: webhook failed to deliver" in capsys.readouterr().err


def test_a_receiver_without_integration(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    """A receiver that tells nobody is named, not taken for a delivery."""

    def empty(config: dict[str, Any]) -> None:
        config["receivers"] = [{"name": found["name"]} for found in config["receivers"]]

    with serve(tmp_path, receiver, empty) as server:
        assert send(server, "--wait", "4") == 1
        waits, stopped = capsys.readouterr().err.splitlines()
        assert re.fullmatch("waiting up to [0-4] s for the page", waits)
        assert "receiver dshealthd-page: nothing was sent within 4 s" in stopped


def test_answers_of_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Valid JSON with other fields, and text for the terminal, stop the test in one line."""
    for body, status in (("{}", "200 OK"), ("[]", "200 OK"), ("\x1b[2J", "500 Oh")):
        with impostors.serving(impostors.saying(body, status)) as port:
            url = f"http://127.0.0.1:{port}"
            assert cli.main(["test-alert", "--alertmanager", url, "--prometheus", url]) == 1
        said = capsys.readouterr().err
        assert said.startswith("STOPPED  ")
        assert said.strip().isprintable()


def test_the_page_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the five minutes that its text says, and at once where it is followed to its end."""
    sent: list[Any] = []
    monkeypatch.setattr(test_alert, "_deliveries", lambda _url: {})
    monkeypatch.setattr(test_alert, "_request", lambda *asked: sent.append(asked[-1]))
    monkeypatch.setattr(test_alert, "_follow", lambda *_: None)
    test_alert._send("http://alerts", "critical", 1.0)
    (begun,), (ended,) = sent
    start, first, last = (
        dt.datetime.fromisoformat(time)
        for time in (begun["startsAt"], begun["endsAt"], ended["endsAt"])
    )
    assert 299 <= (first - start).total_seconds() <= 301
    assert "within five minutes" in begun["annotations"]["description"]
    assert (last - start).total_seconds() < 60
    assert begun["labels"] == ended["labels"]


@pytest.mark.parametrize(("url", "expected"), [
    ("http://127.0.0.1:1", "Alertmanager http://127.0.0.1:1 does not answer: "),
    ("127.0.0.1:9093", "not a URL"),
])  # fmt: skip
def test_no_alertmanager(url: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing answers, that is what is said."""
    assert cli.main(["test-alert", "--alertmanager", url]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("files", "text", "status", "said"), [
    ([], '{{ template "site.text" . }}', 1, "STOPPED  receiver dshealthd-page takes texts from"),
    ([], '{{ template "slack.default.text" . }}', 1, "its messages have no text"),
    (["nowhere/*.tmpl"], '{{ template "site.text" . }}', 1, "UNKNOWN  receiver dshealthd-page"),
    ([], '{{ define "a" }}b{{ end }}{{ template "a" . }}', 0, "delivered by slack"),
])  # fmt: skip
def test_a_message_without_a_text(
    files: list[str],
    text: str,
    status: int,
    said: str,
    tmp_path: Path,
    receiver: Receiver,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page whose template nothing can define is a failure. Where a file might, that it is unknown
    is said: this Alertmanager then sends nothing, newer ones a page without title and text.
    """
    (tmp_path / "slack").write_text(f"{receiver.url}/slack", encoding="utf-8")

    def slack(config: dict[str, Any]) -> None:
        config["templates"] = files
        page = next(found for found in config["receivers"] if found["name"] == "dshealthd-page")
        del page["webhook_configs"]
        page["slack_configs"] = [
            {"api_url_file": str(tmp_path / "slack"), "channel": "#a", "text": text}
        ]

    with serve(tmp_path, receiver, slack) as server:
        assert send(server) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
