"""Queries the status of many agents at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from dshealthd.findings.finding import ORDER, SCHEMA, State
from dshealthd.http.client import Client
from dshealthd.http.exchange import Unreachable
from dshealthd.status.progress import Progress

HERE = "this node"
"""The node of the command, until its agent says its name."""
AT_ONCE = 32
"""Maximum concurrent queries; each takes a thread, which mostly waits."""
PATIENCE = 1.0
"""Seconds from one look at what is waited for to the next, if no answer comes."""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """One agent's answer, or the lack of it."""

    name: str
    """The agent's name for its node; the name that was queried if there is no answer."""
    url: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)
    """As `http.document.parse` returns it; empty if there is no answer."""
    problem: str = ""
    """Why there is no answer that can be believed; empty if there is one."""

    @property
    def state(self) -> State:
        """The verdict of a queried agent; unknown if it does not answer."""
        return State.UNKNOWN if self.problem else State(self.document["verdict"])

    @property
    def starting(self) -> str:
        """Why an agent that answers knows nothing yet; empty once it has judged all sources."""
        ready = self.problem or self.document["ready"]
        return "" if ready else "its agent has just started, and has not judged all sources yet"

    def report(self) -> dict[str, Any]:
        """Return an agent's answer for `--json`."""
        keys = ("version", "time", "ready", "findings", "watched", "jobs", "probe", "left_out")
        return {
            "node": self.name,
            "url": self.url,
            "verdict": str(self.state),
            "error": self.problem or None,
            **{key: self.document.get(key) for key in keys},
        }


def query_agents(
    clients: Sequence[tuple[str, Client | str]],
    get: Callable[[Client], Mapping[str, Any]] = Client.status,
) -> list[AgentAnswer]:
    """Query named agents at once; return the documents that `get` returns, in the same order.

    A text stands for an agent that cannot be queried, and says why.
    """
    progress = Progress("nodes")
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        queries = {pool.submit(_one, get, entry): entry[0] for entry in clients}
        waiting = {*queries}
        while waiting:
            _, waiting = wait(waiting, PATIENCE, FIRST_COMPLETED)
            late = [name for one, name in queries.items() if one in waiting]
            if late:
                progress(len(queries) - len(late), len(queries), late)
    finally:
        progress.close()
        pool.shutdown(wait=False, cancel_futures=True)  # whoever interrupts waits for no node
    return [each.result() for each in queries]


def _one(
    get: Callable[[Client], Mapping[str, Any]], entry: tuple[str, Client | str]
) -> AgentAnswer:
    name, client = entry
    if isinstance(client, str):
        return AgentAnswer(name, problem=client)
    try:
        document = get(client)
    except Unreachable as error:
        gone = name == HERE and isinstance(error.__cause__, ConnectionRefusedError)
        first_step = " (does the agent run? `systemctl status dshealthd`)" * gone
        return AgentAnswer(name, client.url, problem=f"{error}{first_step}")
    return AgentAnswer(document["node"] or name, client.url, document)


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
