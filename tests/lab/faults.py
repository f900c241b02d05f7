"""Faults of the lab, each a context manager: in force inside it, undone when it is left.

Those of the network act on the way between the nodes, in the switch, where no node can see them; a
packet that is dropped is lost without a word to its sender. Without namespaces they raise
NotPermitted.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from glob import glob

from tests.lab.lab import Lab
from tests.lab.node import INTERFACE, Node
from tests.lab.station import NotPermitted
from tests.processes import start_time


@contextlib.contextmanager
def slow(node: Node, mbit: int) -> Iterator[None]:
    """Limit a node to so many Mbit/s, in each direction."""
    with (
        node.lab.injected(f"slow {node.name} {mbit} Mbit/s"),
        node.lab.shaper(node.station, INTERFACE).limit(mbit),
        node.lab.shaper(node.lab.services, node.name).limit(mbit),
    ):
        yield


@contextlib.contextmanager
def slow_pair(a: Node, b: Node, mbit: int) -> Iterator[None]:
    """Limit what two nodes send each other to so many Mbit/s, in each direction.

    Their ways to others stay as they are.
    """
    with (
        a.lab.injected(f"slow pair {a.name} {b.name} {mbit} Mbit/s"),
        a.lab.shaper(a.station, INTERFACE).limit(mbit, b.address),
        a.lab.shaper(b.station, INTERFACE).limit(mbit, a.address),
    ):
        yield


@contextlib.contextmanager
def drop(a: Node, b: Node, *, both_ways: bool = True) -> Iterator[None]:
    """Lose what `a` sends to `b`, and with `both_ways` the other way."""
    ways = [(a, b), (b, a)] if both_ways else [(a, b)]
    rules = [f"ip saddr {source.address} ip daddr {target.address} drop" for source, target in ways]
    with _in_the_switch(a.lab, f"drop {a.name} {'<' * both_ways}-> {b.name}", rules):
        yield


@contextlib.contextmanager
def drop_all(node: Node) -> Iterator[None]:
    """Lose all that a node sends to other nodes and all that these send to it.

    Its link stays up, and `services` reaches it.
    """
    rules = [f"ip saddr {node.address} drop", f"ip daddr {node.address} drop"]
    with _in_the_switch(node.lab, f"drop all of {node.name}", rules):
        yield


@contextlib.contextmanager
def unscraped(node: Node) -> Iterator[None]:
    """Lose what `services`, and so Prometheus, sends to a node; other nodes reach it."""
    rules = [f"ip daddr {node.address} drop"]
    with (
        node.lab.injected(f"lose what services sends to {node.name}"),
        node.lab.rules(node.lab.services, "inet", {"output": rules}),
    ):
        yield


@contextlib.contextmanager
def unplug(node: Node) -> Iterator[None]:
    """Take the node's cable out: its interface loses its carrier."""
    with node.lab.injected(f"unplug {node.name}"):
        node.lab.services.tool("ip", "link", "set", node.name, "down")
        try:
            yield
        finally:
            node.lab.services.tool("ip", "link", "set", node.name, "up")


@contextlib.contextmanager
def loss(node: Node, ratio: float) -> Iterator[None]:
    """Lose this share of the packets between a node and the others, in each direction, at
    random.
    """
    rules = [
        f"ip {end} {node.address} numgen random mod 10000 < {round(10000 * ratio)} drop"
        for end in ("saddr", "daddr")
    ]
    with _in_the_switch(node.lab, f"lose {ratio:.0%} of {node.name}", rules):
        yield


@contextlib.contextmanager
def reset(node: Node, port: int | None = None) -> Iterator[None]:
    """Answer TCP to a node's port by RST, as a firewall on it would.

    Without a port, all TCP of the node with others.
    """
    if port is None:
        resets = "tcp flags & rst == 0 reject with tcp reset"  # spares the firewall's own
        chains = {"input": [f'iifname != "lo" {resets}'], "output": [f'oifname != "lo" {resets}']}
    else:
        chains = {"input": [f'iifname != "lo" tcp dport {port} reject with tcp reset']}
    with (
        node.lab.injected(f"reset {node.name}{f' port {port}' if port else ''}"),
        node.lab.rules(node.station, "inet", chains),
    ):
        yield


@contextlib.contextmanager
def pause(pid: int) -> Iterator[None]:
    """Stop a process with SIGSTOP; SIGCONT afterwards, if it is still the same one."""
    started = start_time(pid)
    if not started:
        raise ProcessLookupError(pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if start_time(pid) == started:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def clock_offset(node: Node, seconds: float) -> Iterator[None]:
    """Restart a node's agent with a wall clock that is this far off; the monotonic one goes right.

    Restart it again afterwards.
    """
    environment = {
        "LD_PRELOAD": _faketime(),
        "FAKETIME": f"{seconds:+g}",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with node.lab.injected(f"clock of {node.name} {seconds:+g} s"):
        node.stop()
        try:
            node.start(environment)
            yield
        finally:
            node.stop()
            node.start()


def _faketime() -> str:
    for library in glob("/usr/lib/*/faketime/libfaketimeMT.so.1"):
        return library
    message = "libfaketime is not installed"
    raise NotPermitted(message)


@contextlib.contextmanager
def _in_the_switch(lab: Lab, what: str, rules: Sequence[str]) -> Iterator[None]:
    with lab.injected(what), lab.rules(lab.services, "bridge", {"forward": rules}):
        yield
