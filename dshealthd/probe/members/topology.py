"""The topology: which nodes share a leaf switch, from Slurm's `topology.conf`, tree or blocks.

    SwitchName=leaf1 Nodes=gpu[001-032]
    SwitchName=leaf2 Nodes=gpu[033-064]
    SwitchName=spine Switches=leaf[1-2]

Source: topology.conf(5). Only the leaves of the tree are used; the levels above are checked and
then ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.members.hostlist import (
    MAX_NAMES,
    HostlistError,
    MembershipError,
    expand,
    quote,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MAX_LINKS = 8 * MAX_NAMES  # limit of a whole file: each node once for each of eight rails

_KEYS = {
    "switchname": ("nodes", "switches", "linkspeed"),
    "blockname": ("nodes",),
    "blocksizes": (),
}
_SWITCH = re.compile(r"[!-~]{1,64}")
_NAMED = re.compile(r"(?:switch|block)name=([^\s,]+)", re.IGNORECASE)
_FIELD = re.compile(r'([A-Za-z]+)=(?:"([^"]*)"|([^\s"]*))(?=\s|$)\s*')


@dataclass(frozen=True)
class Switch:
    """One line of the file."""

    name: str
    nodes: tuple[str, ...]
    """Nodes of a leaf switch or a block; empty for a switch above the leaves."""
    switches: tuple[str, ...]
    """The switches directly below."""
    line: int


def parse(text: str, place: str) -> tuple[Switch, ...]:
    """Return the switches and blocks of a topology file. Raises MembershipError; `place` is the
    name of the file in its lines.
    """
    errors: list[tuple[int, str]] = []
    found: dict[str, Switch] = {}
    spoilt: set[str] = set()
    left = _MAX_LINKS
    for number, line in _logical_lines(text):
        try:
            switch = _switch(line, number, min(left, MAX_NAMES))
        except HostlistError as error:
            errors.append((number, str(error)))
            spoilt.update(match[1] for match in _NAMED.finditer(line))
            continue
        if switch is None:
            continue
        left -= len(switch.nodes) + len(switch.switches)
        if switch.name in found:
            errors.append(
                (
                    number,
                    f"{quote(switch.name)} is already defined in line {found[switch.name].line}",
                )
            )
            continue
        found[switch.name] = switch
    for switch in found.values():
        for child in switch.switches:
            # A name defined on a bad line is one error, not two.
            if child not in found and child not in spoilt:
                errors.append(
                    (
                        switch.line,
                        f"{quote(switch.name)} has the switch {quote(child)}, which is not defined",
                    )
                )
            elif child == switch.name:
                errors.append((switch.line, f"{quote(child)} lists itself as a switch below it"))
    if errors:
        raise MembershipError(f"{place}:{number}: {reason}" for number, reason in sorted(errors))
    if not found:
        raise MembershipError([f"{place}: defines no switch"])
    return tuple(found.values())


def leaves(switches: Iterable[Switch], names: Iterable[str]) -> dict[str, str]:
    """Return each name's leaf switch, "" if the topology does not know it.

    A node on several leaf switches, for example one for each rail, has the leaf `a+b`, which it
    shares with nodes on the same switches. If the member list has `gpu1.example.org` and the
    topology `gpu1`, or the reverse, the first label decides, provided that it is unique.
    """
    homes: dict[str, list[str]] = {}
    for switch in switches:
        for node in switch.nodes:
            homes.setdefault(node, []).append(switch.name)
    joined = {node: "+".join(sorted(switch)) for node, switch in homes.items()}
    firsts = Counter(node.split(".")[0] for node in joined)
    short = {
        node.split(".")[0]: leaf for node, leaf in joined.items() if firsts[node.split(".")[0]] == 1
    }
    return {name: joined.get(name) or _by_label(name, joined, short) for name in names}


def _by_label(name: str, joined: Mapping[str, str], short: Mapping[str, str]) -> str:
    """Return the leaf switch by the first label of a node's name, or of one in the file."""
    first, dot, _ = name.partition(".")
    if dot:  # an address has no labels, and two different long names are two nodes
        return joined.get(first, "") if not first.isdecimal() else ""
    return short.get(name, "")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each logical line of a topology file: the number of its first line, and its text.
    Comments are removed; a backslash at the end continues the line.
    """
    pending, start = "", 0
    for number, raw in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        line = raw.split("#", 1)[0].rstrip()
        start = start or number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        yield start, (pending + line).strip()
        pending, start = "", 0
    if pending:
        yield start, pending.strip()


def _switch(line: str, number: int, limit: int) -> Switch | None:
    """Return the switch that a line defines, None if none. Raises HostlistError."""
    fields = _fields(line)
    if not fields:
        return None
    kind = next(iter(fields))
    if kind not in _KEYS:
        message = f"{quote(line)} does not begin with SwitchName=, BlockName= or BlockSizes="
        raise HostlistError(message)
    strange = [key for key in fields if key != kind and key not in _KEYS[kind]]
    if strange:
        message = f"{quote(line)} has {', '.join(strange)}, which is not a key of {kind}"
        raise HostlistError(message)
    if kind == "blocksizes":
        return None
    name = fields[kind]
    if _SWITCH.fullmatch(name) is None or any(character in name for character in ',[]"='):
        message = f"{quote(name)} is not a valid switch name"
        raise HostlistError(message)
    if "nodes" in fields and "switches" in fields:
        message = f"{quote(name)} has both nodes and switches"
        raise HostlistError(message)
    nodes, switches = (
        expand(fields[key], limit) if fields.get(key) else () for key in ("nodes", "switches")
    )
    return Switch(name, nodes, switches, number)


def _fields(line: str) -> dict[str, str]:
    """Return a line's fields by lower-case key; HostlistError if it is no list of KEY=VALUE."""
    fields: dict[str, str] = {}
    position = 0
    while position < len(line):
        match = _FIELD.match(line, position)
        if match is None:
            message = f"{quote(line[position:])} is not KEY=VALUE"
            raise HostlistError(message)
        key = match[1].lower()
        if key in fields:
            message = f"{quote(line)} has {match[1]} twice"
            raise HostlistError(message)
        fields[key] = match[2] if match[2] is not None else match[3]
        position = match.end()
    return fields
