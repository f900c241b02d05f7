"""`dshealthd free-port`: a port for the rendezvous of a job, free and not one that the
kernel assigns.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dshealthd.collectors.rendezvous import parse_ports
from dshealthd.config import flags
from dshealthd.config.flags import EXIT_FAILURE, EXIT_USAGE
from dshealthd.core.options import ConfigError
from dshealthd.core.text import print_lines
from dshealthd.linux.local_network import local_ports

if TYPE_CHECKING:
    import argparse

    from dshealthd.config.config import Config
    from dshealthd.core.host import Host

SERVED = frozenset((10061, 10062, 28028))
"""Ports of dshealthd's agent and of NCCL RAS, which may be free now but needed later."""
DESCRIPTION = (
    "Print a port for a rendezvous that is free here, not in TIME_WAIT and outside the "
    "ephemeral\nrange. With COMMAND, hold it until COMMAND starts. Run it on the master: no "
    "other node binds the port.\n"
)
EPILOG = (
    "examples:\n  export MASTER_PORT=$(dshealthd free-port)\n  dshealthd free-port -- deepspeed "
    "train.py\n\nExit status: 0 ok, 1 no such port, 2 wrong usage; with COMMAND, its exit "
    "status, or 127 if it cannot be started.\n"
)
EXIT_NOT_STARTED = 127
"""Exit status of a shell for a command that it does not find."""


class NoPort(Exception):
    """No port is available; the message says why and what helps."""


class Held:
    """A port that no other process can bind, on IPv4 or IPv6, until it is released."""

    def __init__(self, port: int) -> None:
        """Bind it; OSError (EADDRINUSE) if any socket uses it, even one in TIME_WAIT."""
        self.port = port
        self.sockets: list[socket.socket] = []
        try:
            for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
                self._bind(family, address)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Release a port that is held for a rendezvous."""
        for one in self.sockets:
            one.close()
        self.sockets.clear()

    def _bind(self, family: int, address: str) -> None:
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno == errno.EAFNOSUPPORT:
                return  # a kernel without IPv6: no conflict is possible there
            raise
        self.sockets.append(made)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            # Without SO_REUSEADDR, it fails for sockets in TIME_WAIT, as a launcher's bind would.
            made.bind((address, self.port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
                self.sockets.remove(made)
                made.close()  # IPv6 is disabled in this namespace
                return
            raise


def candidates(host: Host, first: int, last: int) -> list[int]:
    """Return a range's ports that the kernel does not assign by itself, in random order.

    NoPort if there is none. The kernel does not assign ports that the administrator has reserved.
    The order is random so that two callers at once do not try the same ports in the same order.
    """
    assigned = local_ports(host)
    found = [port for port in range(first, last + 1) if port not in SERVED and port not in assigned]
    if not found:
        raise NoPort(
            f"all of {first}-{last} is inside the ephemeral range {assigned}: reserve it "
            f"({assigned.reserving(first, last)}) or choose another range with --range"
        )
    random.shuffle(found)
    return found


def hold(ports: Sequence[int]) -> Held:
    """Bind the first port that can be bound and return it; NoPort if none can."""
    for port in ports:
        try:
            return Held(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise NoPort(
        f"none of {len(ports)} ports from {min(ports)} to {max(ports)} is free: "
        f"`ss -tanp '( sport >= {min(ports)} and sport <= {max(ports)} )'` shows who uses them"
    )


def parser() -> flags.FlagParser:
    """Return the parser of the command `free-port`."""
    made = flags.FlagParser(prog="dshealthd free-port", description=DESCRIPTION, epilog=EPILOG)
    made.add_argument(
        "--range",
        metavar="FIRST-LAST",
        help="ports to choose from, or one port (default: collectors.rendezvous.ports)",
    )
    made.add_argument(
        "run",
        metavar="COMMAND",
        nargs="*",
        help="after --: run this with MASTER_PORT set; the port is held until it starts",
    )
    flags.add_flags(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command `free-port` and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        loaded, wrong = flags.usable(options)
        if wrong is not None:  # a job starts all the same
            print_lines(wrong, error=True)
        return _serve(options, _ports(options, loaded))
    except (ConfigError, ValueError, ArithmeticError) as error:
        print_lines(f"dshealthd free-port: {error}", error=True)
        return EXIT_USAGE
    except (NoPort, OSError) as error:
        print_lines(f"dshealthd free-port: {error}", error=True)
        return EXIT_FAILURE


def _ports(options: argparse.Namespace, loaded: Config) -> list[int]:
    """Return the ports to try. ValueError for a bad range, NoPort if none is usable."""
    text = options.range or getattr(loaded.collectors["rendezvous"], "ports", "")
    return candidates(loaded.path.host, *parse_ports(text))


def _serve(options: argparse.Namespace, ports: Sequence[int]) -> int:
    held = hold(ports)
    try:
        if options.run:
            # The port is free again as the command starts.
            environment = {**os.environ, "MASTER_PORT": str(held.port)}
            try:
                os.execvpe(options.run[0], options.run, environment)  # noqa: S606 - the user's
            except OSError as error:
                text = f"dshealthd free-port: {options.run[0]}: {error.strerror}"
                print_lines(text, error=True)
                return EXIT_NOT_STARTED
        print_lines(held.port)
    finally:
        held.release()
    return 0
