"""The collecting process: `python -m dshealthd.evidence DESCRIPTOR`, a socket to the agent.

The agent sends a request, receives the name of the bundle once it is begun, sends its metrics again
some seconds later, and receives the outcome:

→ {"case": {…}, "host": {…}, "directory": PATH, "limits": {…}, "begun": SECONDS, "node": NAME,
"metrics": TEXT, "jobs": […], "probes": {…}, "logs": [[PATTERN, …], JOURNAL], "hanging": [UID, …]}
← {"bundle": NAME} → {"metrics": TEXT, "interval": SECONDS} ← {"outcome": OUTCOME, "detail": TEXT,
"user": UID, "left": [GROUP, …]}
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

from dshealthd.core import wire
from dshealthd.core.host import Host, read_bytes
from dshealthd.core.options import decoded
from dshealthd.evidence import bundle as bundles
from dshealthd.evidence.collection import Collection
from dshealthd.evidence.findings import HangCase, LogSources
from dshealthd.evidence.stacks import find_py_spy
from dshealthd.linux.credentials import parse_real_user


def main(descriptor: int) -> None:
    """Serve one evidence request of the agent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    messages = wire.frames(channel)
    request = next(messages)
    directory = Path(request["directory"])
    try:
        answer = _make(request, directory, channel, messages)
    except bundles.BundleRefused as refusal:
        answer = {"outcome": "refused", "detail": str(refusal)}
    except OSError as error:
        answer = {"outcome": "failed", "detail": str(error)}
    channel.sendall(wire.pack(answer))


def _make(
    request: dict[str, Any], directory: Path, channel: socket.socket, messages: Any
) -> dict[str, Any]:
    """Collect evidence into a new bundle, and return its outcome. `BundleRefused`, OSError."""
    case = HangCase(**request["case"])
    begun = request["begun"]
    host = decoded(Host, request["host"])
    user = next((found for _, pid in case.ranks if (found := _user(host, pid)) is not None), None)
    if user in request["hanging"]:
        message = f"what earlier collections started for user {user} hangs and cannot be killed"
        raise bundles.BundleRefused(message)
    bundle = bundles.make(directory, case.job, begun, user=user, **request["limits"])
    collection = Collection(
        case,
        host,
        bundle,
        node=request["node"],
        begun=begun,
        py_spy=find_py_spy(),
        logs=LogSources(*request["logs"]),
    )
    collection.begin(request["metrics"], request["jobs"], request["probes"])
    channel.sendall(wire.pack({"bundle": bundle.path.name}))
    collection.collect()
    later: dict[str, Any] = next(messages, {})  # none of an agent that has ended
    collection.end(later.get("metrics"), later.get("interval", 0.0))
    return {
        "outcome": "complete" if collection.whole else "partial",
        "detail": "; ".join(collection.findings.missing)[:500],
        "user": user,
        "left": collection.left,
    }


def _user(host: Host, pid: int) -> int | None:
    """Return the uid of a rank's process; None if it has ended."""
    try:
        return parse_real_user(read_bytes(host.proc(f"{pid}/status")))
    except (OSError, ValueError, ArithmeticError):
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
