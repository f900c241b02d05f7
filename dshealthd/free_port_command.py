"""`dshealthd free-port`: chooses a port that is free on all nodes of a job, and holds it."""

from __future__ import annotations

import argparse
import functools
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from dshealthd import config, flags
from dshealthd.collectors.rendezvous import parse_ports
from dshealthd.core.host import read
from dshealthd.core.options import ConfigError
from dshealthd.doctor.hosts import HostsError, command, last_line, names, run
from dshealthd.doctor.processes import Pool
from dshealthd.free_port import Held, NoPort, candidates, free, hold
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.config import Config

DESCRIPTOR = "DSHEALTHD_PORT_FD"
"""Variable with the number of the inherited descriptor."""
ASKED = 64
"""Maximum number of ports to query other nodes about at once."""
TRIES = 3
"""Ports to try to hold on all nodes, as one may be taken in between."""
HELD = 60.0
"""Seconds to hold a port by default."""
EXIT_FAILURE, EXIT_USAGE = 1, 2
DESCRIPTION = """\
Print a port for a rendezvous that is free, not in TIME_WAIT and outside the ephemeral
range, here and on all --hosts. Hold it until COMMAND starts, or for as long as --hold says.
"""
EPILOG = """\
examples:
  export MASTER_PORT=$(dshealthd free-port)
  dshealthd free-port --hosts slurm -- deepspeed train.py
  dshealthd free-port --hold 300

Exit status: 0 ok, 1 no such port, 2 wrong usage; with COMMAND, that of COMMAND.
"""


