"""nftables rules: what they do with the first TCP packet from a neighbour to a port on this node.

The ruleset (`nft -j list ruleset`, libnftables-json(5)) is a tree: a chain jumps to others. The
whole tree is followed. Each match answers yes, no or maybe. A rule that may match leaves both ways
open, so an expression that is not understood never makes a port count as open or closed.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FAMILIES = frozenset(("ip", "inet"))
_HOOKS = frozenset(("prerouting", "input"))
_OTHER_PROTOCOLS = frozenset(("arp", "dccp", "icmp", "icmpv6", "ip6", "sctp", "udp", "udplite"))
"""A rule that reads these headers matches only their packets, which nft does not spell out."""
_NO_EFFECT = frozenset(
    ("comment", "counter", "ct helper", "dup", "flow", "log", "mangle", "map", "notrack", "set")
)
_XT_DROPS = frozenset(("DROP", "REJECT"))
_XT_NO_EFFECT = frozenset(("CONNMARK", "CT", "LOG", "MARK", "NFLOG", "TRACE"))
_PLAIN = frozenset(("accept", "drop", "return", "continue"))
_MAX_DEPTH = 16
"""Maximum depth of jumps that the kernel permits (NFT_JUMP_STACK_SIZE)."""


class Fate(enum.Enum):
    """What may happen to the packet; for a rule, CONTINUED means that the next one decides."""

    ACCEPTED = "accept"
    DROPPED = "drop"
    RETURNED = "return"
    CONTINUED = "continue"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Packet:
    """The first packet of a TCP connection over IPv4, from a neighbour on one interface."""

    port: int
    interface: str = ""
    """Empty if unknown."""
    network: ipaddress.IPv4Network | None = None
    """The network of sender and receiver; None if unknown."""


def parse_networks(route: str) -> list[tuple[str, ipaddress.IPv4Network]]:
    """Return the networks of neighbours from `/proc/net/route`: routes without a gateway."""
    found = []
    for line in route.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and int(fields[2], 16) == 0:  # noqa: PLR2004 - the mask is the eighth
            address, mask = (
                int.from_bytes(bytes.fromhex(fields[number]), "little") for number in (1, 7)
            )
            if mask:
                found.append((fields[0], ipaddress.IPv4Network((address, mask.bit_count()))))
    return found


@dataclass(slots=True)
class Ruleset:
    """The rules of all chains."""

    items: list[dict[str, Any]]
    doubts: list[str] = field(default_factory=list)
    """Rules that may or may not decide, in the order in which the packet meets them."""
    _rules: dict[tuple[str, str, str], list[dict[str, Any]]] = field(default_factory=dict)
    _sets: dict[tuple[str, str, str], list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Group the rules by chain."""
        for item in self.items:
            if rule := item.get("rule"):
                key = rule["family"], rule["table"], rule["chain"]
                self._rules.setdefault(key, []).append(rule)
            elif made := item.get("set") or item.get("map"):
                self._sets[made["family"], made["table"], made["name"]] = made.get("elem", [])

    def fate(self, packet: Packet) -> tuple[Fate, str]:
        """Return the fate of a packet, and the chain that drops it or may drop it.

        Each chain of a hook can drop what an earlier one has accepted.
        """
        doubtful = ""
        for item in self.items:
            chain = item.get("chain", {})
            if chain.get("family") not in _FAMILIES or chain.get("hook") not in _HOOKS:
                continue
            if chain.get("type") != "filter":  # nat chains give no verdict
                continue
            name = f"{chain['family']} {chain['table']} {chain['name']}"
            self.doubts.clear()
            found = self._walk((chain["family"], chain["table"], chain["name"]), packet, 0)
            policy = Fate.DROPPED if chain.get("policy") == "drop" else Fate.ACCEPTED
            found = {policy if one is Fate.RETURNED else one for one in found}
            if found == {Fate.DROPPED}:
                return Fate.DROPPED, name
            if found != {Fate.ACCEPTED} and not doubtful:
                doubtful = self.doubts[0] if self.doubts else name
        return (Fate.UNKNOWN, doubtful) if doubtful else (Fate.ACCEPTED, "")

    def _walk(self, chain: tuple[str, str, str], packet: Packet, depth: int) -> set[Fate]:
        """Return all possible fates of a packet in a chain; RETURNED if no rule decides."""
        if depth > _MAX_DEPTH:
            return {Fate.UNKNOWN}
        possible: set[Fate] = set()
        for rule in self._rules.get(chain, ()):
            fates = self._rule(rule, chain, packet, depth)
            possible |= fates - {Fate.CONTINUED}
            if Fate.CONTINUED not in fates:
                return possible
            if len(fates) > 1:
                self.doubts.append(f"{' '.join(chain)}, handle {rule.get('handle')}")
        return possible | {Fate.RETURNED}

    def _rule(
        self, rule: Mapping[str, Any], chain: tuple[str, str, str], packet: Packet, depth: int
    ) -> set[Fate]:
        sure = True
        for part in rule.get("expr", ()):
            ((kind, value),) = part.items()
            if kind == "match":
                answer = self._match(value, chain, packet)
            elif kind == "xt" and value.get("type") == "match":
                answer = True if value.get("name") == "comment" else None
            elif kind in _NO_EFFECT:
                continue
            elif kind == "vmap":
                fates = self._verdict_map(value, chain, packet, depth)
                return fates if sure else fates | {Fate.CONTINUED}
            else:
                decided = self._verdict(kind, value, chain, packet, depth)
                if decided is None:  # a limit or a quota: some packets pass it
                    sure = False
                    continue
                if decided == {Fate.CONTINUED}:
                    continue
                return decided if sure else decided | {Fate.CONTINUED}
            if answer is False:
                return {Fate.CONTINUED}
            sure = sure and answer is True
        return {Fate.CONTINUED}

    def _verdict(
        self, kind: str, value: Any, chain: tuple[str, str, str], packet: Packet, depth: int
    ) -> set[Fate] | None:
        """Return what a statement of a rule decides; None if it is a condition."""
        if kind in _PLAIN:
            return {Fate(kind)}
        if kind == "reject" or (kind == "xt" and value.get("name") in _XT_DROPS):
            return {Fate.DROPPED}
        if kind in {"jump", "goto"}:
            found = self._walk((*chain[:2], value["target"]), packet, depth + 1)
            if kind == "jump" and Fate.RETURNED in found:
                found = found - {Fate.RETURNED} | {Fate.CONTINUED}
            return found
        if kind == "xt" and value.get("name") in _XT_NO_EFFECT:
            return {Fate.CONTINUED}
        if kind in {"limit", "quota", "ct count", "connlimit", "meter"}:
            return None
        return {Fate.UNKNOWN, Fate.CONTINUED}

    def _verdict_map(
        self, vmap: Mapping[str, Any], chain: tuple[str, str, str], packet: Packet, depth: int
    ) -> set[Fate]:
        found: set[Fate] = set()
        for key, verdict in self._elements(vmap["data"], chain):
            answer = _equals(vmap["key"], key, packet)
            if answer is False:
                continue
            ((kind, value),) = verdict.items()
            found |= self._verdict(kind, value, chain, packet, depth) or {Fate.UNKNOWN}
            if answer is True:
                return found
        return found | {Fate.CONTINUED}

    def _match(
        self, match: Mapping[str, Any], chain: tuple[str, str, str], packet: Packet
    ) -> bool | None:
        """Return whether a packet matches; None if unknown."""
        left, right, operator = match["left"], match["right"], match.get("op", "==")
        if isinstance(left, dict) and (left.get("payload", {}).get("protocol") in _OTHER_PROTOCOLS):
            return False
        if operator in {"<", ">", "<=", ">="}:
            return _ordered(left, right, operator, packet)
        answer = _any(_equals(left, one, packet) for one in self._elements(right, chain))
        if operator in {"==", "in"}:
            return answer
        return (not answer) if operator == "!=" and answer is not None else None

    def _elements(self, right: Any, chain: tuple[str, str, str]) -> list[Any]:
        """Return the values that a rule compares with, including those of a named set."""
        if isinstance(right, str) and right.startswith("@"):
            found = self._sets.get((*chain[:2], right[1:]), [{"unknown": right}])
        elif isinstance(right, dict) and "set" in right:
            inner = right["set"]
            found = inner if isinstance(inner, list) else [inner]
        else:
            found = right if isinstance(right, list) else [right]
        return [one["elem"]["val"] if _is(one, "elem") else one for one in found]


