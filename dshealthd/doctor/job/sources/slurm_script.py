"""A Slurm batch script: its `#SBATCH` lines, the variables it sets, and the launcher it calls.

Nothing is run: `shell` says what a shell would do.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.job.sources import launcher_command, shell
from dshealthd.doctor.job.sources.launcher_command import (
    ONLY_WITH,
    SHORT,
    LauncherCommand,
    long_option,
    no_file,
)
from dshealthd.doctor.job.sources.source import training_variables
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 1 << 18
"""Maximum bytes; Slurm accepts 4 MiB (max_script_size), but scripts by people have a few KiB."""
ALLOCATION = {
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_JOB_NODELIST": "nodelist",
}
"""Variables that Slurm sets in the script of a job, by what the job requested."""
_DEFAULTED = re.compile(r"\$\{(\w+):?-")
_SAYS = frozenset({"echo", "printf", "date", "true", "exit"})
"""Commands that end at once."""
_EXPORT = re.compile(r"\b(?:export|(?:declare|typeset)\s+-\w*x\w*)\b([^\n]*)")
_MEMORY = re.compile(r"(\d{1,12})([KMGTkmgt]?)B?")
_EARLY = re.compile(
    r"^[ \t]*cat\b(?=[^\n]*>[ \t]*[^&\s])[^\n]*<<-?[ \t]*(\w+)\b[^\n]*\n"
    r"((?:(?!\t*\1$)[^\n]*\n)*?[^\n]*(?<!\\)\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b)",
    re.MULTILINE,
)
"""A here-document without quotes that becomes a file and has a variable without a backslash."""
_OF_MPI = {
    "OMPI_COMM_WORLD_RANK": "SLURM_PROCID",
    "OMPI_COMM_WORLD_LOCAL_RANK": "SLURM_LOCALID",
    "OMPI_COMM_WORLD_SIZE": "SLURM_NTASKS",
}
"""Variables that mpirun sets, and those that srun sets in their place."""
_NAMED = re.compile(r"(?<![\\$])\$\{?([A-Za-z]\w*(?<!_)_|SLURM_\w+)\b(?!:|-|\+|\?)")
_GPUS = re.compile(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class SlurmScript:
    """What a batch script requests and starts."""

    directives: Mapping[str, str]
    """Options in its `#SBATCH` lines, by long name."""
    ignored: Sequence[int]
    """Lines with `#SBATCH` after the first command, which Slurm ignores."""
    exports: Mapping[str, str]
    """Variables set before the launcher; a `$` stands in what only a shell can compute."""
    command: LauncherCommand | None
    problem: str = ""
    """Why the launcher is not known, if the script could not be parsed or it depends on
    conditions."""
    carried: Mapping[str, bool] = field(default_factory=dict)
    """Variables of training that it sets for other programs, as it does not read them itself, and
    whether it exports them.
    """
    traps: Sequence[str] = ()
    """Signals for which its shell has a trap, as written."""
    waits: bool = False
    """Whether its shell waits for the job in such a way that traps run while the job does."""
    is_left: bool = False
    """Whether it starts the job in the background, and ends."""
    requeues: str = ""
    """The command of a trap, or a function, that requeues the job."""
    orphan: str = ""
    """An option that begins a line of its own, where a shell takes it for a command."""
    strange: Sequence[str] = ()
    """Options that sbatch does not have."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Variables that it reads and Slurm does not set, with the option that would."""
    refused: str = ""
    """Why sbatch does not take it for a script."""
    early: str = ""
    """A variable of each task that it expands itself, once, in a file that it writes."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Variables that it reads, but are never set, with those that are meant."""


