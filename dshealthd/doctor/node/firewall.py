"""The firewall lets other nodes in on the rendezvous ports."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.nftables import Fate, Packet, Ruleset, parse_networks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dshealthd.doctor.node_context import NodeContext

_EVERYWHERE = "fine for single-node jobs"
_NO_PEERS = frozenset(("docker", "cni", "virbr", "lxcbr", "podman", "veth", "lo"))
"""Name prefixes of interfaces that lead to containers and virtual machines on this node."""


def _neighbour_packets(context: NodeContext, port: int) -> list[Packet]:
    """Return packets to test the firewall with: one from each network, or one from anywhere."""
    route = read(context.host.proc("net/route"))
    return [
        Packet(port, interface, network)
        for interface, network in parse_networks(route)
        if not interface.startswith(tuple(_NO_PEERS))
    ] or [Packet(port)]


def judge(ruleset: Ruleset, packets: Sequence[Packet]) -> tuple[Fate, str, str]:
    """Return the packets' fate, the chain that drops or may drop them, and where they come from.

    One network with access is enough: management networks are closed on purpose.
    """
    found = [(*ruleset.fate(packet), packet) for packet in packets]
    for wanted in (Fate.ACCEPTED, Fate.UNKNOWN, Fate.DROPPED):
        for fate, chain, packet in found:
            if fate is wanted:
                place = f" from {packet.network} ({packet.interface})" if packet.network else ""
                return fate, chain, place
    return Fate.UNKNOWN, "", ""


def _has_legacy_rules(context: NodeContext) -> bool:
    """Tell whether legacy iptables has a filter table, whose rules nft does not list."""
    try:
        return "filter" in read(context.host.proc("net/ip_tables_names")).split()
    except FileNotFoundError:  # the module is not loaded
        return False


def _run(context: NodeContext) -> Iterator[Result]:
    from dshealthd.collectors.rendezvous import parse_ports

    first, _ = parse_ports(getattr(context.config.collectors["rendezvous"], "ports", ""))
    program = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        text = "nft is not installed, so the rules cannot be read"
        outcome = Outcome.UNKNOWN if context.several else Outcome.OK
        yield Result(outcome, f"{text}{'' if context.several else '; ' + _EVERYWHERE}")
        return
    done = subprocess.run(  # noqa: S603 - the system's own program
        [program, "-j", "list", "ruleset"], capture_output=True, check=False, timeout=4
    )
    if done.returncode:
        error = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        outcome = Outcome.UNKNOWN if context.several else Outcome.OK
        yield Result(
            outcome,
            f"the rules cannot be read: {error}{'' if context.several else '; ' + _EVERYWHERE}",
            remedy="sudo dshealthd doctor --only firewall" if context.several else "",
        )
        return
    if context.several and _has_legacy_rules(context):
        yield Result(
            Outcome.UNKNOWN,
            "iptables-legacy has rules that nft does not show",
            remedy="sudo iptables-legacy -S INPUT",
        )
        return
    ruleset = Ruleset(json.loads(done.stdout)["nftables"])
    fate, chain, place = judge(ruleset, _neighbour_packets(context, first))
    if fate is Fate.ACCEPTED:
        yield Result(Outcome.OK, f"TCP to port {first} is accepted over IPv4{place}")
        return
    if not context.several:
        yield Result(
            Outcome.OK, f"chain {chain} drops or may drop packets from other nodes; {_EVERYWHERE}"
        )
    elif fate is Fate.DROPPED:
        yield Result(
            Outcome.WARNING,
            f"chain {chain} drops packets from other nodes to port {first}{place}",
            remedy=f"sudo nft insert rule {chain} tcp dport {first}-{first + 100} accept",
            component=chain,
        )
    else:
        yield Result(
            Outcome.UNKNOWN,
            f"whether other nodes can reach port {first} depends on a rule that cannot be "
            f"evaluated here: {chain}",
            remedy="sudo nft -a list ruleset",
            component=chain,
        )


CHECK: Check[NodeContext] = Check(
    "rendezvous-unreachable", "firewall", "The firewall lets other nodes in", _run
)
