"""Network devices that a training process could use: interfaces, InfiniBand and RoCE ports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dshealthd.core.host import integer, lines_of, read
from dshealthd.core.result import fault_of
from dshealthd.linux.infiniband import parse_state, read_attribute

if TYPE_CHECKING:
    from dshealthd.core.collector import Context, Fault

Interfaces = dict[str, "bool | None"]
"""Whether each interface runs, in the sense of IFF_RUNNING, by name; None if unknown."""
Ports = dict[tuple[str, int], "bool | None"]
"""Whether each port is active, by adapter and number; None if unknown."""

_IFF_UP = 1
_ACTIVE = 4
_RUNNING = frozenset({"up", "unknown"})  # operational to the kernel: netif_oper_up()


def parse_names(text: str) -> list[str]:
    """Return the network interfaces of a `/proc/<pid>/net/dev`."""
    return [
        name.strip()
        for name, colon, _ in (line.rpartition(":") for line in lines_of(text)[2:])
        if colon
    ]


class NetworkDevices:
    """The devices of one sweep; each network namespace, and all adapters, are read once on use."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._host = context.host
        self._interfaces: dict[str, Interfaces] = {}
        self._ports: Ports | None = None
        self.faults: list[Fault] = []
        """Adapters that could not be read."""

    def interfaces(self, pid: int, network: str) -> Interfaces:
        """Return the interfaces of a process, given its `TrainingProcess.network`. OSError.

        Which of them run is only known in the agent's own namespace.
        """
        if network not in self._interfaces:
            names = parse_names(read(self._host.proc(f"{pid}/net/dev")))
            self._interfaces[network] = {
                name: None if network else self._runs(name) for name in names
            }
        return self._interfaces[network]

    def ports(self) -> Ports:
        """Return the ports of all InfiniBand adapters; empty if there are none."""
        if self._ports is None:
            self._ports = {}
            try:
                adapters = sorted(os.listdir(self._host.sys("class/infiniband")))
            except FileNotFoundError:
                adapters = []
            for adapter in adapters:
                self._ports |= self._adapter(adapter)
        return self._ports

    def _runs(self, name: str) -> bool | None:
        place = self._host.sys(f"class/net/{name}")
        try:
            return (
                bool(integer(place, read(f"{place}/flags"), 16) & _IFF_UP)
                and read(f"{place}/operstate").strip() in _RUNNING
            )
        except (OSError, ValueError, ArithmeticError):
            return None

    def _adapter(self, name: str) -> Mapping[tuple[str, int], bool | None]:
        """Return the ports of one adapter; this queries its firmware, which may hang."""
        place = self._host.sys(f"class/infiniband/{name}/ports")
        found: Ports = {}
        try:
            found = {(name, int(port)): None for port in os.listdir(place)}
            if (fault := self._context.entering(f"adapter {name}")) is None:
                found = {
                    port: parse_state(read_attribute(f"{place}/{port[1]}/state")) == _ACTIVE
                    for port in found
                }
            else:
                self.faults.append(fault)
        except (OSError, ValueError, ArithmeticError) as error:
            self.faults.append(fault_of(f"adapter {name}", error))
        return found
