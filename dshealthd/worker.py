"""A worker process: runs the collectors whose sources can hang, and says which part it touches before it does.

Started as `python -m dshealthd.worker FD` with one end of a socket pair. The first frame says what to run; then each request is answered
by one frame a collector and a last one:

    → {"worker": NAME, "host": {…}, "collectors": {NAME: {…options}}, "log_level": N}     ← {"ready": PID}
    → {"collect": [NAME, …], "blocked": [FAULT, …]}        ← {"at": [NAME, PART]} …, {"result": NAME, …} …, {"done": true}

The end of the socket is the order to stop: what is held is released, and the process ends.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import Any

from dshealthd import registry, wire
from dshealthd.collector import Collector, Context, Fault, Reason
from dshealthd.host import Host
from dshealthd.options import Errors, decode
from dshealthd.result import attempt


def main(descriptor: int) -> None:
    """Serve requests on an inherited socket until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the agent decides
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only
    channel = socket.socket(fileno=descriptor)
    messages = wire.frames(channel)
    hello = next(messages)
    logging.basicConfig(level=hello["log_level"], stream=sys.stderr, format=f"worker {hello['worker']}: %(levelname)s %(message)s")
    blocked: dict[str, Fault] = {}
    current = ""

    def approach(part: str) -> Fault | None:
        if part in blocked:
            return blocked[part]
        channel.sendall(wire.pack({"at": [current, part]}))
        return None

    context = Context(host=_decoded(Host, hello["host"]), monotonic=time.monotonic, wall=time.time, approach=approach)
    collectors = {name: _collector(name, options, context) for name, options in hello["collectors"].items()}
    gc.freeze()  # what is imported stays; later collections look only at what a sweep makes
    channel.sendall(wire.pack({"ready": os.getpid()}))
    for request in messages:
        context.sweep += 1
        blocked = {part: Fault(part, Reason(reason), detail) for part, reason, detail in request["blocked"]}
        for current in request["collect"]:
            channel.sendall(wire.pack({"at": [current, ""]}))
            channel.sendall(wire.pack_result(current, attempt(collectors[current], time.monotonic)))
        channel.sendall(wire.pack({"done": True}))
    for collector in collectors.values():
        collector.close()
    context.close()


def _collector(name: str, options: dict[str, Any], context: Context) -> Collector:
    kind = registry.load(name)
    return kind(_decoded(kind.Options, options), context)


def _decoded(schema: Any, table: dict[str, Any]) -> Any:
    """Decode what the agent has already checked."""
    errors = Errors()
    value = decode(schema, table, "", errors)
    if errors:
        raise ValueError("; ".join(errors))
    return value


if __name__ == "__main__":
    main(int(sys.argv[1]))
