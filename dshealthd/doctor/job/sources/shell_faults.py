"""What a shell does otherwise than a script means, and ranks depend on: loops, exit statuses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.doctor.job.sources import launcher_command, programs, shell
from dshealthd.jobs.environment import is_loopback, natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
    from dshealthd.doctor.job.sources.shell import ShellCommand

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
    yield from _statuses(seen)
    yield from _apart(seen)
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


def _apart(seen: Sequence[ShellCommand]) -> Iterator[ScriptFault]:
    """Yield why nodes do not meet of which each has a command of its own, with its rank."""
    ranks: dict[int, LauncherCommand] = {}
    is_whole = True
    for one in seen:
        found = launcher_command.parse(one.words, {})
        inner = found.find("torchrun") if found else None
        if inner is None:
            program = os.path.basename(one.words[0])
            starts = program in {"srun", *programs.ELSEWHERE} or programs.runs_shell(one.words)
            is_whole = is_whole and not starts and not programs.is_file(one.words[0])
            continue
        rank, is_sure = inner.number("node-rank"), not (one.in_loop or one.is_conditional)
        if not is_sure or rank is None or rank in ranks or (inner.number("nnodes") or 1) == 1:
            return  # another one, or as many as only its shell knows
        ranks[rank] = inner
    for name in ("nnodes", "master-port", "master-addr", "rdzv-id", "rdzv-backend"):
        texts = {inner.options.get(name, "") for inner in ranks.values()}
        known = sorted(text for text in texts if text and "$" not in text)
        if len(known) > 1 and not any(map(is_loopback, known)):
            yield ScriptFault(
                f": --{name} is {' here but '.join(known)[:80]} there: nodes of one launch never"
                " meet",
                *(f"--{name}", "torchrun"),
            )
            return
    nodes = max((inner.number("nnodes") or 1 for inner in ranks.values()), default=1)
    if is_whole and 1 < len(ranks) < nodes:
        yield ScriptFault(
            f": torchrun waits for {nodes} nodes, but the script starts it on {len(ranks)}",
            *("--nnodes", "torchrun"),
        )


def _statuses(seen: Sequence[ShellCommand]) -> Iterator[ScriptFault]:
    """Yield the status of a `tee` in place of the launch's: what fails looks complete."""
    has_pipefail = False
    last: list[ShellCommand] = []
    for one in seen:
        program = os.path.basename(one.words[0])
        has_pipefail = has_pipefail or (program == "set" and "pipefail" in one.words)
        if program in _SAYS:
            continue  # the status may be kept before
        reads = program in {"[", "[[", "test", "exit"} and "$?" in one.words
        if reads and last[1:] and not has_pipefail:
            launch = os.path.basename(last[0].words[0])
            yield ScriptFault(
                f": $? is the status of tee, not of {launch}: `set -o pipefail` is missing, or"
                " ${PIPESTATUS[0]}",
                *("$?", "$?"),
            )
        is_launch = programs.runs_programs(program) or program in programs.CALLED
        if is_launch and one.end == "|":
            last = [one]
        else:
            last = [*last, one] if last and last[-1].end == "|" and program == "tee" else []
