"""Who is told: a server that takes what Alertmanager sends by webhook, or as it sends to Slack and
PagerDuty, and remembers it.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tests.lab.station import Station, listen

FIRING, RESOLVED = "firing", "resolved"
WATCHDOG_MISSED = 100.0
"""Seconds without the Watchdog, which comes every 60 to 90 s.

Once a minute at most, when Alertmanager looks at it twice a minute.
"""


@dataclass(frozen=True)
class Alert:
    """One alert of a notification."""

    receiver: str
    """The path that it came to: page, ticket, watchdog."""
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    fingerprint: str
    received: float
    """By the monotonic clock."""

    def __str__(self) -> str:
        """Tell what it is about in one line."""
        parts = " ".join(f"{key}={value}" for key, value in sorted(self.labels.items()))
        return f"{self.receiver} {self.status}: {parts}"


@dataclass(frozen=True)
class Notification:
    """One request, as it came."""

    receiver: str
    received: float
    """By the monotonic clock."""
    document: Any
    authorization: str = ""

    @property
    def alerts(self) -> list[Alert]:
        """Return the alerts of a webhook's document."""
        return [
            Alert(
                self.receiver,
                alert["status"],
                alert["labels"],
                alert["annotations"],
                alert["fingerprint"],
                self.received,
            )
            for alert in self.document["alerts"]
        ]


class Receiver:
    """Listens on a machine of the lab from `__enter__` to `__exit__`.

    Its thread is this process's.
    """

    def __init__(
        self, station: Station, show: Callable[[Notification], None] = lambda _: None
    ) -> None:
        """`show` is called with every notification, in the receiver's thread."""
        self._notifications: list[Notification] = []
        self._changed = threading.Condition()
        self._show = show
        self._socket = listen(station)
        self.address, self.port = self._socket.getsockname()

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._server = _server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="receiver", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Return the address without a path."""
        return f"http://{self.address}:{self.port}"

    def take(self, notification: Notification) -> None:
        """Remember a notification and tell those who wait."""
        with self._changed:
            self._notifications.append(notification)
            self._changed.notify_all()
        self._show(notification)

    def sent(self, *receivers: str) -> list[Notification]:
        """Return what came to these receivers, in its order."""
        return [one for one in list(self._notifications) if one.receiver in receivers]

    def told(self, *receivers: str, since: float = 0.0) -> list[Alert]:
        """Return the alerts that came to these receivers, or to page, ticket and job-owner, in
        their order.
        """
        return [
            alert
            for notification in self.sent(*(receivers or ("page", "ticket", "job-owner")))
            if notification.received >= since
            for alert in notification.alerts
        ]

    def longest_silence(self, begin: float) -> float:
        """Return the longest time without a Watchdog, in seconds, from a moment by the monotonic
        clock until now.
        """
        heard = [note.received for note in self.sent("watchdog") if note.received > begin]
        return max(
            later - earlier
            for earlier, later in itertools.pairwise([begin, *heard, time.monotonic()])
        )

    def firing(self, *receivers: str) -> list[Alert]:
        """Return the alerts that were last said to fire."""
        last = {(alert.receiver, alert.fingerprint): alert for alert in self.told(*receivers)}
        return [alert for alert in last.values() if alert.status == FIRING]

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait until a condition on what was received holds; False if it does not in time."""
        with self._changed:
            return bool(self._changed.wait_for(condition, seconds))


def judged(what: str, told: Sequence[Alert], begin: float, over: float) -> Alert:
    """Return the first alert that told of a fault, which lasted from `begin` until `over`.

    AssertionError unless it is the only one, has a first step and a runbook, and ends after the
    fault. All times are of the monotonic clock.
    """
    firing = [alert for alert in told if alert.status == FIRING]
    assert firing, f"{what}: nothing came"
    alert = firing[0]
    description = alert.annotations["description"]
    print(f"{what}: {alert.receiver} after {alert.received - begin:.1f} s: {description}")
    assert len({alert.fingerprint for alert in firing}) == 1, list(map(str, firing))
    assert "First step: " in description
    page, _, anchor = alert.annotations["runbook_url"].rpartition("#")
    assert re.fullmatch(rf"http://[^/:]+:\d+/runbooks/{alert.labels['symptom']}", page)
    assert anchor == alert.labels["alertname"].lower()
    ends = [alert.received for alert in told if alert.status == RESOLVED]
    assert ends, f"{what} was never said to be over"
    assert ends[0] > over
    print(f"{what}: over after {ends[0] - over:.1f} s")
    return alert


def _server(receiver: Receiver) -> http.server.ThreadingHTTPServer:
    """Return a server on the receiver's socket."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            """Answer requests until the client has gone, as Alertmanager may before its answer."""
            with contextlib.suppress(ConnectionError):
                super().handle()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name = self.path.strip("/").replace("v2/enqueue", "pagerduty")
            key = self.headers.get("Authorization", "")
            receiver.take(Notification(name, time.monotonic(), json.loads(body), key))
            self.send_response(202 if name == "pagerduty" else 200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing: standard error is the test's."""

    server = http.server.ThreadingHTTPServer(
        (receiver.address, receiver.port), Handler, bind_and_activate=False
    )
    server.socket.close()
    server.socket = receiver._socket
    server.server_activate()
    return server
