"""Whether this node's ranks can reach the master address of their run.

Tried only while they are not connected: runs whose ranks have met and runs that started long ago
are left alone. The connection is made with the rights of the ranks' user, carries no data and is
closed at once; rank 0's store sees a client that has gone away. Off by default, because the stores
of old PyTorch releases stall on it.
"""

from __future__ import annotations

import enum
import errno
import functools
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.collector import Collector, CollectorOptions, Worker, gauge
from dshealthd.core.host import read_bytes
from dshealthd.core.options import Duration, option
from dshealthd.core.result import fault_of, one_of_many
from dshealthd.core.sockets import name_is_unknown
from dshealthd.core.text import printable
from dshealthd.jobs.environment import Launcher, is_loopback, natural
from dshealthd.jobs.processes import ProcessTable
from dshealthd.jobs.ranks import Ranks
from dshealthd.linux.credentials import assumed, parse_user
from dshealthd.linux.process import uptime
from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.tcp_sockets import Sockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from dshealthd.core.collector import Context, Fault, Sample
    from dshealthd.jobs.processes import TrainingProcess
    from dshealthd.jobs.ranks import Run

CONNECTION = gauge(
    "dshealthd_job_master_connection",
    "1 for the state of the connection to a run's MASTER_ADDR and MASTER_PORT: connected if its "
    "ranks on this node are; else the outcome of the agent's own attempt: ok, refused, timed_out, "
    "unreachable, name_unknown, failed. Only for runs whose rank 0 is elsewhere; attempts only in "
    "their first half hour.",
    *("training_job", "run", "outcome"),
)

MAX_RUNS = 16
FIRST_PORT = 1024
"""Lower ports belong to system services; no run meets there."""
LAST_PORT = 65535
YOUNG = 1800.0
"""Seconds from the start of a run in which its master is tried: torch's own timeout."""
AGAIN = 300.0
"""Seconds after which an address that answered is tried again."""
MAX_ADDRESSES = 4


class ConnectionOutcome(enum.StrEnum):
    """Whether the master of a run can be reached; of several addresses, the first of these counts."""

    CONNECTED = "connected"
    OK = "ok"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    NAME_UNKNOWN = "name_unknown"


_MEANING = {
    errno.ECONNREFUSED: ConnectionOutcome.REFUSED,
    errno.ETIMEDOUT: ConnectionOutcome.TIMED_OUT,
    errno.EHOSTUNREACH: ConnectionOutcome.UNREACHABLE,
    errno.ENETUNREACH: ConnectionOutcome.UNREACHABLE,
    errno.EHOSTDOWN: ConnectionOutcome.UNREACHABLE,
}


@dataclass(frozen=True, kw_only=True)
class JobMasterOptions(CollectorOptions):
    """Options of connections to masters."""

    # In one test PyTorch's store without libuv (before torch 2.4, or with USE_LIBUV=0) served no
    # client for 5 s after such a connection; with libuv no request took longer than 0.4 ms (torch
    # 2.13.0).
    enabled: bool = option(
        False,
        "Whether this collector runs. Only for jobs with torch 2.4 or newer: an older PyTorch's "
        "store can stall for 5 seconds when a client connects and says nothing.",
    )
    interval: Duration = option("15s", "Check interval.", minimum="1s")
    deadline: Duration = option(
        "10s", "How long resolving and connecting may take for one run.", minimum="1s"
    )
    timeout: Duration = option("2s", "How long one address may take to answer.", minimum="100ms")


