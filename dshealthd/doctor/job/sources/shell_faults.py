"""What a shell does otherwise than a script means: names, brackets, exit statuses, loops."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.doctor.job.sources import expansion, launcher_command, programs, shell
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dshealthd.doctor.job.sources.shell import ShellCommand

_ERREXIT = re.compile(r"#!.*\s-[a-z]*e")
_SAYS = frozenset({"echo", "printf", "date"})
_WHILE_READ = re.compile(
    r"\bwhile\s+(?:\w+=\S*\s+)?read\b(?![^\n]*(?:-u|<&))[^\n]*\n"
    r"(?P<body>(?:(?!\bdone\b).)*)\bdone\b",
    re.DOTALL,
)
_TAKES_INPUT = re.compile(
    r"^[ \t]*(?P<program>ssh|srun)\b(?P<rest>(?:[^\n\\]|\\.)*)$", re.MULTILINE | re.DOTALL
)
_FED = re.compile(r"(?:^|\s)-[a-zA-Z]*[nf]\b|/dev/null|&\s*$|<<|--input")
_SETS = re.compile(r"^[ \t]*(?:export[ \t]+|local[ \t]+)?([A-Za-z]\w{3,})=", re.MULTILINE)
_INITIALIZES = re.compile(r"(?:^|[;&|\s])(?:source|\.|eval|module|ml)\s|\bBASH_ENV\b", re.MULTILINE)
_ACTIVATES = re.compile(r"activate\b|conda|mamba|profile|bashrc|modules?\b|lmod|ssh-agent")
"""In what makes programs available, and sets nothing of the job's."""
_COMPUTES = re.compile(
    r"^[ \t]*(?:(?:export|declare|typeset|local)[ \t]+(?:-\w+[ \t]+)*[\"']?\$"
    rf"|eval[ \t]+[\"']?\$\((?![^\n]*(?:{_ACTIVATES.pattern})))",
    re.MULTILINE,
)
"""What sets variables whose names only the shell knows."""
_OF_SHELL = frozenset({"HOSTNAME", "RANDOM", "BASHPID", "HOME", "USER", "PATH", "PWD"})
MAX_NAMES = 128
"""Names that are compared with each other; scripts of people have some 50."""


class ScriptFault(NamedTuple):
    """Something that a script states in vain."""

    text: str
    """What people read behind the name of the script."""
    component: str
    at: str = ""
    """What the line has in which it stands."""
    is_critical: bool = True


def faults(text: str, seen: Sequence[ShellCommand]) -> Iterator[ScriptFault]:
    """Yield what a shell does otherwise than a script means."""
    lines = shell.without_comments(text)
    yield from _words(seen)
    yield from _statuses(text, seen)
    for loop in _WHILE_READ.finditer(lines):
        for one in _TAKES_INPUT.finditer(loop["body"]):
            if not _FED.search(one["rest"]):
                program = one["program"]
                option = "-n" if program == "ssh" else "--input=none"
                yield ScriptFault(
                    f": {program} in a loop of `read` takes the other lines of its input: only the"
                    f" first is served without {program} {option}",
                    *(program, program),
                )
    for command in seen:
        is_waited = command.in_loop and command.end not in {"&", ""}
        is_waited = is_waited and command.words[0] in {"ssh", "srun"}
        found = launcher_command.parse(command.words, {}) if is_waited else None
        inner = found.find("torchrun") if found else None
        if found is None or inner is None:
            continue
        is_one = command.words[0] == "ssh" or found.options.get("nodes") == "1"
        ends = command.words[-1].rstrip().endswith("&") or "-f" in command.words
        nodes = inner.options.get("nnodes", "1")
        # of a number that only the shell knows, a host and a rank for each pass say it is several
        has_host = command.words[0] == "ssh" or "$" in found.options.get("nodelist", "")
        is_ranked = "$" in nodes and "node-rank" in inner.options and has_host
        if is_one and not ends and (is_ranked or (natural(nodes) or 1) > 1):
            yield ScriptFault(
                ": the loop waits for each node's torchrun, which waits for the other nodes: & is"
                " missing behind it, and `wait` behind the loop",
                *("&", command.words[0]),
            )
    yield from _inactive(text, seen)
    read = set() if may_set_more(lines, seen) else {*shell.READ.findall(lines)}
    is_set = {*_SETS.findall(lines)}
    known = sorted(read)[:MAX_NAMES]
    for name in sorted(is_set - read)[:MAX_NAMES]:
        other, is_near = launcher_command.nearest(name, known)
        if is_near and not re.search(rf"(?<![$\w{{]){other}\b", lines):
            is_renamed = re.search(rf"\b{name}=[^\n]*\$\{{?{other}\b", lines)
            if not is_renamed and not expansion.GIVEN.match(other) and other not in _OF_SHELL:
                yield ScriptFault(
                    f" sets {name}, which nothing reads, and reads {other}, which nothing sets",
                    *(other, other),
                )


