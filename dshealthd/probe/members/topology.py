"""The topology: which nodes share a leaf switch, from Slurm's `topology.conf`, tree or blocks.

    SwitchName=leaf1 Nodes=gpu[001-032]
    SwitchName=leaf2 Nodes=gpu[033-064]
    SwitchName=spine Switches=leaf[1-2]

Source: topology.conf(5). Only switches and blocks with nodes are read; what is above them does not
matter here, and Slurm itself checks it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from dshealthd.probe.members.hostlist import (
    MAX_NAMES,
    HostlistError,
    MembershipError,
    expand,
    quote,
)

_MAX_LINKS = 8 * MAX_NAMES  # limit of a whole file: each node once for each of eight rails

_NAMES = ("switchname", "blockname")
_SWITCH = re.compile(r'(?:(?![,\[\]"=])[!-~]){1,64}')
_FIELD = re.compile(r'([A-Za-z]+)=(?:"([^"]*)"|([^\s"]*))(?=\s|$)\s*')


def parse(text: str, place: str) -> dict[str, list[str]]:
    """Return the nodes of each leaf switch or block of a topology file. Raises MembershipError;
    `place` is the name of the file in its lines.
    """
    errors: list[str] = []
    found: dict[str, list[str]] = {}
    left = _MAX_LINKS
    for number, line in _logical_lines(text):
        try:
            fields = _fields(line)
            name = next((fields[key] for key in _NAMES if key in fields), "")
            if not fields.get("nodes"):
                continue
            if _SWITCH.fullmatch(name) is None:
                message = f"{quote(line)} has no valid SwitchName= or BlockName="
                raise HostlistError(message)  # noqa: TRY301 - reported like those of `expand`
            nodes = expand(fields["nodes"], min(left, MAX_NAMES))
        except HostlistError as error:
            errors.append(f"{place}:{number}: {error}")
            continue
        left -= len(nodes)
        found.setdefault(name, []).extend(nodes)
    if errors:
        raise MembershipError(errors)
    if not found:
        raise MembershipError([f"{place}: defines no switch"])
    return found


def leaves(switches: Mapping[str, Iterable[str]], names: Iterable[str]) -> dict[str, str]:
    """Return each name's leaf switch, "" if the topology does not know it.

    A node on several leaf switches, for example one for each rail, has the leaf `a+b`, which it
    shares with nodes on the same switches. If the member list has `gpu1.example.org` and the
    topology `gpu1`, or the reverse, the first label decides, provided that it is unique.
    """
    homes: dict[str, set[str]] = {}
    for switch, nodes in switches.items():
        for node in nodes:
            homes.setdefault(node, set()).add(switch)
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


def _fields(line: str) -> dict[str, str]:
    """Return a line's fields by lower-case key; HostlistError if it is no list of KEY=VALUE."""
    fields: dict[str, str] = {}
    position = 0
    while position < len(line):
        match = _FIELD.match(line, position)
        if match is None:
            raise HostlistError(f"{quote(line[position:])} is not KEY=VALUE")
        key = match[1].lower()
        if key in fields:
            raise HostlistError(f"{quote(line)} has {match[1]} twice")
        fields[key] = match[2] if match[2] is not None else match[3]
        position = match.end()
    return fields