def requested(
    command: LauncherCommand | None, script: SlurmScript | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return what a job requests of Slurm: its directives, overridden by the options of srun.

    Without a script, inside the job, Slurm's variables say what it was given.
    """
    outer = command.find("srun") if command else None
    found = (
        script.directives
        if script
        else {option: variables[name] for name, option in ALLOCATION.items() if name in variables}
    )
    tasks, each = natural(found.get("ntasks")), natural(found.get("ntasks-per-node"))
    if tasks and each and tasks % each == 0:
        found = {"nodes": str(tasks // each), **found}
    return {**found, **(outer.options if outer else {})}


def tasks_per_node(options: Mapping[str, str]) -> int | None:
    """Return the tasks that Slurm starts on the node with the most; None without a number."""
    tasks, nodes = natural(options.get("ntasks")), natural(options.get("nodes"))
    given = natural(options.get("ntasks-per-node"))
    if tasks is not None and nodes and (given is None or tasks != nodes * given):
        # with --ntasks, --ntasks-per-node is only a maximum (srun(1))
        tasks = -(-tasks // nodes)
        return tasks if given is None else min(tasks, given)
    return given


def gpus_per_node(options: Mapping[str, str]) -> int | None:
    """Return the GPUs that Slurm gives a job on each node; None without a request.

    These are `--gpus-per-node`, `--gres`, `--gpus-per-task` and `--gpus` (sbatch(1)).
    """
    if (text := options.get("gpus-per-node")) is not None:
        return natural(text.rpartition(":")[2])
    for entry in options.get("gres", "").split(","):
        if match := _GPUS.fullmatch(entry):
            return natural(match[1] or "1")
    if (text := options.get("gpus-per-task")) is not None:
        each, tasks = natural(text.rpartition(":")[2]), tasks_per_node(options)
        return None if each is None or tasks is None else each * tasks
    total = natural(options.get("gpus", "").rpartition(":")[2])
    nodes = natural(options.get("nodes"))
    return total // nodes if total and nodes and total % nodes == 0 else None


def memory(options: Mapping[str, str]) -> int | None:
    """Return the bytes of memory that Slurm gives a job on each node; None for all, or unknown."""
    per_cpu = (natural(options.get("cpus-per-task", "1")) or 0) * (tasks_per_node(options) or 0)
    shares = {"mem": 1, "mem-per-gpu": gpus_per_node(options) or 0, "mem-per-cpu": per_cpu}
    for name, count in shares.items():
        if match := _MEMORY.fullmatch(options.get(name, "")):
            unit = 1 << 10 * " KMGT".index((match[2] or "M").upper())
            return int(match[1]) * unit * count or None
    return None


def parse(
    text: str, environment: Mapping[str, str] = {}, read: launcher_command.Read = no_file
) -> SlurmScript:
    """Parse a Slurm script that gets this environment; ValueError if it is not a script.

    `read` returns the text of a file that it runs; empty where there is none.
    """
    refused = ""
    if "\n#SBATCH" in text and "\r\n" in text:
        refused = "contains lines that end with CR LF"
    elif "\n#SBATCH" in text and not text.startswith("#!"):
        refused = "does not begin with #!"
    text = text.replace("\r\n", "\n")
    if not text.startswith("#!") and not refused:
        message = "is not a batch script: it does not begin with #!"
        raise ValueError(message)
    directives: dict[str, str] = {}
    ignored: list[int] = []
    in_head = True
    for number, line in enumerate(shell.without_documents(text).splitlines(), 1):
        if line.startswith("#SBATCH"):
            if in_head:
                directives |= _directives(line)
            else:
                ignored.append(number)
        elif line.strip() and not line.lstrip().startswith("#"):
            in_head = False
    defaulted = {name for name in _DEFAULTED.findall(text) if name in environment}
    # What is no number may be a secret.
    variables = {
        name: environment[name] if natural(environment[name]) else "$_" for name in defaulted
    }
    variables |= _slurm_variables(directives)
    given = frozenset(variables)
    traps: list[str] = []
    calls: list[str] = []
    ended = [0]
    orphans: list[str] = []

    def watched() -> Iterator[shell.ShellCommand]:
        for command in _continued(shell.commands(text, variables), orphans):
            calls.append(command.words[0])
            if command.end == "&":
                ended[0] = len(calls)
            if command.words[0] == "trap":
                traps.extend(command.words[2:])
            yield command

    launch = launcher_command.find_launch(watched(), variables, read=read)
    joined = text.replace("\\\n", " ")
    exported = {name for words in _EXPORT.findall(joined) for name in re.findall(r"\w+", words)}
    carried = {
        name: name in exported or "set -a" in text
        for name in training_variables(launch.variables)
        if name.isidentifier() and name not in given and not re.search(rf"\$\{{?{name}\b", text)
    }
    is_left = launch.is_background and "wait" not in calls and not {*calls[ended[0] :]} - _SAYS
    return SlurmScript(
        directives,
        tuple(ignored),
        launch.variables,
        launch.command,
        launch.problem,
        carried,
        tuple(traps),
        "wait" in calls or (launch.is_background and not is_left),
        is_left,
        "".join(re.findall("scontrol requeue[^\n;]*", text)[:1]) if traps else "",
        "".join(orphans[:1]),
        launcher_command.strange_options(directives, "srun"),
        {name: one for name, one in unset(directives).items() if re.search(rf"\b{name}\b", text)},
        refused,
        next((match[3] for match in _EARLY.finditer(text)), ""),
        _unread(text),
    )


def _unread(text: str) -> dict[str, str]:
    """Return variables that a script reads but are never set, with those that are meant: a shell
    takes each letter, digit and underscore behind a `$` for the name.
    """
    found: dict[str, str] = {}
    lines = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    for name in dict.fromkeys(_NAMED.findall(lines)):
        if name in launcher_command.OF_SLURM:
            continue
        if re.search(rf"(?<![$\w{{]){name}\b", lines):
            continue  # set, or named in another way
        meant = max(
            (one for one in launcher_command.OF_SLURM if name.startswith(f"{one}_")),
            key=len,
            default="",
        )
        near, is_near = launcher_command.nearest(name, launcher_command.OF_SLURM)
        if name.endswith("_") or meant:
            found[name] = meant or name.rstrip("_")
        elif name.startswith("SLURM_") and is_near:
            found[name] = near
    if "srun" in lines and not re.search("mpirun|mpiexec|orterun|prterun", lines):
        read = set(re.findall(r"\$\{?(OMPI_COMM_WORLD_\w+)(?!:)\b", lines))
        found |= {name: one for name, one in _OF_MPI.items() if name in read}
    return found


def _continued(
    commands: Iterator[shell.ShellCommand], orphans: list[str]
) -> Iterator[shell.ShellCommand]:
    """Yield commands, each with options that were meant for it but stand in a line of their own,
    which `orphans` gets.
    """
    last = None
    try:
        for command in commands:
            is_line = last is not None and last.end == command.end == "\n"  # no pattern of `case`
            if last is not None and is_line and command.words[0].startswith("-"):
                orphans.append(command.words[0])
                last = last._replace(words=(*last.words, *command.words))
                continue
            if last is not None:
                yield last
            last = command
    finally:  # also before what cannot be parsed
        if last is not None:
            yield last


def _directives(line: str) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except (ValueError, ArithmeticError):
        return found
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = long_option(name, "srun")
        elif word.startswith("-") and len(word) > 1:
            name, value = SHORT["srun"].get(word[1], word[1]), word[2:]
            equals = value
        else:
            continue
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        found[name] = value
    return found


def _slurm_variables(directives: Mapping[str, str]) -> shell.Variables:
    """Return the variables that Slurm sets for a job with these directives.

    The batch shell runs once, as task 0 of the first node, whose name is not known.
    """
    found: shell.Variables = {
        name: "0" if name.startswith("SLURM_") else "$_"
        for name in shell.PER_NODE
        if directives or not name.startswith("SLURM")
    }
    if not directives:
        return found
    found |= {
        name: directives[option] for name, option in ALLOCATION.items() if option in directives
    }
    if gpus := gpus_per_node(directives):
        found["SLURM_GPUS_ON_NODE"] = str(gpus)
    nodes, each = natural(directives.get("nodes")), natural(directives.get("ntasks-per-node"))
    if "ntasks" not in directives and nodes and each:
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(nodes * each)
    if "nodes" in directives or "ntasks" not in directives:
        found["SLURM_JOB_NUM_NODES"] = found["SLURM_NNODES"] = directives.get("nodes", "1")
    if nodes and (tasks := tasks_per_node(directives)):
        found["SLURM_TASKS_PER_NODE"] = f"{tasks}(x{nodes})" if nodes > 1 else str(tasks)
    given = {name: directives.get(option) for name, option in ONLY_WITH.items()}
    found |= {name: value for name, value in given.items() if value is not None}
    return found | dict.fromkeys((*shell.OF_STEP, *unset(directives)), "")


def unset(directives: Mapping[str, str]) -> dict[str, str]:
    """Return variables that Slurm does not set, because the job asks for such a thing with another
    option, each with the option that would set it.
    """
    asked = {option.partition("-")[0] for option in directives}
    asked |= {"gpus"} if gpus_per_node(directives) else set()
    return {
        name: option
        for name, option in ONLY_WITH.items()
        if option not in directives and option.partition("-")[0] in asked
    }


def from_json(document: dict[str, Any]) -> SlurmScript:
    """Return the Slurm script whose fields a JSON document has."""
    command = launcher_command.from_json(document["command"])
    return SlurmScript(**document | {"command": command})
