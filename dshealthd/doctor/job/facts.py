"""What the rules of programs are read against: what a job starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from dshealthd.doctor.job.rules import JobRule, broken
from dshealthd.doctor.job.rules_of_programs import OF_PROGRAMS, OF_SETTINGS
from dshealthd.doctor.job.sources.expansion import PER_NODE
from dshealthd.doctor.job.start import Invariant, Start

_ALIKE = {"podman": "docker", "singularity": "apptainer"}
"""Programs that take the options of another."""


def _programs(start: Start, subject: str) -> list[Mapping[str, Sequence[str]]]:
    """Return the options of each call of a program."""
    if subject == "sbatch":
        asked = {name: [value] for name, value in start.requested.items()}
        return [asked] if asked else []
    if subject == "job":
        nodes, processes = start.nodes or start.layout.nodes, start.layout.ranks_per_node
        counts = {"nodes": nodes, "processes": processes, "gpus": start.gpus_requested}
        return [{name: [str(count or 0)] for name, count in counts.items()}]
    if subject == "script":
        return [{"text": [start.script]}] if start.script else []
    if subject == "environment":
        return [{"names": [" ".join(start.variables)]}]
    found: list[Mapping[str, Sequence[str]]] = []
    for one in start.chain:
        if subject == ("accelerate" if one.by_accelerate else one.program):
            outer = start.requested if subject == "srun" else {}  # which holds for steps, too
            options = {name: [value] for name, value in {**outer, **one.options}.items()}
            begin = "".join(one.arguments[:1])
            is_open = begin.startswith("$") or (subject == "srun" and one.is_partial)
            more = {"open": [""]} if is_open else {}
            found.append({**options, "program": [""], **more})
    return [
        *found,
        *(one.options for one in start.calls if _ALIKE.get(one.program, one.program) == subject),
    ]


def _said(rule: JobRule, start: Start) -> Iterator[str]:
    for options in _programs(start, rule.subject):

        def values(key: str, own: Mapping[str, Sequence[str]] = options) -> Sequence[str]:
            if key.startswith("$"):
                found = start.variables.get(key[1:])
                one = re.fullmatch(r"\$\{?(\w+)\}?", found or "")
                known = one[1] if one and one[1] in PER_NODE else found  # another on each, not open
                return [] if known is None else [known]
            program, colon, name = key.partition(":")
            for other in _programs(start, program) if colon else ():
                return other.get(name, ())
            return () if colon else own.get(key, ())

        if text := broken(rule, values):
            yield text


RULES = tuple(
    Invariant(partial(_said, rule), rule.subject, rule.source, make=rule.make)
    for rule in (*OF_PROGRAMS, *OF_SETTINGS)
)
"""The rules of programs, as what a start must agree with."""
