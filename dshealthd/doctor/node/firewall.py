"""The firewall lets other nodes in on the rendezvous ports."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import Check, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

_EVERYWHERE = "enough for jobs on this node alone"
_STATES = frozenset(("established", "related"))


def input_chains(ruleset: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chains that see what arrives for this node, from nftables' JSON."""
    chains = [item["chain"] for item in ruleset if "chain" in item]
    return [chain for chain in chains if chain.get("hook") == "input"]


def _own_or_old(expression: list[dict[str, Any]]) -> bool:
    """Tell whether a rule only lets in what is of this node, or belongs to what was let in."""
    for part in expression:
        match = part.get("match")
        if not match:
            continue
        left, right = match.get("left"), match.get("right")
        if isinstance(left, dict):
            if left.get("meta", {}).get("key") in {"iif", "iifname"} and right == "lo":
                return True
            if left.get("ct", {}).get("key") == "state":
                states = right if isinstance(right, list) else [right]
                if set(states) <= _STATES:
                    return True
            if left.get("meta", {}).get("key") == "l4proto" and right in ("icmp", "ipv6-icmp"):
                return True
    return False


def _ports(expression: list[dict[str, Any]]) -> list[tuple[int, int]] | None:
    """Return the destination ports that a rule is about; None where it is about all.

    What is not understood may be any port.
    """
    for part in expression:
        match = part.get("match") or {}
        left = match.get("left")
        if isinstance(left, dict) and left.get("payload", {}).get("field") == "dport":
            right = match.get("right")
            items = right.get("set", [right]) if isinstance(right, dict) else [right]
            found = []
            for item in items:
                if isinstance(item, int):
                    found.append((item, item))
                elif isinstance(item, dict) and "range" in item:
                    found.append((item["range"][0], item["range"][1]))
                else:
                    return None
            return found
    return None


def closed(ruleset: list[dict[str, Any]], port: int) -> str:
    """Return the chain that drops TCP to a port from other nodes; empty where none surely does.

    In doubt a rule lets it in: jumps, sets and addresses are not followed.
    """
    for chain in input_chains(ruleset):
        if chain.get("policy") != "drop":
            continue
        name = f"{chain['family']} {chain['table']} {chain['name']}"
        rules = [
            item["rule"]["expr"]
            for item in ruleset
            if "rule" in item
            and item["rule"]["table"] == chain["table"]
            and item["rule"]["chain"] == chain["name"]
            and item["rule"]["family"] == chain["family"]
        ]
        for expression in rules:
            verdicts = {key for part in expression for key in part}
            if not verdicts & {"accept", "jump", "goto", "queue", "vmap"}:
                continue
            if _own_or_old(expression):
                continue
            ports = _ports(expression)
            if ports is None or any(low <= port <= high for low, high in ports):
                break
        else:
            return name
    return ""


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
    chain = closed(json.loads(done.stdout)["nftables"], first)
    if chain:
        yield Result(
            Outcome.WARNING if context.several else Outcome.OK,
            f"the chain {chain} drops what other nodes send to port {first}"
            f"{'' if context.several else '; ' + _EVERYWHERE}",
            remedy=f"sudo nft insert rule {chain} tcp dport {first}-{first + 100} accept"
            if context.several
            else "",
            component=chain,
        )
    else:
        yield Result(Outcome.OK, f"no chain drops TCP to port {first} by its policy")


CHECK: Check[NodeContext] = Check(
    "rendezvous-unreachable", "firewall", "The firewall lets other nodes in", _run
)
