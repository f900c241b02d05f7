"""InfiniBand ports are up at the rate of their peers.

A port without a cable is normal, so ports are compared with others on the same board.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Result, warning
from dshealthd.doctor.snapshot_check import snapshot_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

Port = tuple[str, str]
_UP, _RATE = "infiniband_port_up", "infiniband_port_rate_bytes_per_second"
PEERS = "the ports of the same board on this node"


def _ports(context: NodeContext) -> dict[Port, float]:
    """Return whether each InfiniBand port is up, without Ethernet (RoCE) ports."""
    ethernet = context.series.parts("infiniband_port_info", "device", "port", link_layer="Ethernet")
    return {
        port: point.value
        for point in context.series(_UP)
        if (port := (point.labels["device"], point.labels["port"])) not in ethernet
    }


def _boards(context: NodeContext, ports: dict[Port, float]) -> dict[str, list[Port]]:
    board = {
        point.labels["device"]: point.labels["board"]
        for point in context.series("infiniband_device_info")
    }
    found = defaultdict(list)
    for device, port in ports:
        found[board.get(device, "")].append((device, port))
    return found


def _problems(context: NodeContext) -> Iterator[Result]:
    series, ports = context.series, _ports(context)
    # A port may have a finding for another reason, which says nothing of this one.
    told = {(finding.part, finding.source) for finding in context.findings["findings"]}
    rates = {(point.labels["device"], point.labels["port"]): point.value for point in series(_RATE)}
    disabled = series.parts("infiniband_port_physical_state", "device", "port", state="disabled")
    linked = series.parts("infiniband_port_physical_state", "device", "port", state="link_up")
    for peers in _boards(context, ports).values():
        alive = [port for port in peers if ports[port]]
        fastest = max((rates.get(port, 0.0) for port in alive), default=0.0)
        for port in peers:
            name = "/".join(port)
            if not ports[port] and port in linked:
                yield warning(
                    f"{name} has a link but is not active: no subnet manager has configured it",
                    remedy="sminfo; systemctl status opensm",
                    component=name,
                )
            elif not ports[port] and 2 * len(alive) > len(peers):
                if port not in disabled and (name, f"dshealthd_{_UP}") not in told:
                    yield warning(
                        f"{name} is down, but {len(alive)} of {len(peers)} ports like it are up",
                        remedy=f"ibstat {port[0]} {port[1]}  # then reseat or replace the cable",
                        component=name,
                        source=PEERS,
                    )
            elif (
                ports[port]
                and port in rates
                and rates[port] < fastest
                and (name, f"dshealthd_{_RATE}") not in told
            ):
                yield warning(
                    f"{name} runs at {rates[port] * 8e-9:g} Gb/s, its peers run at "
                    f"{fastest * 8e-9:g}",
                    remedy=f"ibstat {port[0]} {port[1]}; mlxlink -d {port[0]} -m",
                    value=f"{rates[port] * 8e-9:g} Gb/s",
                    limit=f"{fastest * 8e-9:g} Gb/s",
                    source=PEERS,
                    component=name,
                )


CHECK = snapshot_check(
    "bad-link",
    "infiniband",
    "InfiniBand ports are up at their peers' rate",
    "infiniband",
    absent=(_UP, "no InfiniBand"),
    problems=_problems,
    alerts=("DshealthdFabricPort", "DshealthdAdapter", "DshealthdNetwork"),
)
