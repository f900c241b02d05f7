"""What NCCL's RAS says of a job, asked twice: raw, and what it comes to."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from dshealthd.collector import Reason
from dshealthd.evidence.step import Missing
from dshealthd.jobs.ras import client as ras_client
from dshealthd.jobs.ras.address import enabled, endpoints
from dshealthd.jobs.ras.client import Query
from dshealthd.jobs.ras.from_json import parse_json
from dshealthd.jobs.ras.from_text import parse_text
from dshealthd.jobs.ras.peer import holder
from dshealthd.jobs.ras.progress import Progress
from dshealthd.jobs.ras.protocol import Answer, Unanswered
from dshealthd.jobs.ras.status import MalformedAnswer
from dshealthd.jobs.ras.summary import lags, troubles
from dshealthd.kernel.netlink import Interrupted, MalformedReply

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from dshealthd.evidence.step import Emit
    from dshealthd.host import Host

PAUSE = 4.0
"""Seconds from one answer to the next question: what stands still is what both say the same of."""
TIMEOUT = 12.0
"""Seconds that an answer may take; NCCL needs up to 10 s where processes are stopped."""
MAX_ANSWER = 16 << 20


def ask(emit: Emit, host: Host, environment: Mapping[str, str], pids: Sequence[int], world_size: int | None) -> dict[str, Any]:
    """Emit `nccl-ras-1.json` and -2 (`.txt` before NCCL 2.28.7), and return who is behind and who is in trouble; `Missing` says why not."""
    if not enabled(environment):
        message = "NCCL_RAS_ENABLE switches it off"
        raise Missing(message)
    progress, found = Progress(), dict[str, Any]()
    for number in (1, 2):
        if number > 1:
            time.sleep(PAUSE)
        answer = _answer(environment, host, pids)
        emit(f"nccl-ras-{number}.{'json' if answer.json else 'txt'}", answer.data)
        try:
            status = parse_json(answer.data) if answer.json else parse_text(answer.data)
        except MalformedAnswer as error:
            raise Missing(str(error)) from error
        progress.update(status, time.time())
        found = {
            "version": status.version,
            "idle": progress.idle,
            "behind": [[*rank, operation, behind] for (rank, operation), behind in lags(status, progress, world_size).items()],
            "troubles": [[*rank, what] for rank, what in troubles(status, world_size)],
        }
    emit("nccl-ras.json", json.dumps(found, indent=1).encode())
    return found


def _answer(environment: Mapping[str, str], host: Host, pids: Sequence[int]) -> Answer:
    """Return one answer of a process that belongs to the job; `Missing` if there is none."""

    def vouch(connection: socket.socket) -> bool:
        try:
            return holder(connection, pids, host, time.monotonic) is not None
        except (Interrupted, MalformedReply) as error:
            raise Unanswered(Reason.IO_ERROR, f"who answers is not known: {error}") from error

    try:
        query = Query(endpoints(environment), vouch, MAX_ANSWER)
    except ValueError as error:
        raise Missing(str(error)) from error
    ras_client.ask([query], TIMEOUT, time.monotonic)
    if not isinstance(query.outcome, Answer):
        raise Missing(str(query.outcome)) from query.outcome
    return query.outcome
