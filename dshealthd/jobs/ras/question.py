"""The query for a job's RAS status, shared by the collector and evidence.

Nothing is sent unless every rank of the job on this node has mapped an NCCL that is safe to query.
Until one of the inspected processes has accepted the connection, only the opening line is sent.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.collector import Reason
from dshealthd.jobs.nccl.release import MappedReleases, UnknownRelease
from dshealthd.jobs.ras import policy
from dshealthd.jobs.ras.address import endpoints
from dshealthd.jobs.ras.client import Query
from dshealthd.jobs.ras.policy import Decision
from dshealthd.jobs.ras.protocol import Unanswered
from dshealthd.linux.ipv6 import MAX_DESCRIPTORS, may_use_ipv6
from dshealthd.linux.process import open_files
from dshealthd.linux.sock_diag import Interrupted, MalformedReply, TcpState, dump
from dshealthd.linux.socket_owners import parse_inode

if TYPE_CHECKING:
    import socket

    from dshealthd.core.host import Host

MAX_PROCESSES = 128
"""Most processes of a job that are inspected: 8 ranks, their launchers and their children.

A job with more processes to inspect is not queried.
"""
BUDGET = 0.5
"""Seconds of CPU time for the kernel to list the sockets of one port."""


class JobProcess(NamedTuple):
    """A process of a job, with what a query needs."""

    pid: int
    start: int
    parent: int
    rank: int


class Loaded(NamedTuple):
    """The NCCL releases that the processes of a job have mapped."""

    versions: frozenset[str | None]
    """Versions of all; None stands for an unknown release."""
    pids: tuple[int, ...]
    """Processes that have mapped NCCL."""
    detail: str
    """Why a release is unknown, or empty."""


def loaded_by(host: Host, members: Iterable[JobProcess], releases: MappedReleases) -> Loaded:
    """Return the NCCL releases that the processes of a job have mapped.

    A rank's children (data loaders) have mapped the same as the rank, and are skipped.
    """
    versions: set[str | None] = set()
    pids: dict[int, int] = {}
    detail = ""
    looked = 0
    for member in sorted(members, key=lambda member: (member.start, member.pid)):
        if pids.get(member.parent) == member.rank:
            continue
        if looked == MAX_PROCESSES:
            versions.add(None)
            detail = f"more than {MAX_PROCESSES} processes to inspect"
            break
        looked += 1
        try:
            found: Iterable[str | None] = releases.library(host, member.pid).versions
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except (UnknownRelease, OSError, ValueError, ArithmeticError) as error:
            found, detail = (None,), f"process {member.pid}: {error}"
        if found:
            pids[member.pid] = member.rank
            versions.update(found)
    return Loaded(frozenset(versions), tuple(pids), detail)


def decide(host: Host, loaded: Loaded, *, permit_unknown: bool) -> Decision:
    """Return whether a job is queried, given what its processes have mapped."""
    decision = policy.strictest(loaded.versions, permit_unknown=permit_unknown)
    if decision.is_asked and decision.ipv4_only:
        try:
            if any(may_use_ipv6(host, pid) for pid in loaded.pids):
                return Decision(policy.AskReason.IPV6)
        except OSError:
            return policy.UNKNOWN
    return decision


def holder(connection: socket.socket, pids: Iterable[int], host: Host) -> int | None:
    """Return which of these processes has accepted a connection to RAS; None if none has.

    Raises OSError if that cannot be read: netlink may be refused, or the process may be another
    user's.
    """
    port, own_port = connection.getpeername()[1], connection.getsockname()[1]
    sockets = dump(TcpState.ESTABLISHED.mask, (port, port), BUDGET)
    # By both ports: with SO_REUSEPORT many sockets share the server's port, and only the client's
    # port identifies this connection.
    inodes = {found.inode for found in sockets if found.peer_port == own_port}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            links = itertools.islice(open_files(host, pid), MAX_DESCRIPTORS)
            if any(parse_inode(link) in inodes for link in links):
                return pid
    return None


def prepare(
    environment: Mapping[str, str], loaded: Loaded, host: Host, first: int | None = None
) -> Query:
    """Return the query for a job's RAS, not yet started.

    `first` is the pid that is likely to answer. The query's `responder` is the one that did.
    ValueError if the job's RAS does not listen on this node.
    """
    pids = sorted(loaded.pids, key=lambda pid: pid != first)

    def verify_peer(connection: socket.socket) -> bool:
        try:
            query.responder = holder(connection, pids, host)
        except (Interrupted, MalformedReply) as error:
            raise Unanswered(Reason.IO_ERROR, f"the responder is unknown: {error}") from error
        return query.responder is not None

    query = Query(endpoints(environment), verify_peer)
    return query