def may_set_more(lines: str, seen: Sequence[ShellCommand]) -> bool:
    """Return whether a script may set or trap more than it says: by a file that cannot be read
    here, or under names that it computes.
    """
    unread = (" ".join(one.words[1:]) for one in seen if one.words[0] in {"source", "."})
    return any(not _ACTIVATES.search(one) for one in unread) or bool(_COMPUTES.search(lines))


def _words(seen: Sequence[ShellCommand]) -> Iterator[ScriptFault]:
    for one in seen:
        first, *rest = one.words
        if first in shell.DECLARES or (first.isidentifier() and rest[:1] == ["="]):
            name = first if rest[:1] == ["="] else rest[rest.index("=") - 1]
            yield ScriptFault(
                f": {name} is not set: a shell allows no blanks around the = of an assignment",
                *(name, f"{name} *="),
            )
        if first.startswith("[") and first not in {"[", "[["}:
            yield ScriptFault(
                f": {first[:40]} is no command: [ takes a blank behind it", *("[", first[:2])
            )


def _statuses(text: str, seen: Sequence[ShellCommand]) -> Iterator[ScriptFault]:
    """Yield a status that is read where it is never another."""
    is_strict, has_pipefail, is_trapped = bool(_ERREXIT.match(text)), False, False
    last: list[ShellCommand] = []
    for one in seen:
        program = os.path.basename(one.words[0])
        if program == "set":
            switches = {word[:1] + letter for word in one.words[1:] for letter in word[1:]}
            is_strict = (is_strict or "-e" in switches) and "+e" not in switches
            has_pipefail = has_pipefail or "pipefail" in one.words
        is_trapped = is_trapped or (program == "trap" and bool({"EXIT", "ERR"} & {*one.words}))
        reads = program in {"[", "[[", "test", "exit"} and "$?" in one.words and last
        if program in _SAYS:
            continue  # the status may be kept before
        launch = os.path.basename(last[0].words[0]) if reads else ""
        if reads and last[1:] and not has_pipefail:
            yield ScriptFault(
                f": $? is the status of tee, not of {launch}: `set -o pipefail` is missing, or"
                " ${PIPESTATUS[0]}",
                *("$?", "$?"),
            )
        elif (
            reads and program != "exit" and is_strict and not (is_trapped or last[0].is_conditional)
        ):
            yield ScriptFault(
                f": `set -e` ends the script where {launch} fails, so that what reads its status"
                " then never runs",
                *("set -e", "$?"),
                is_critical=False,
            )
        is_launch = (
            program == "wait" or programs.runs_programs(program) or program in programs.CALLED
        )
        if is_launch and one.end in {"\n", ";", "|"}:
            last = [one]
        else:
            last = [*last, one] if last and last[-1].end == "|" and program == "tee" else []


def _inactive(text: str, seen: Sequence[ShellCommand]) -> Iterator[ScriptFault]:
    """Yield an environment of conda that a shell without its functions cannot activate."""
    at = next((at for at, one in enumerate(seen) if one.words[:2] == ("conda", "activate")), None)
    is_login = re.match(r"#!.*\s-\w*[li]", text)
    if (
        at is not None
        and not is_login
        and not _INITIALIZES.search(shell.without_comments(text).partition("conda activ")[0])
    ):
        yield ScriptFault(
            ": conda activate fails in a shell that has not read conda's functions: source"
            " .../etc/profile.d/conda.sh before it, or #!/bin/bash -l",
            *("conda activate", "conda activate"),
            is_critical=False,
        )
