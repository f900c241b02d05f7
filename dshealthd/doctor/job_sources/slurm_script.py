"""A Slurm batch script: its `#SBATCH` lines, the variables it sets, and the launcher it calls.

Nothing is run. Lines are read in order, ignoring branches and loops; the last assignment before the
launcher counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.job_sources import launcher_command
from dshealthd.doctor.job_sources.launcher_command import LauncherCommand
from dshealthd.jobs.environment import MAX_VALUE, natural

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 1 << 18
"""Maximum bytes; Slurm accepts 4 MiB (max_script_size), but scripts by people have a few KiB."""
MAX_STATEMENT = 200
"""Maximum lines of one command with continuations or an open quote."""
_NAMES = launcher_command.short_options(
    "N=nodes n=ntasks G=gpus c=cpus-per-task w=nodelist p=partition J=job-name t=time A=account"
    " q=qos"
)
_GPUS = re.compile(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class SlurmScript:
    """What a batch script requests and starts."""

    directives: Mapping[str, str]
    """Options in its `#SBATCH` lines, by long name."""
    ignored: tuple[int, ...]
    """Lines with `#SBATCH` after the first command, which Slurm ignores."""
    exports: Mapping[str, str]
    """Variables set before the launcher, if their values are known without a shell."""
    command: LauncherCommand | None
    problem: str = ""
    """The first line that could not be parsed, and why; it may hide the launcher."""

    def number(self, name: str) -> int | None:
        """Return the number in an `#SBATCH` directive; None if there is none."""
        return natural(self.directives.get(name))

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs per node that the Slurm job requests; None if it does not say."""
        return gpus_per_node(self.directives)


def gpus_per_node(options: Mapping[str, str]) -> int | None:
    """Return the GPUs requested by Slurm's `--gpus-per-node` or `--gres`; None without them."""
    if (text := options.get("gpus-per-node")) is not None:
        return natural(text.rpartition(":")[2])
    for entry in options.get("gres", "").split(","):
        if match := _GPUS.fullmatch(entry):
            return natural(match[1] or "1")
    return None


def parse(text: str) -> SlurmScript:
    """Parse a Slurm script; ValueError if it is not a script."""
    if not text.startswith("#!"):
        message = "is not a batch script: it does not begin with #!"
        raise ValueError(message)
    directives: dict[str, str] = {}
    ignored: list[int] = []
    variables: dict[str, str] = {}
    command, problem, in_head = None, "", True
    for number, line in _statements(text):
        if line.startswith("#SBATCH"):
            if in_head:
                directives |= _directives(line)
            else:
                ignored.append(number)
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if in_head:
            in_head = False
            variables |= _slurm_variables(directives)
        if command is not None:
            continue
        try:
            command = _statement(line, variables)
        except ValueError as error:
            problem = problem or f"line {number}: {error}"
    exports = {name: value for name, value in variables.items() if "$" not in value}
    return SlurmScript(directives, tuple(ignored), exports, command, problem)


def _statement(line: str, variables: dict[str, str]) -> LauncherCommand | None:
    """Apply the assignments in a line to `variables`, and return the launcher that it calls."""
    for words in launcher_command.commands(
        launcher_command.words(launcher_command.expand(line, variables))
    ):
        names = words[1:] if words[:1] in (["export"], ["declare"], ["readonly"]) else words
        pairs = [word.partition("=") for word in names]
        if names and all(equals and name.isidentifier() for name, equals, _ in pairs):
            for name, _, value in pairs:
                if len(value) <= MAX_VALUE:
                    # only a shell can evaluate `$` and `` ` ``
                    known = "$" not in value and "`" not in value
                    variables[name] = value if known else f"${{{name}}}"
        elif (found := launcher_command.launcher(words, variables)) is not None:
            return found
    return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line number and the text of each statement in a batch script."""
    pending, start = "", 0
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not pending:
            start = number
        pending += line
        if number - start < MAX_STATEMENT and number < len(lines):
            if pending.endswith("\\") and not pending.startswith("#"):
                pending = pending[:-1]
                continue
            if _is_open(pending):
                pending += "\n"
                continue
        yield start, pending
        pending = ""


def _is_open(text: str) -> bool:
    """Tell whether a quote continues on the next line."""
    if text.startswith("#") or ("'" not in text and '"' not in text):
        return False
    try:
        launcher_command.words(text)
    except ValueError:
        return True
    return False


def _directives(line: str) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError:
        return found
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and len(word) > 1:
            name, value = _NAMES.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
        else:
            continue
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        found[name] = value
    return found


def _slurm_variables(directives: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Slurm sets for a job with these directives."""
    nodes = natural(directives.get("nodes", "1"))
    per_node = natural(directives.get("ntasks-per-node"))
    tasks = natural(directives.get("ntasks"))
    if tasks is None and nodes is not None:
        tasks = nodes * (per_node or 1)
    gpus = gpus_per_node(directives)
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": gpus if "gpus-per-node" in directives else None,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def as_json(script: SlurmScript) -> dict[str, Any]:
    """Return a Slurm script as JSON."""
    return {
        "directives": dict(script.directives),
        "ignored": list(script.ignored),
        "exports": dict(script.exports),
        "command": launcher_command.as_json(script.command),
        "problem": script.problem,
    }


def from_json(document: Mapping[str, Any]) -> SlurmScript:
    """Return the Slurm script in a JSON document."""
    return SlurmScript(
        document["directives"],
        tuple(document["ignored"]),
        document["exports"],
        launcher_command.from_json(document["command"]),
        document["problem"],
    )
