"""The rendezvous of a job's ranks: its address and port, from launcher and environment."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.sockets import name_is_unknown
from dshealthd.jobs.environment import is_loopback, natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand

STATIC_PORT = 29500
"""Default port of torch's static rendezvous and of `deepspeed`."""
DYNAMIC_PORT = 29400
"""Default port of torchrun's c10d and etcd rendezvous, if the endpoint names none."""
RESOLVE_DEADLINE = 8.0
"""Seconds for all names together; a dead name server costs 5 to 10, see resolv.conf(5)."""
MAX_PORT = 65_535
_AT_ONCE = 32
_ENDPOINT = re.compile(r"(.*?)(?::(\$?[\w{}]+))?")
"""HOST[:PORT]; in ${HOST:-a} the colon is the shell's."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where ranks meet; empty or None if not given, or if only a shell could compute it."""

    address: str = ""
    port: int | None = None
    port_text: str = ""
    """The port as written."""
    source: str = ""
    """Where address and port come from."""
    is_default: bool = False
    """Whether no address is given, so that the launcher uses loopback."""


def rendezvous(command: LauncherCommand | None, variables: Mapping[str, str]) -> Rendezvous:
    """Return where ranks meet; the launcher's own options override the environment."""
    inner = None
    if command is not None:
        inner = command.find("torchrun") or command.find("deepspeed")
    if inner is None:
        return _made(
            variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", ""), "environment"
        )
    options = inner.options
    backend = options.get("rdzv-backend", "" if inner.is_partial else "static")
    is_static = inner.program == "deepspeed" or backend == "static"
    default = "" if inner.is_partial else str(STATIC_PORT if is_static else DYNAMIC_PORT)
    match = _ENDPOINT.fullmatch(options.get("rdzv-endpoint", ""))
    address, port, source = match[1] if match else "", match[2] if match else "", "--rdzv-endpoint"
    if not address and is_static:  # other backends do not read these two
        address, port = options.get("master-addr", ""), options.get("master-port", "")
        source = "--master-addr"
    if not address and inner.program == "torchrun" and not inner.is_partial:
        made = _made("127.0.0.1", port or default, f"the default of {source}")
        return replace(made, is_default=True)
    return _made(address.strip("[]"), port or default, source)


def _made(address: str, port: str, source: str) -> Rendezvous:
    return Rendezvous(
        "" if "$" in address else address,
        None if "$" in port else natural(port),
        "" if "$" in port else port,
        source,
    )


@dataclass(frozen=True, slots=True)
class Resolved:
    """The addresses of a name, or why there are none."""

    addresses: tuple[str, ...] = ()
    problem: str = ""
    is_unknown: bool = False
    """Whether no name server answered, which says nothing about the name."""

    @property
    def is_loopback(self) -> bool:
        """Whether all addresses are loopback, which reaches only the local machine."""
        return bool(self.addresses) and all(map(is_loopback, self.addresses))


def resolve(names: Iterable[str]) -> dict[str, Resolved]:
    """Return the addresses of names, by name; a look-up that hangs is left behind.

    StartError if no thread can be started.
    """
    waiting = list(dict.fromkeys(names))
    found: dict[str, Resolved] = {}
    changed = threading.Condition()
    remaining = iter(tuple(waiting))

    def work() -> None:
        while True:
            with changed:
                name = next(remaining, None)
            if name is None:
                return
            answer = _look_up(name)
            with changed:
                found[name] = answer
                changed.notify_all()

    for _ in range(min(_AT_ONCE, len(waiting))):
        background.start(work, "names")
    problem = f"no answer from the name server within {RESOLVE_DEADLINE:g} s"
    late = Resolved(problem=problem, is_unknown=True)
    with changed:
        changed.wait_for(lambda: len(found) == len(waiting), RESOLVE_DEADLINE)
        return {name: found.get(name, late) for name in waiting}


def _look_up(name: str) -> Resolved:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return Resolved(problem=error.strerror or str(error), is_unknown=not name_is_unknown(error))
    except (OSError, UnicodeError) as error:
        return Resolved(problem=str(error))
    return Resolved(tuple(dict.fromkeys(str(answer[4][0]) for answer in answers)))
