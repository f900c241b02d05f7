"""The gRPC server of the NVRx health check, in its own process: requests verdicts from the agent.

Started as `python -m dshealthd.nvrx.server SOCKET DESCRIPTOR`; the descriptor is a socket to the
agent, which carries the frames of `dshealthd.nvrx.frames`. Its end of file means stop.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import select
import signal
import socket
import sys
import time
from concurrent import futures

import grpc

from dshealthd.core import wire
from dshealthd.core.sockets import clear
from dshealthd.core.text import print_lines
from dshealthd.nvrx.frames import QUESTION, READY

NAME = "nvhcd.HealthCheckService"
METHOD = "RunHealthCheck"
PATIENCE = 5.0
"""Seconds to wait for the agent's answer; NVRx waits for 60."""
KEPT = 1.0
"""Seconds for which an answer is reused.

The ranks of a node call at the same time, and a flood of calls costs the agent one question.
"""
MAX_CALLS = 64
"""Most calls in progress or waiting; more are refused with RESOURCE_EXHAUSTED."""
MAX_FILES = 512
"""Limit on this process's open files, and so on its connections."""
MAX_REQUEST = 1 << 16
"""Most bytes of a request.

NVRx sends a few words meant for scripts that others put behind this interface; they are ignored.
"""
NOBODY = 65534


class AgentGone(Exception):
    """The agent has ended, or does not answer."""


class Verdicts:
    """Requests verdicts from the agent, for one caller after the other."""

    def __init__(self, channel: socket.socket) -> None:
        """Request verdicts from the agent over a connected socket."""
        channel.settimeout(PATIENCE)
        self._channel = channel
        self._messages = wire.frames(channel)
        self._last: dict[str, str] = {}
        self._until = 0.0

    def query(self) -> dict[str, str]:
        """Return the agent's message with a verdict at most a second old, or raise AgentGone."""
        if time.monotonic() >= self._until:
            try:
                self._channel.sendall(QUESTION)
                self._last = next(self._messages)
            except (OSError, ValueError, ArithmeticError, StopIteration) as error:
                with contextlib.suppress(OSError):  # it may already be closed
                    # A late answer would be mistaken for the answer to the next question.
                    self._channel.shutdown(socket.SHUT_RDWR)
                message = f"the agent does not answer: {str(error) or 'it has ended'}"
                raise AgentGone(message) from error
            self._until = time.monotonic() + KEPT
        return self._last


def answer(verdicts: Verdicts, _request: bytes, context: grpc.ServicerContext) -> bytes:
    """Answer a gRPC health check; unknown is an error, see `dshealthd.nvrx.fitness`."""
    try:
        message = verdicts.query()
    except AgentGone as error:
        context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    if "unknown" in message:
        context.abort(grpc.StatusCode.UNAVAILABLE, message["unknown"])
    return message["response"].encode("latin-1")


def serve(path: str, verdicts: Verdicts) -> grpc.Server:
    """Return a gRPC server that listens on a Unix socket open to all users. OSError if it fails."""
    clear(path, socket.SOCK_STREAM)
    server = grpc.server(
        futures.ThreadPoolExecutor(1),  # the agent is asked one question at a time
        maximum_concurrent_rpcs=MAX_CALLS,
        options=(
            ("grpc.max_receive_message_length", MAX_REQUEST),
            # A launcher calls once; a connection that it keeps is one of MAX_FILES.
            ("grpc.max_connection_idle_ms", 60_000),
        ),
    )
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        functools.partial(answer, verdicts)
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(NAME, {METHOD: handler}),)
    )
    before = os.umask(0o111)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:  # grpc does not say why it failed
        raise OSError(errno.EADDRNOTAVAIL, f"grpc cannot listen there: {error}", path) from error
    finally:
        os.umask(before)
    server.start()
    return server


def main(path: str, descriptor: int) -> int:
    """Run the gRPC server until the agent ends.

    Return 1, with a line on standard error, if it cannot listen on the socket.
    """
    # Ctrl-C reaches the whole terminal group; the agent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only
    channel = socket.socket(fileno=descriptor)
    verdicts = Verdicts(channel)
    try:
        server = serve(path, verdicts)
    except OSError as error:
        print_lines(f"nvrx.socket: {path}: {error.strerror}", error=True)
        return 1
    if os.geteuid() == 0:  # a C library parses input from any user
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    channel.sendall(READY)
    end = select.poll()
    end.register(channel, select.POLLRDHUP)
    end.poll()
    server.stop(grace=None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
