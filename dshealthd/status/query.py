"""Queries the status of many agents at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.findings.finding import ORDER, SCHEMA, State
from dshealthd.http.client import Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.http.client import Client

AT_ONCE = 32
"""Agents queried at the same time, with a thread each, which mostly waits."""
EXIT = {State.OK: 0, State.WARNING: 1, State.CRITICAL: 2, State.UNKNOWN: 3}
"""Exit status by verdict, as in Nagios plugins."""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """One agent's answer, or the lack of it."""

    name: str
    """The agent's name for its node; the name that was queried if there is no answer."""
    url: str
    document: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why there is no answer."""

    @property
    def state(self) -> State:
        """The verdict; unknown if there is no answer, or no verdict in it."""
        if self.document.get("schema") != SCHEMA:
            return State.UNKNOWN
        try:
            return State(str(self.document.get("verdict")))
        except ValueError:
            return State.UNKNOWN

    @property
    def problem(self) -> str:
        """Why the verdict cannot be read; empty if it can."""
        if self.error or self.document.get("schema") == SCHEMA:
            return self.error
        told = self.document.get("schema")
        return f"{self.url} answers in schema version {told}, this command needs {SCHEMA}"

    def report(self) -> dict[str, Any]:
        """Return an agent's answer for `--json`."""
        keys = ("version", "time", "findings", "jobs", "probe")
        return {
            "node": self.name,
            "url": self.url,
            "verdict": str(self.state),
            "error": self.problem or None,
            **{key: self.document.get(key) for key in keys},
        }


def ask(clients: Sequence[tuple[str, Client]]) -> list[AgentAnswer]:
    """Return the answers of named agents, in the same order."""
    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(clients)))) as pool:
        return list(pool.map(_one, clients))


def _one(entry: tuple[str, Client]) -> AgentAnswer:
    name, client = entry
    try:
        document = client.status()
    except Unreachable as error:
        return AgentAnswer(name, client.url, error=str(error))
    return AgentAnswer(str(document.get("node") or name), client.url, document)


def members(client: Client) -> list[str]:
    """Return the nodes that an agent probes, as `HOST:PORT`. Raise Unreachable if it fails."""
    body = client.get("/api/v1/targets")
    try:
        return [target for group in json.loads(body) for target in group["targets"]]
    except (ValueError, KeyError, TypeError) as error:
        message = f"{client.url}/api/v1/targets: not a list of targets"
        raise Unreachable(message) from error


def worst(answers: Sequence[AgentAnswer]) -> State:
    """Return the worst verdict of the queried agents; unknown if there are none."""
    return max((answer.state for answer in answers), key=ORDER.index, default=State.UNKNOWN)


def report(answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the document that `dshealthd status --json` prints."""
    return {
        "schema": SCHEMA,
        "verdict": str(worst(answers)),
        "nodes": [answer.report() for answer in answers],
    }