def parser() -> flags.FlagParser:
    """Return the parser of the command `free-port`."""
    made = flags.FlagParser(prog="dshealthd free-port", description=DESCRIPTION, epilog=EPILOG)
    made.add_argument(
        "--range",
        metavar="FIRST-LAST",
        help="ports to choose from (default: collectors.rendezvous.ports)",
    )
    made.add_argument("--port", type=int, metavar="PORT", help="use this port or none")
    made.add_argument(
        "--hold",
        nargs="?",
        type=float,
        const=HELD,
        metavar="SECONDS",
        help="keep it bound for this long (default: 60) or until standard input ends",
    )
    made.add_argument(
        "--pass-descriptor",
        action="store_true",
        help=f"pass the bound sockets to COMMAND, first descriptor in {DESCRIPTOR}, instead of "
        "releasing the port as it starts (TCPStore's master_listen_fd)",
    )
    made.add_argument(
        "--hosts",
        metavar="NODES",
        help="require it to be free on these nodes too: node[01-16], @HOSTFILE, slurm",
    )
    made.add_argument(
        "--host-timeout",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="deadline for each node (default: 20)",
    )
    made.add_argument(
        "--remote-command",
        metavar="PROGRAM",
        default="dshealthd",
        help="path of dshealthd on the other nodes, if it is not in their PATH",
    )
    made.add_argument("--ssh", metavar="PROGRAM", default="ssh", help="SSH client (default: ssh)")
    made.add_argument("--among", metavar="PORT,...", help=argparse.SUPPRESS)
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
        loaded = config.load(options.config_file, flags.tables(options))
        if options.among:
            found = ",".join(map(str, free(map(int, options.among.split(",")))))
            print(f"{found} {_identity()}")
            return 0
        return _serve(options, _ports(options, loaded))
    except (ConfigError, HostsError, ValueError) as error:
        print(f"dshealthd free-port: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (NoPort, OSError) as error:
        print(f"dshealthd free-port: {error}", file=sys.stderr)
        return EXIT_FAILURE


def _identity() -> str:
    """Return the identity of this network: boot ID and network namespace."""
    boot = read("/proc/sys/kernel/random/boot_id").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _ports(options: argparse.Namespace, loaded: Config) -> list[int]:
    """Return the ports to try. ValueError for a bad range, NoPort if none is usable."""
    if options.port is not None:
        first, last = parse_ports(str(options.port))
    else:
        text = options.range or getattr(loaded.collectors["rendezvous"], "ports", "")
        first, last = parse_ports(text)
    return candidates(loaded.path.host, first, last)


def _serve(options: argparse.Namespace, ports: Sequence[int]) -> int:
    """Choose a free port, hold it, and print it or pass it to the command."""
    holders: list[subprocess.Popen[bytes]] = []
    if options.hosts:
        held, holders = _everywhere(options, ports)
    else:
        held = hold(ports)
    try:
        if options.run:
            return _exec(options, held)
        print(held.port, flush=True)
        if options.hold is not None:
            _wait(options.hold)
    finally:
        held.release()
        _let_go(holders)
    return 0


def _exec(options: argparse.Namespace, held: Held) -> int:
    """Replace this process with the command.

    The sockets close as it starts, unless they are passed on. The holders on other nodes release
    the port too, because their standard input is then closed.
    """
    environment = {**os.environ, "MASTER_PORT": str(held.port)}
    if options.pass_descriptor:
        for one in held.sockets:
            os.set_inheritable(one.fileno(), True)  # noqa: FBT003 - positional only
        environment[DESCRIPTOR] = str(held.sockets[0].fileno())
    os.execvpe(options.run[0], options.run, environment)  # noqa: S606 - the user's command


def _wait(seconds: float) -> None:
    """Wait for `seconds`, the end of standard input, SIGTERM or SIGINT."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin], [], [], left)
            if ready and not os.read(sys.stdin.fileno(), 4096):
                return
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)


def _everywhere(
    options: argparse.Namespace, ports: Sequence[int]
) -> tuple[Held, list[subprocess.Popen[bytes]]]:
    """Return a port that is free on all nodes, held here, and the processes that hold it elsewhere.

    NoPort names the nodes that do not answer: unknown is not free.
    """
    hosts = names(options.hosts)
    left = list(free(ports))[:ASKED]
    if not left:
        hold(ports)  # raises with the reason
    others = []
    for host, (found, identity) in _ask(options, hosts, left).items():
        if identity != _identity():  # this node holds the port itself
            others.append(host)
        left = [port for port in left if port in found]
        if not left:
            message = f"no port in {min(ports)}-{max(ports)} is free on all nodes up to {host}"
            raise NoPort(message)
    wanted = options.hold is not None or options.run
    for port in left[:TRIES]:
        held = Held(port)
        if not wanted:
            return held, []
        try:
            return held, _hold_there(options, others, port)
        except NoPort as error:
            held.release()
            why = error
    raise why


def _ask(
    options: argparse.Namespace, hosts: Sequence[str], ports: Sequence[int]
) -> dict[str, tuple[set[int], str]]:
    """Return the ports that are free on each node, and the identity of its network.

    NoPort if a node does not answer.
    """
    remote = [options.remote_command, "free-port", "--among", ",".join(map(str, ports))]
    found: dict[str, tuple[set[int], str]] = {}
    silent = []
    pool = Pool()
    try:
        for host in hosts:
            line = command([options.ssh], host, remote, options.host_timeout)
            pool.start(host, functools.partial(run, line), options.host_timeout)
        for ended in pool.ended():
            code, output, errors = ended.value or (1, "", ended.problem)
            answer, _, identity = output.strip().rpartition(" ")
            words = [word for word in answer.split(",") if word]
            if code or not identity or not all(word.isdecimal() for word in words):
                silent.append(f"{ended.name}: {last_line(errors or output)}")
            else:
                found[ended.name] = set(map(int, words)), identity
    finally:
        pool.close()
    if silent:
        asked = plural(len(hosts), "node")
        message = f"no answer from {len(silent)} of {asked}: {'; '.join(sorted(silent))}"
        raise NoPort(message)
    return found


def _hold_there(
    options: argparse.Namespace, hosts: Sequence[str], port: int
) -> list[subprocess.Popen[bytes]]:
    """Have every node hold a port until our end of its standard input is closed."""
    seconds = options.hold or HELD
    remote = [options.remote_command, "free-port", "--port", str(port), "--hold", f"{seconds:g}"]
    holders = [
        subprocess.Popen(  # noqa: S603 - a list of arguments
            command([options.ssh], host, remote, options.host_timeout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for host in hosts
    ]
    end = time.monotonic() + options.host_timeout
    for host, holder in zip(hosts, holders, strict=True):
        said = _line(holder, end - time.monotonic())
        if said.strip() != str(port).encode():
            _let_go(holders)
            message = f"{host} cannot hold port {port} (command: {shlex.join(remote)})"
            raise NoPort(message)
    return holders


def _line(holder: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return what the holder of a port prints within `seconds`; empty if nothing."""
    if holder.stdout is None:
        return b""
    ready, _, _ = select.select([holder.stdout], [], [], max(0.0, seconds))
    return os.read(holder.stdout.fileno(), 64) if ready else b""


def _let_go(holders: Sequence[subprocess.Popen[bytes]]) -> None:
    for holder in holders:
        for end in (holder.stdin, holder.stdout):
            if end is not None:
                end.close()
    for holder in holders:
        try:
            holder.wait(2)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
