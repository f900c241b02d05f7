"""A stranger's page that has its name resolve to this node reads nothing.

Scrapes go on by any name.
"""

from __future__ import annotations

import json
import socket

import pytest

from dshealthd.web.hostnames import is_misdirected, is_own, own_names, parse_domains
from tests.web.serving import Served, serving

BROWSER = "User-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n"
NAMES = frozenset({"node-7", "node-7.cluster", "localhost", "health.example"})


@pytest.mark.parametrize(
    "host",
    [
        *("10.0.0.7", "10.0.0.7:10061", "[fd00::7]:10061", "[::1]", "localhost:10061"),
        *("node-7:10061", "NODE-7", "node-7.cluster.", "health.example:443"),
    ],
)
def test_own(host: str) -> None:
    """Addresses and the node's own names are, with a port or without."""
    assert is_own(host, NAMES)


@pytest.mark.parametrize(
    "host", ["attacker.example:10061", "node-7.attacker.example", "", "node-7x", ":80", "a:b:c"]
)
def test_foreign(host: str) -> None:
    """Other names are not, whatever they begin with."""
    assert not is_own(host, NAMES)


def test_names_of_this_node() -> None:
    """The host name, with the resolver's domains, and what is configured."""
    assert parse_domains("# x\nsearch a.b. C.d\nnameserver 1.1.1.1\n\ndomain e\n") == {
        *("a.b", "c.d", "e")
    }
    assert own_names("Node-7.a", ["b"], ["Health.example"]) == {
        *("node-7", "node-7.a", "node-7.b", "localhost", "health.example")
    }


def test_only_browsers_are_checked() -> None:
    """By User-Agent in clear, by Sec-Fetch and Origin too with TLS."""
    host = {"Host": "attacker.example"}
    assert is_misdirected({**host, "User-Agent": "Mozilla/5.0"}, NAMES)
    assert is_misdirected({**host, "Sec-Fetch-Site": "same-origin"}, NAMES)
    assert is_misdirected({**host, "Origin": "https://attacker.example"}, NAMES)
    assert not is_misdirected({**host, "User-Agent": "Prometheus/3.5.0"}, NAMES)


def get(served: Served, path: str, host: str, more: str = "") -> bytes:
    """Return the first line of an answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n"
    return served.send(request.encode()).partition(b"\r\n")[0]


def test_served() -> None:
    """No path answers a browser by a foreign name, and all go on for others."""
    with serving(hostnames=("health.example",)) as served:
        for path in ("/", "/metrics", "/api/v1/status"):
            assert b"421" in get(served, path, "attacker.example:10061", BROWSER)
            assert b"200" in get(served, path, "127.0.0.1:10061", BROWSER)
            assert b"200" in get(served, path, "health.example", BROWSER)
            assert b"200" in get(served, path, "any.name.of.prometheus:10061")


def test_a_node_that_is_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers by its new name at once, and says it."""
    with serving() as served:
        monkeypatch.setattr(socket, "gethostname", lambda: "renamed-7")
        assert b"200" in get(served, "/", "renamed-7:10061", BROWSER)
        assert json.loads(served.ask("/api/v1/status")[1])["node"] == "renamed-7"
