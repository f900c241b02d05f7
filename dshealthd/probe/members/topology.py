"""The topology: which nodes share a leaf switch, by Slurm's `topology.conf`, as tree or as blocks.

    SwitchName=leaf1 Nodes=gpu[001-032]
    SwitchName=leaf2 Nodes=gpu[033-064]
    SwitchName=spine Switches=leaf[1-2]

Source: topology.conf(5). Of the tree only its leaves are used; what is above them is checked and
otherwise left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.members.hostlist import MAX_NAMES, HostlistError, expand, quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MAX_LINKS = 8 * MAX_NAMES  # what a file may write out in all: a node for each of eight rails

_KEYS = {
    "switchname": ("nodes", "switches", "linkspeed"),
    "blockname": ("nodes",),
    "blocksizes": (),
}
_SWITCH = re.compile(r"[!-~]{1,64}")
_NAMED = re.compile(r"(?:switch|block)name=([^\s,]+)", re.IGNORECASE)
_FIELD = re.compile(r'([A-Za-z]+)=(?:"([^"]*)"|([^\s"]*))(?=\s|$)\s*')


class TopologyError(Exception):
    """A topology file that cannot be used.

    `errors` has one `FILE:LINE: reason` for each thing that is wrong.
    """

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(self.errors))


@dataclass(frozen=True)
class Switch:
    """One line of the file."""

    name: str
    nodes: tuple[str, ...]
    """Nodes of a leaf switch or a block; none for a switch above."""
    switches: tuple[str, ...]
    """The switches below."""
    line: int


def parse(text: str, place: str) -> tuple[Switch, ...]:
    """Return the switches and blocks that a topology file lists.

    Raises TopologyError; `place` is the file's name in its lines.
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
                    f"{quote(switch.name)} is defined in line {found[switch.name].line} already",
                )
            )
            continue
        found[switch.name] = switch
    for switch in found.values():
        for child in switch.switches:
            # A name on a bad line is one fault, not two.
            if child not in found and child not in spoilt:
                errors.append(
                    (
                        switch.line,
                        f"{quote(switch.name)} has the switch {quote(child)}, which is not defined",
                    )
                )
            elif child == switch.name:
                errors.append((switch.line, f"{quote(child)} is a switch of its own"))
    if errors:
        raise TopologyError(f"{place}:{number}: {reason}" for number, reason in sorted(errors))
    if not found:
        raise TopologyError([f"{place}: defines no switch"])
    return tuple(found.values())


def leaves(switches: Iterable[Switch], names: Iterable[str]) -> dict[str, str]:
    """Return each name's leaf switch in the topology, "" where it does not know it.

    A node on several leaf switches, as with one rail for each adapter, has the leaf `a+b`: nodes on
    the same ones share it. Where a list writes `gpu1.example.org` and the topology `gpu1`, or the
    reverse, the first label decides if it is the only such one.
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
    """Return the leaf switch by the first label of a node's name.

    Of a long name in a file of short ones, or of a short name in a file of long ones.
    """
    first, dot, _ = name.partition(".")
    if dot:  # an address has no label, and two long names that differ are two nodes
        return joined.get(first, "") if not first.isdecimal() else ""
    return short.get(name, "")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of its first line and the text of each logical line of a topology file.

    No comment, a backslash at the end goes on.
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
    """Return the switch of a topology line, None for a line without one.

    HostlistError says what is wrong.
    """
    fields = _fields(line)
    if not fields:
        return None
    kind = next(iter(fields))
    if kind not in _KEYS:
        message = f"{quote(line)} begins with none of SwitchName=, BlockName=, BlockSizes="
        raise HostlistError(message)
    strange = [key for key in fields if key != kind and key not in _KEYS[kind]]
    if strange:
        message = f"{quote(line)} has {', '.join(strange)}, which is no key of {kind}"
        raise HostlistError(message)
    if kind == "blocksizes":
        return None
    name = fields[kind]
    if _SWITCH.fullmatch(name) is None or any(character in name for character in ',[]"='):
        message = f"{quote(name)} is no name of a switch"
        raise HostlistError(message)
    if "nodes" in fields and "switches" in fields:
        message = f"{quote(name)} has both nodes and switches"
        raise HostlistError(message)
    nodes, switches = (
        expand(fields[key], limit) if fields.get(key) else () for key in ("nodes", "switches")
    )
    return Switch(name, nodes, switches, number)


def _fields(line: str) -> dict[str, str]:
    """Return the fields of a topology line by their keys in lower case.

    HostlistError where it is no list of KEY=VALUE.
    """
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
