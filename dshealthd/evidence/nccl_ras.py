"""Two NCCL RAS answers about a job: raw, and evaluated.

The rules are the collector's: an NCCL release that a query can crash is not queried.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents
from dshealthd.core.text import printable_lines
from dshealthd.jobs.nccl.release import MappedReleases
from dshealthd.jobs.processes import namespace
from dshealthd.jobs.ras import client as ras_client
from dshealthd.jobs.ras import evaluation, question
from dshealthd.jobs.ras.address import ras_enabled
from dshealthd.jobs.ras.evaluation import JobProgress, lags, troubles
from dshealthd.jobs.ras.from_json import parse_json
from dshealthd.jobs.ras.options import NcclRasOptions
from dshealthd.jobs.ras.status import MalformedAnswer
from dshealthd.linux import privileges
from dshealthd.linux.forked import Emit, Missing

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.jobs.ras.question import JobProcess, Loaded

PAUSE = 4.0
"""Seconds from one answer to the next query; what is the same in both answers is stalled."""
MAX_MEMORY = 256 << 20
"""Memory limit in bytes for parsing two answers.

Malicious JSON takes thirty times its size; answers about 4,096 honest ranks have some 3 MiB.
"""


def query_job(
    emit: Emit,
    host: Host,
    environment: Mapping[str, str],
    members: Sequence[JobProcess],
    world_size: int | None,
) -> dict[str, Any]:
    """Query RAS twice, and emit `nccl-ras-1.json` and -2.

    Return which ranks lag and which are in trouble; `Missing` says why not.
    """
    if not ras_enabled(environment):
        raise Missing("disabled by NCCL_RAS_ENABLE")
    if any(namespace(host, one.pid) for one in members):
        message = "the job has a network namespace of its own, to which the agent cannot connect"
        raise Missing(message)
    privileges.limit_memory(MAX_MEMORY)
    releases = MappedReleases()
    progress, found = JobProgress(), dict[str, Any]()
    for number in (1, 2):
        if number > 1:
            time.sleep(PAUSE)
        loaded = question.loaded_by(host, members, releases)
        answer = _answer(environment, host, loaded)
        text = printable_lines(answer.decode(errors="replace"))
        emit(f"nccl-ras-{number}.json", text.encode())
        try:
            status = parse_json(answer)
            evaluation.check(status, loaded.versions, world_size)
        except MalformedAnswer as error:
            raise Missing(str(error)) from error
        progress.update(status)
        found = {
            "version": status.version,
            "idle": progress.idle,
            "behind": [
                [*rank, operation, behind]
                for (rank, operation), behind in lags(status, progress, world_size).items()
            ],
            "troubles": [[*rank, what] for rank, what in troubles(status, world_size)],
        }
    emit("nccl-ras.json", documents.dumps(found, indent=1).encode())
    return found


def _answer(environment: Mapping[str, str], host: Host, loaded: Loaded) -> bytes:
    """Return one RAS answer from a process of the job; `Missing` if there is none."""
    decision = question.decide(host, loaded, permit_unknown=False)
    if not decision.is_asked:
        releases = ", ".join(sorted(map(str, loaded.versions - {None}))) or "unknown"
        why = f" ({loaded.detail})" if loaded.detail else ""
        raise Missing(f"not queried, {decision.reason}: loaded NCCL is {releases}{why}")
    try:
        query = question.prepare(environment, loaded, host)
    except (ValueError, ArithmeticError) as error:
        raise Missing(str(error)) from error
    ras_client.send_queries([query], NcclRasOptions.timeout, time.monotonic)
    if not isinstance(query.outcome, bytes):
        raise Missing(str(query.outcome)) from query.outcome
    return query.outcome
