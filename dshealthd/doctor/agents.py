"""The examination of other nodes through their agents, over the authenticated channel of probes.

An agent sends its status document, and the checks that need nothing else run here on it. Nothing is
started on the other node. Checks that need a process there are skipped and counted.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
import zlib
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import plural
from dshealthd.core.timing import time_limit
from dshealthd.doctor.check import unknown
from dshealthd.doctor.examination import Examined, mark_accepted
from dshealthd.doctor.node_context import NodeContext, facts
from dshealthd.doctor.options import DoctorOptions
from dshealthd.doctor.report import NodeReport, Report
from dshealthd.doctor.snapshot_check import SnapshotCheck, is_answered
from dshealthd.findings.finding import ORDER
from dshealthd.http.document import MAX_DOCUMENT, DocumentError, parse
from dshealthd.probe.cli.pairs import member_client, own_place
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.observation import Outcome as Called
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.peers.credentials import CredentialError
from dshealthd.probe.peers.protocol import PeerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dshealthd.config.config import Config
    from dshealthd.doctor.check import Check
    from dshealthd.linux.forked import Emit
    from dshealthd.probe.peers.client import PeerClient

CALL_DEADLINE = 4.0
"""Seconds for all pages of a document; an agent answers from memory."""
DEADLINE = CALL_DEADLINE + 4.0
"""Seconds for one node, its checks included."""
TRIES = 3
"""Attempts to read a document, as another reader may cause it to be rendered anew."""
_GZIP = 31


class ChannelError(Exception):
    """This node cannot query agents; the message says why."""


def channel(loaded: Config) -> tuple[str, tuple[str, ...]]:
    """Return this node's name among the members, and the names of all members.

    ChannelError if this configuration or this user cannot call their agents.
    """
    try:
        me, names = own_place(loaded, loaded.section(ProbeOptions).members)
        member_client(loaded, me)  # whether its secrets can be read
    except (MembershipError, CredentialError) as error:
        raise ChannelError("; ".join(error.errors)) from error
    return me, names


def examined(
    _emit: Emit, loaded: Config, me: str, checks: Sequence[Check[Any]], name: str
) -> dict[str, Any]:
    """Return the `--json` report of a node from its agent, or why there is none under `problem`.

    The agent is called as the member `me`. Blocks: run it in a process that can be killed.
    """
    try:
        document = asyncio.run(_ask(loaded, me, name))
    except PeerError as error:
        return {"problem": f"{error.outcome}: {error.reason}"}
    except TimeoutError:
        return {"problem": f"its agent did not send its status within {CALL_DEADLINE:g} s"}
    node = node_report(loaded, checks, name, document)
    return Report((node,), time.time(), 0.0).document()


def node_report(
    loaded: Config, checks: Sequence[Check[Any]], name: str, document: Mapping[str, Any]
) -> NodeReport:
    """Return the report of another node, made from its status document."""
    base = NodeContext(loaded, several=True, elsewhere=True)
    context = base.with_document({**document, "source": "agent"})
    found, left_out = [], 0
    for check in checks:
        started = time.monotonic()
        results = list(check.run(context)) if isinstance(check, SnapshotCheck) else []
        if results:
            results.sort(key=lambda result: -ORDER.index(result.outcome))
            seconds = time.monotonic() - started
            found.append(Examined(check.slug, check.name, check.title, tuple(results), seconds))
        elif is_answered(check):
            silent = unknown("the check returned no result")
            found.append(Examined(check.slug, check.name, check.title, (silent,), 0.0))
        else:
            left_out += 1
    source = "its agent, over the authenticated channel"
    if left_out:
        source += (
            f"; {plural(left_out, 'check that needs', 'checks that need')} a process there "
            f"{'was' if left_out == 1 else 'were'} not run (--no-agent runs all, over SSH)"
        )
    today = dt.datetime.now().astimezone().date()
    accepted = tuple(mark_accepted(found, loaded.section(DoctorOptions).accepted(), today))
    return NodeReport(name, accepted, source=source, facts=facts(context))


async def _ask(loaded: Config, me: str, name: str) -> dict[str, Any]:
    """Return the status document of a node's agent. PeerError; TimeoutError."""
    client = member_client(loaded, me)
    try:
        async with time_limit(CALL_DEADLINE):
            return unpacked(await _packed(client, name))
    finally:
        await client.close()


async def _packed(client: PeerClient, name: str) -> bytes:
    """Return all pages of a document from another node's agent. PeerError."""
    for _ in range(TRIES):
        packed, stamp, size = bytearray(), None, 1
        while len(packed) < size:
            page = await client.call(name, "document", {"offset": len(packed)}, CALL_DEADLINE)
            if stamp not in (None, page["stamp"]):
                break
            if not page["data"]:
                raise PeerError(Called.FAILED, "malformed")
            packed += page["data"]
            stamp, size = page["stamp"], page["size"]
        else:
            return bytes(packed)
    raise PeerError(Called.FAILED, "malformed")


def unpacked(packed: bytes) -> dict[str, Any]:
    """Return the document in an agent's answer; PeerError if it is malformed."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        text = unpacker.decompress(packed, MAX_DOCUMENT)
        if not unpacker.eof:
            raise PeerError(Called.FAILED, "malformed")
        return parse(text)
    except (zlib.error, DocumentError) as error:
        raise PeerError(Called.FAILED, "malformed") from error
