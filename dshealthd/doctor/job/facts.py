"""What the rules of `rules` are read against: settings, and what a job starts."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.job.rules import JobRule, broken
from dshealthd.doctor.job.rules_of_programs import OF_PROGRAMS, OF_SETTINGS
from dshealthd.doctor.job.sources.expansion import PER_NODE
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.job.sources.slurm_options import seconds
from dshealthd.doctor.job.start import Invariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dshealthd.doctor.job.rules import Values
    from dshealthd.doctor.job.start import Start

_ALIKE = {"podman": "docker", "singularity": "apptainer"}
"""Programs that take the options of another."""
_OPTIONS = re.compile(r"(?i)(args?|opts?|options|flags|params)\}?$|[@*]\]?\}?$")
"""Ends a variable that holds options, also behind one that may have a value."""


def fields(given: ManifestFields) -> Values:
    """Return the values of a mapping's fields, by their dotted path."""

    def values(key: str) -> Sequence[str]:
        found: list[Any] = [given.value]
        for step in key.split("."):
            inside = (one.get(step) for one in found if isinstance(one, dict))
            found = [one for some in inside for one in (some if isinstance(some, list) else [some])]
        return [_text(one) for one in found if one is not None]

    return values


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _programs(start: Start, subject: str) -> list[Mapping[str, Sequence[str]]]:
    """Return the options of each call of a program."""
    if subject == "sbatch":
        asked = {name: [value] for name, value in start.requested.items()}
        return [{**asked, "program": [""]}] if asked else []
    if subject == "job":
        nodes, processes = start.nodes or start.layout.nodes, start.layout.ranks_per_node
        counts = {"nodes": nodes, "processes": processes, "gpus": start.gpus_requested}
        if limit := seconds(start.requested.get("time", "")):
            counts["minutes"] = limit // 60
        return [{name: [str(count or 0)] for name, count in counts.items()}]
    if subject == "training":
        stated = {name.replace("_", "-"): [value] for name, value in start.program.stated.items()}
        more = {"open": [""]} if _may_hold_options(start.program.arguments) else {}
        return [{**stated, **more}]
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
            found.append({**options, "arguments": one.arguments[:1], "program": [""], **more})
    return [
        *found,
        *(one.options for one in start.calls if _ALIKE.get(one.program, one.program) == subject),
    ]


def _may_hold_options(words: Sequence[str]) -> bool:
    """Return whether a variable among arguments, which is no value of an option, may hold more."""
    return any(
        word.startswith("$") and (before[:1] != "-" or _OPTIONS.search(word))
        for before, word in itertools.pairwise(["", *words])
    )


def _said(rule: JobRule, start: Start) -> Iterator[str]:
    for options in _programs(start, rule.subject):

        def values(key: str, own: Mapping[str, Sequence[str]] = options) -> Sequence[str]:
            if key.startswith("$"):
                found = start.variables.get(key[1:])
                one = re.fullmatch(r"\$\{?(\w+)\}?", found or "")
                known = one[1] if one and one[1] in PER_NODE else found  # another on each, not open
                return [] if known is None else [known]
            program, colon, name = key.partition(":")
            if program == "config":
                return fields(ManifestFields(start.config))(name)
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
