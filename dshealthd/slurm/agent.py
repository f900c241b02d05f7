"""Queries this node's agent for its findings over HTTP, for Slurm's hooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from dshealthd.findings.finding import State
from dshealthd.http.client import Access, local
from dshealthd.http.exchange import Rejected, Unreachable
from dshealthd.slurm.options import SlurmOptions

if TYPE_CHECKING:
    from dshealthd.config.config import Config

TIMEOUT = 1.5
"""Seconds for the whole exchange with the agent."""
_LONGEST = 40
"""Characters of a word in a reason: of three findings it stays a line."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/-]+")
_XID = re.compile(r"Xid (\d+)\b")
"""How the reason of a finding begins that an Xid shows."""


class AgentSilent(Exception):
    """The agent is dead, hung, absent, or not the genuine one: nothing is known."""


@dataclass(frozen=True, slots=True)
class AgentVerdict:
    """The agent's verdict on the node."""

    critical: Mapping[str, str]
    """Each critical finding in the form of Slurm's reason, `gpu-lost gpu=3 xid=79`, by the same
    without the Xid, which NVML's own word may precede."""
    clean: bool
    """Whether everything could be checked and nothing is critical."""
    ready: bool = True
    """Whether all sources were judged; before that, the absence of a finding says nothing."""


def query(config: Config, alerts: Iterable[str]) -> AgentVerdict:
    """Return the verdict of this machine's agent for these alerts. Raises AgentSilent."""
    options = config.section(SlurmOptions)
    access = Access(
        user=options.user,
        password_file=options.password_file,
        cert_file=options.cert_file,
        key_file=options.key_file,
    )
    try:
        return judge(local(config, access, TIMEOUT).status(), frozenset(alerts))
    except Unreachable as error:
        message = str(error)
        if isinstance(error, Rejected) and error.status == HTTPStatus.UNAUTHORIZED:
            what = "rejects" if options.user else "requires a password (401): set"
            message = f"the agent {what} slurm.user and slurm.password_file"
        raise AgentSilent(message) from error


def judge(document: Mapping[str, Any], alerts: frozenset[str]) -> AgentVerdict:
    """Return the verdict in the agent's status document."""
    critical = {}
    for item in document["findings"]:
        if item.severity is State.CRITICAL and item.alert in alerts:
            part = _part(item.component, item.part)
            key = " ".join(filter(None, (_word(item.slug), part)))
            xid = _XID.match(item.reason)
            critical[key] = f"{key} xid={xid[1]}" if xid else key
    ready = document["ready"]
    clean = ready and not critical and document["verdict"] in {State.OK, State.WARNING}
    return AgentVerdict(critical, clean, ready)


def _part(component: str, part: str) -> str:
    """Return a part in the form of Slurm's reason, `gpu=3` for `GPU 3`; text from elsewhere is
    reduced to harmless characters.
    """
    words = part.split()
    if not words or component == "node" or words[-1] == "GPUs":  # no name
        return ""
    return f"{_word(component)}={_word(words[-1])}"


def _word(text: str) -> str:
    return _UNSAFE.sub("_", text)[:_LONGEST]
