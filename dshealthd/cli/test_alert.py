"""`dshealthd test-alert`: sends one labeled page through the alerting chain and follows it.

Prometheus is only queried, and only if its address is given. Alertmanager receives one alert, which
routes, silences and inhibition treat like any other page. Its API says whether an alert is
suppressed and which receivers get it. Only its request counters say whether they accepted it, by
integration and not by alert: another alert in the same seconds may be mistaken for this one.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import secrets
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from dshealthd.core import documents
from dshealthd.core.text import plural, print_lines, printable
from dshealthd.http.client import TIMEOUT
from dshealthd.http.exchange import Rejected, Request, Unreachable, exchange, verifying
from dshealthd.symptoms.entry import RULESET

MAX_ANSWER = 32 << 20
"""Most bytes of an answer: Prometheus lists a series for each node, in some 500 bytes."""
_PORTS = {"http": 80, "https": 443}
LASTS = 300
"""Seconds until the test alert resolves by itself, unless it is resolved here."""
PAUSE = 0.5
# Requests are counted when they end; notifications would be counted when they begin.
_COUNTER = re.compile(
    (
        r'^alertmanager_notification_requests_(failed_)?total\{[^}]*integration="([^"]+)"[^}]*\} '
        r"(\S+)$"
    ),
    re.MULTILINE,
)

_USED = re.compile(r"""\{\{-?\s*template\s+["`]([^"`]+)["`]""")
_DEFINED = re.compile(r"""\{\{-?\s*(?:define|block)\s+["`]([^"`]+)["`]""")
_DEFAULT = re.compile(r"__|[a-z0-9]+\.default\.")
"""Names of the templates in Alertmanager's own default.tmpl."""


class Stopped(Exception):
    """The alerting chain is broken; the message says where, why, and what to do."""


def check_alerting(alertmanager: str, prometheus: str | None, severity: str, wait: float) -> int:
    """Send the test page and follow it for `wait` seconds; return 1 if it stopped, else 0."""
    try:
        if prometheus is not None:
            _check_prometheus(prometheus.rstrip("/"))
        _send(alertmanager.rstrip("/"), severity, wait)
    except Stopped as stopped:
        print_lines(f"STOPPED  {printable(str(stopped))}", error=True)
        return 1
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        print_lines(
            "STOPPED  a server's answer does not have the fields that Prometheus and Alertmanager "
            f"send: {printable(repr(error))}",
            error=True,
        )
        return 1
    return 0


def _check_prometheus(url: str) -> None:
    rules = _get(url, "/api/v1/rules?type=alert", "Prometheus")["data"]["groups"]
    alerts = {rule["name"]: rule for group in rules for rule in group["rules"]}
    watchdog = alerts.get("DshealthdWatchdog")
    if watchdog is None:
        message = (
            f"Prometheus {url}: no rule DshealthdWatchdog; load the rules of deploy/prometheus"
        )
        raise Stopped(message)
    if watchdog["state"] != "firing":
        raise Stopped(
            f"Prometheus {url}: DshealthdWatchdog is {watchdog['state']}, "
            f"rule evaluation is {watchdog['health']}: {watchdog.get('lastError', '')}"
        )
    _passed(f"Prometheus evaluates {plural(len(alerts), 'alert')}")
    targets = _get(url, "/api/v1/query?query=dshealthd_build_info", "Prometheus")["data"]["result"]
    if not targets:
        raise Stopped(f"Prometheus {url}: scrapes no dshealthd; see Status, Targets in its UI")
    _passed(f"Prometheus scrapes {plural(len(targets), 'agent')}")
    known = _get(url, "/api/v1/alertmanagers", "Prometheus")["data"]["activeAlertmanagers"]
    if not known:
        message = f"Prometheus {url}: no Alertmanager configured; see alerting in prometheus.yml"
        raise Stopped(message)
    _passed("Prometheus sends alerts to " + ", ".join(entry["url"] for entry in known))


def _send(url: str, severity: str, wait: float) -> None:
    before = _deliveries(url)
    _passed(f"Alertmanager {url} answers")
    node = socket.gethostname()
    mark = secrets.token_hex(4)
    alert = {
        "labels": {
            "alertname": "DshealthdTest",
            **RULESET,
            "severity": severity,
            "symptom": "test-alert",
            "component": "node",
            "node": node,
            "test": mark,
        },
        "annotations": {
            "summary": f"Test of the alerting chain from {node}; nothing is wrong",
            "description": f"Sent by `dshealthd test-alert` on {node}. If you can read this, "
            "alerting works. It resolves by itself within five minutes.",
        },
        "startsAt": _time(0),
        "endsAt": _time(LASTS),
    }
    _request(url, "/api/v2/alerts", "Alertmanager", [alert])
    try:
        _follow(url, mark, before, wait)
    finally:
        _request(url, "/api/v2/alerts", "Alertmanager", [{**alert, "endsAt": _time(0)}])


def _follow(url: str, mark: str, before: Mapping[tuple[str, bool], float], wait: float) -> None:
    """Follow the test alert until a notification is sent; raise Stopped if that fails."""
    end = time.monotonic() + wait
    query = urllib.parse.urlencode({"filter": f'test="{mark}"'})
    found = _until(lambda: _get(url, f"/api/v2/alerts?{query}", "Alertmanager"), end)
    if not found:
        raise Stopped(f"Alertmanager {url}: accepted the alert but does not list it; see its log")
    (alert,) = found
    status, receivers = alert["status"], [entry["name"] for entry in alert["receivers"]]
    if status["silencedBy"]:
        silences = ", ".join(status["silencedBy"])
        message = (
            f"silence {silences} covers this alert and perhaps others; `amtool "
            f"--alertmanager.url={url} silence query` shows it"
        )
        raise Stopped(message)
    if status["inhibitedBy"]:
        raise Stopped(
            f"inhibition by alert {', '.join(status['inhibitedBy'])}: this node has a fault "
            "that covers the test; fix it first"
        )
    _passed(f"routed to {', '.join(receivers)}")
    _check_texts(url, receivers)

    def changed() -> dict[tuple[str, bool], float]:
        now = _deliveries(url)
        return {key: now[key] for key in now if now[key] > before.get(key, 0.0)}

    print_lines(f"waiting up to {max(0.0, end - time.monotonic()):.0f} s for the page", error=True)
    after = _until(changed, end)
    failed = _failed(after)
    if after and not failed:  # a failure is counted after its attempt
        time.sleep(PAUSE)
        failed = _failed(changed())
    if failed:
        raise Stopped(
            f"receiver {', '.join(receivers)}: {', '.join(failed)} failed to deliver; "
            "Alertmanager's log says why"
        )
    if not after:
        raise Stopped(
            f"receiver {', '.join(receivers)}: nothing was sent within {wait:g} s; it has no "
            "integration, or group_wait is longer (--wait)"
        )
    sent = ", ".join(integration for integration, _ in after)
    _passed(f"delivered by {sent}: check your phone")


def _failed(deliveries: Iterable[tuple[str, bool]]) -> list[str]:
    """Return Alertmanager's integrations that failed to deliver the test alert."""
    return [integration for integration, is_failure in deliveries if is_failure]


def _check_texts(url: str, receivers: Collection[str]) -> None:
    """Raise Stopped if a message of these receivers lacks its texts: if it takes one from a
    template that is not defined, Alertmanager sends it without title, text and channel, or not at
    all. Whether files of templates define it, its API does not say.
    """
    import yaml

    status = _get(url, "/api/v2/status", "Alertmanager")
    try:
        config = yaml.safe_load(status["config"]["original"])
    except yaml.YAMLError as error:
        raise Stopped(f"Alertmanager {url}: its configuration is not YAML") from error
    files = ", ".join(config.get("templates") or ())
    for receiver in config["receivers"]:
        names = set(_templates(receiver)) if receiver["name"] in receivers else ()
        if not names:
            continue
        named = f"receiver {receiver['name']} takes texts from {', '.join(sorted(names))}"
        if not files:
            raise Stopped(
                f"{named}, and Alertmanager's configuration has no `templates` that could define "
                "them: its messages have no text; use the receivers of deploy/alertmanager"
            )
        print_lines(
            f"UNKNOWN  {printable(named)}. Alertmanager does not say whether {printable(files)} "
            "defines them: if the message has no title or text, the files were not found there"
        )


def _templates(config: object) -> Iterator[str]:
    """Yield the templates that the texts of a receiver use but neither define nor find among
    Alertmanager's own, of which that of Slack's text is empty.
    """
    if isinstance(config, str):
        own = _DEFINED.findall(config)
        for name in _USED.findall(config):
            if name not in own and (name == "slack.default.text" or not _DEFAULT.match(name)):
                yield name
    elif isinstance(config, (dict, list)):
        for value in config.values() if isinstance(config, dict) else config:
            yield from _templates(value)


def _deliveries(url: str) -> dict[tuple[str, bool], float]:
    """Return Alertmanager's requests to receivers, by integration and whether they failed."""
    text = _request(url, "/metrics", "Alertmanager").decode(errors="replace")
    counts: dict[tuple[str, bool], float] = {}
    for failure, integration, value in _COUNTER.findall(text):
        key = integration, bool(failure)
        counts[key] = counts.get(key, 0.0) + float(value)  # newer versions count by reason, too
    return counts


def _until(look: Callable[[], Any], end: float) -> Any:
    """Poll a server until `look` returns a true value or `end` passes; return its last value."""
    while not (found := look()) and time.monotonic() < end:
        time.sleep(PAUSE)
    return found


def _passed(text: str) -> None:
    print_lines(f"ok       {printable(text)}")
    sys.stdout.flush()  # to a pipe too: the next step may take its whole wait


def _time(seconds: float) -> str:
    moment = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)
    return moment.isoformat(timespec="milliseconds")


def _get(url: str, path: str, who: str) -> Any:
    try:
        return json.loads(_request(url, path, who))
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise Stopped(f"{who} {url}: the server at {path} is not {who}") from error


def _request(url: str, path: str, who: str, document: object = None) -> bytes:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except (ValueError, ArithmeticError) as error:
        raise Stopped(f"{who} {url}: not a URL: {error}") from error
    if parts.scheme not in _PORTS or not parts.hostname:
        raise Stopped(f"{who} {url}: not a URL; it must begin with http:// or https://")
    request = Request(
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        path=parts.path + path,
        headers={"Content-Type": "application/json"},
        body=None if document is None else documents.dumps(document).encode(),
        tls=verifying() if parts.scheme == "https" else None,
    )
    try:
        return exchange(request, TIMEOUT, MAX_ANSWER)
    except Rejected as error:
        raise Stopped(f"{who} {url}: {path} answers {error.status} {error.detail}") from error
    except Unreachable as error:
        raise Stopped(f"{who} {error}") from error
