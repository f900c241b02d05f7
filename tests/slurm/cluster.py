"""A cluster as slurmctld keeps it, without Slurm: what is asked is answered from one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dshealthd.slurm.controller import Controller, ControllerError, SlurmNode, SlurmNodeState

NOW = 1_800_000_000.0


def node(
    name: str,
    state: str = "idle",
    reason: str = "",
    since: float = 0,
    *,
    gpus: bool = False,
    **other: str,
) -> SlurmNode:
    """Return a node as the controller tells it."""
    values = {"comment": "", "note": "", **other}
    return SlurmNode(
        name, SlurmNodeState.parse(state), reason, since, values["comment"], values["note"], gpus
    )


class Cluster(Controller):
    """The controller; `before` is called before each request, and may raise."""

    def __init__(self, *nodes: SlurmNode, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.table = {entry.name: entry for entry in nodes}
        self.before = before
        self.calls: list[tuple[str, ...]] = []
        self.now = NOW

    def nodes(self) -> dict[str, SlurmNode]:
        """Return every node."""
        self._called("nodes")
        return dict(self.table)

    def drain(self, node: SlurmNode, reason: str) -> None:
        """Drain a node, as one step."""
        self._called("drain", node.name, reason)
        self.table[node.name] = replace(
            self.table[node.name],
            state=SlurmNodeState.parse("idle+drain"),
            reason=reason,
            since=self.now,
            comment=node.comment,
            note="",
        )

    def undrain(self, node: SlurmNode) -> None:
        """Take a drain back, as an administrator does; the reason goes with it."""
        self._called("undrain", node.name)
        self.table[node.name] = replace(
            self.table[node.name], state=SlurmNodeState.parse("idle"), reason="", since=0
        )

    def set_note(self, node: SlurmNode, note: str) -> None:
        """Replace our note."""
        self._called("note", node.name, note)
        self.table[node.name] = replace(self.table[node.name], comment=node.comment, note=note)

    def changes(self) -> list[tuple[str, ...]]:
        """Return what was changed, in order."""
        return [call for call in self.calls if call[0] != "nodes"]

    def _called(self, *call: str) -> None:
        self.before()
        self.calls.append(call)


def silent() -> None:
    """Be a controller that does not answer."""
    message = "sinfo: no answer within 2 s"
    raise ControllerError(message)
