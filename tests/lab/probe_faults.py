"""What goes wrong with a node that probes others: its agent, its key, its members, its workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.lab.node import Node
from tests.lab.probing import KEY, secret

OTHER_KEY = "fedcba9876543210" * 4


@contextlib.contextmanager
def sabotage(node: Node, what: str) -> Iterator[None]:
    """Have a node's workers go wrong, as `tests/probe/saboteur.py` says.

    Only of a node whose rounds are full ones.
    """
    file = node.directory / "sabotage"
    with node.lab.injected(f"sabotage on {node.name}: {what}"):
        file.write_text(what, encoding="ascii")
        try:
            yield
        finally:
            file.unlink()


@contextlib.contextmanager
def killed(node: Node) -> Iterator[None]:
    """Kill a node's agent; the node is still there. It is started again afterwards."""
    with node.lab.injected(f"agent of {node.name} killed"):
        node.kill()
        try:
            yield
        finally:
            node.start()


@contextlib.contextmanager
def other_key(node: Node) -> Iterator[None]:
    """Give a node another key than all others have."""
    with node.lab.injected(f"another key on {node.name}"):
        secret(node, OTHER_KEY)
        try:
            yield
        finally:
            secret(node, KEY)


@contextlib.contextmanager
def other_members(node: Node) -> Iterator[None]:
    """Have a node believe in another list of members than all others do."""
    before = node.hostfile.read_text(encoding="ascii")
    with node.lab.injected(f"other members on {node.name}"):
        node.hostfile.write_text(before.replace("slots=1", "slots=7", 1), encoding="ascii")
        try:
            yield
        finally:
            node.hostfile.write_text(before, encoding="ascii")