def _is(value: Any, key: str) -> bool:
    return isinstance(value, dict) and key in value


def _any(answers: Iterable[bool | None]) -> bool | None:
    found = set(answers)
    return True if True in found else None if None in found else False


def _is_port(left: Any) -> bool:
    payload = left.get("payload", {}) if isinstance(left, dict) else {}
    return payload.get("protocol") in {"tcp", "th"} and payload.get("field") == "dport"


def _ordered(left: Any, right: Any, operator: str, packet: Packet) -> bool | None:
    if not _is_port(left) or not isinstance(right, int):
        return None
    return {
        "<": packet.port < right,
        ">": packet.port > right,
        "<=": packet.port <= right,
        ">=": packet.port >= right,
    }[operator]


def _equals(left: Any, right: Any, packet: Packet) -> bool | None:
    """Return whether a packet's field equals a rule's value; None if unknown."""
    if not isinstance(left, dict):
        return None
    if _is_port(left):
        if _is(right, "range"):
            low, high = right["range"]
            return bool(low <= packet.port <= high)
        return packet.port == right if isinstance(right, int) else None
    payload = left.get("payload", {})
    if payload.get("protocol") in _OTHER_PROTOCOLS:
        return False
    if payload.get("protocol") == "ip":
        if payload.get("field") == "protocol":
            return right in ("tcp", 6)
        if payload.get("field") in {"saddr", "daddr"}:
            return _in_network(right, packet.network)
        return None
    if "&" in left:  # nft prints flags as `tcp flags & (fin | syn) == syn`
        inner, mask = left["&"]
        if _is(inner, "payload") and inner["payload"].get("field") == "flags":
            flags = mask if isinstance(mask, list) else [mask]
            return (right == "syn") if "syn" in flags and isinstance(right, str) else None
        return None
    if payload.get("protocol") == "tcp" and payload.get("field") == "flags":
        return right == "syn" if isinstance(right, str) else None
    if "meta" in left:
        return _meta(left["meta"].get("key"), right, packet)
    if "ct" in left:
        if left["ct"].get("key") == "state":
            return right == "new" if isinstance(right, str) else None
        if left["ct"].get("key") == "status" and right in ("dnat", "snat"):
            return False  # the packet is for a port of this node itself
    return None


def _meta(key: Any, right: Any, packet: Packet) -> bool | None:
    if key == "l4proto":
        return right in ("tcp", 6)
    if key == "nfproto":
        return right in ("ipv4", 2)
    if key == "protocol":
        return right in ("ip", 8)
    if key in {"iif", "iifname"} and isinstance(right, str):
        if right == "lo":
            return False
        return fnmatchcase(packet.interface, right) if packet.interface else None
    return None


def _in_network(right: Any, network: ipaddress.IPv4Network | None) -> bool | None:
    """Tell whether a rule's addresses include the network; None if they include only part of it."""
    try:
        if _is(right, "prefix"):
            prefix = right["prefix"]
            known = ipaddress.IPv4Network((prefix["addr"], prefix["len"]), strict=False)
            low, high = known[0], known[-1]
        elif _is(right, "range"):
            low, high = map(ipaddress.IPv4Address, right["range"])
        else:
            low = high = ipaddress.IPv4Address(right)
    except (ValueError, TypeError):
        return None
    if low.is_loopback or low.is_multicast:
        return False
    if network is None:
        return None
    if low <= network[0] and network[-1] <= high:
        return True
    return False if high < network[0] or network[-1] < low else None