class JobMaster(Collector):
    """Connects to the masters of young runs."""

    Options = JobMasterOptions
    worker = Worker.MASTERS

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self._ranks = Ranks()
        self._met: set[tuple[str, str]] = set()
        """Runs whose ranks have connected; their masters are not tried."""
        self._answered: dict[tuple[str, str], float] = {}

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield whether the master answers, for each run whose rank 0 is on another node."""
        table = self.context.shared(ProcessTable)
        runs = self._ranks.runs(table.refresh(), table.machine)
        keys = {(run.job, run.name) for run in runs}
        self._met &= keys
        self._answered = {key: at for key, at in self._answered.items() if key in keys}
        wanted = [run for run in runs[:MAX_RUNS] if _elsewhere(run)]
        if not wanted:
            return
        connected = self._connected()
        now = uptime(self.host)
        for run in wanted:
            yield from one_of_many(
                f"job {run.job}", functools.partial(self._run, run, connected, now)
            )

    def _run(self, run: Run, connected: set[int], now: float) -> Iterator[Sample | Fault]:
        key = run.job, run.name
        if _port(run) in connected:
            self._met.add(key)
        if key in self._met:
            yield CONNECTION(1, *key, ConnectionOutcome.CONNECTED)
        # The youngest rank counts, as it may join a run that began long ago.
        elif now - max(process.started for process in run.processes) < YOUNG:
            yield from self._ask(run)

    def _connected(self) -> set[int]:
        sockets = self.context.shared(Sockets).active()
        return {found.peer_port for found in sockets if found.state == TcpState.ESTABLISHED}

    def _ask(self, run: Run) -> Iterator[Sample | Fault]:
        key = run.job, run.name
        now = self.context.monotonic()
        if now - self._answered.get(key, now - AGAIN) < AGAIN:
            yield CONNECTION(1, *key, ConnectionOutcome.OK)
            return
        part = f"master of {run.job}"
        if (fault := self.context.entering(part)) is not None:
            yield fault
            return
        try:
            with self._rights(run.processes[0]):
                outcome = connect(
                    run.rendezvous["MASTER_ADDR"], _port(run), float(self.options.timeout)
                )
        except (FileNotFoundError, ProcessLookupError, ValueError, ArithmeticError):
            return  # the process has ended
        except OSError as error:
            yield fault_of(part, error)
            return
        if outcome is ConnectionOutcome.OK:
            self._answered[key] = now
        yield CONNECTION(1, *key, outcome)

    def _rights(self, process: TrainingProcess) -> AbstractContextManager[None]:
        """Assume the rights of a rank's user, who chose the address and must gain nothing by it."""
        return assumed(parse_user(read_bytes(self.host.proc(f"{process.pid}/status"), 1 << 16)))


def _elsewhere(run: Run) -> bool:
    """Return whether a run's master is on another node and can be tried from here."""
    address = run.rendezvous["MASTER_ADDR"]
    return (
        0 not in run.ranks
        and bool(address)
        and not is_loopback(address)
        and FIRST_PORT <= _port(run) <= LAST_PORT
        and all(
            process.launch.launcher is Launcher.TORCH and not process.network
            for process in run.processes
        )
    )


def _port(run: Run) -> int:
    return natural(run.rendezvous["MASTER_PORT"]) or 0


def connect(host: str, port: int, timeout: float) -> ConnectionOutcome:
    """Return the outcome of a connection to the master that sends nothing. Blocks.

    OSError if no name server answers, which says nothing about the master.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if not name_is_unknown(error):
            message = f"no name server could resolve {printable(host)}: "
            raise OSError(message + (error.strerror or str(error))) from error
        return ConnectionOutcome.NAME_UNKNOWN
    except UnicodeError:
        return ConnectionOutcome.NAME_UNKNOWN
    found = [
        _attempt(family, address, timeout) for family, _, _, _, address in addresses[:MAX_ADDRESSES]
    ]
    return min(found, key=[*ConnectionOutcome].index, default=ConnectionOutcome.NAME_UNKNOWN)


def _attempt(family: int, address: tuple[Any, ...], timeout: float) -> ConnectionOutcome:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as made:
            made.settimeout(timeout)
            made.connect(address)
    except TimeoutError:
        return ConnectionOutcome.TIMED_OUT
    except OSError as error:
        return _MEANING.get(error.errno or 0, ConnectionOutcome.FAILED)
    return ConnectionOutcome.OK
