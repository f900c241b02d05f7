"""What a batch script states, and Slurm does not do."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources import launcher_command, programs, shell, steps
from dshealthd.doctor.job.sources.shell_faults import ScriptFault
from dshealthd.doctor.job.sources.slurm_options import gpus_per_node, seconds, tasks_per_node
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.launcher_command import CommandLaunch
    from dshealthd.doctor.job.sources.shell import ShellCommand

_SAYS = frozenset({"echo", "printf", "date", "true", "exit"})
"""Commands that end at once."""
_SIGNAL = re.compile(r"(?:([RB]+):)?(\w+)(?:@(\d+))?")
_NAMED = re.compile(r"(?<![\\$])\$\{?([A-Za-z]\w*(?<!_)_|SLURM_\w+)\b(?!:|-|\+|\?)")
_GROUP = re.compile(r"_HET_GROUP_\d+$")
"""Ends the variables of one component of a heterogeneous job."""
_OF_STEPS = ("SLURM_OVERLAP", "SLURM_STEP_GRES")
"""Variables that set options of steps (srun(1), INPUT ENVIRONMENT VARIABLES)."""
_OF_MPI = {
    "OMPI_COMM_WORLD_RANK": "SLURM_PROCID",
    "OMPI_COMM_WORLD_LOCAL_RANK": "SLURM_LOCALID",
    "OMPI_COMM_WORLD_SIZE": "SLURM_NTASKS",
}
"""Variables that mpirun sets, and those that srun sets in their place."""
_NEW = re.compile(r"\$\{?(TIME_OF_START|RANDOM|BASHPID|EPOCHSECONDS|SLURM_RESTART_COUNT)\b")
"""What is another each time that a script starts."""
_RESUMES = re.compile(r"resume|restore|(?:^|_)load(?:$|_)")
_NEVER = frozenset({"false", "none", "no", "never", "0"})
_EXEC = re.compile(r"^[ \t]*exec[ \t]+[^<>\d\s]", re.MULTILINE)
"""What takes the place of the shell."""
_ACTIVATES = re.compile(r"activate\b|conda|mamba|profile|bashrc|modules?\b|lmod|ssh-agent")
"""In what makes programs available, and traps nothing."""
_COMPUTES = re.compile(
    rf"^[ \t]*eval[ \t]+[\"']?\$\((?![^\n]*(?:{_ACTIVATES.pattern}))", re.MULTILINE
)
"""What runs commands that only the shell knows."""
_STARTS = frozenset({"srun", "mpirun", "mpiexec", "ray", "sbatch"}) | programs.ELSEWHERE
_MPI = re.compile("mpirun|mpiexec|orterun|prterun")


def faults(
    text: str,
    components: Sequence[Mapping[str, str]],
    ignored: Sequence[int],
    seen: Sequence[ShellCommand],
    launch: CommandLaunch,
) -> Iterator[ScriptFault]:
    """Yield the faults of a script with these directives, those of each component of a
    heterogeneous job, whose shell runs these commands and this launch.
    """
    directives = components[0]  # the shell runs there
    if ignored:
        more = f", and {len(ignored) - 1} more" if ignored[1:] else ""
        why = "Slurm ignores #SBATCH after the first command"
        yield ScriptFault(f":{ignored[0]}{more}: {why}", "#SBATCH", "^#SBATCH", is_critical=False)
    for option, value in directives.items():
        if "$" in value:
            yield ScriptFault(
                f": #SBATCH --{option}={value[:60]} is read as it stands: no shell expands lines"
                " with #SBATCH",
                *(f"--{option}", f"^#SBATCH.*{option}"),
                is_critical=option in launcher_command.READ,
            )
    for read, meant in _unread(text).items():
        yield ScriptFault(
            f" reads {read}, which is never set: ${{{meant}}} is meant",
            *(read, read),
            is_critical=False,
        )
    for above, one in itertools.pairwise(seen):
        if above.end == "\n" and one.words[0].startswith("-"):
            yield ScriptFault(
                f": bash runs {one.words[0][:60]} as a command: the line before it ends without a"
                " backslash, or is a comment, so the launch has none of these options",
                *(one.words[0], one.words[0].partition("=")[0]),
            )
            break
    if not any(name in text or name in launch.variables for name in _OF_STEPS):
        is_known = bool(launch.command) and not launch.problem
        yield from steps.faults(components, seen, is_known=is_known)
    if once := _once(directives, seen, launch):
        yield ScriptFault(once, "srun", "python", is_critical=False)
    is_requeued = "requeue" in directives or any(
        {"scontrol", "requeue"} <= {*one.words} for one in seen
    )
    for option, path in _resumed(seen).items() if is_requeued else ():
        if _NEW.search(path) and ":-$" not in path:
            yield ScriptFault(
                f": --{option} is a new directory each time that the script starts, so that a job"
                " which is requeued begins anew: name it after $SLURM_JOB_ID, which stays",
                *(option, option.replace("_", "-")),
                is_critical=False,
            )
    names = [one.words[0] for one in seen]
    last = max((at for at, one in enumerate(seen, 1) if one.end == "&"), default=0)
    if launch.is_background and "wait" not in names and {*names[last:]} <= _SAYS:
        yield ScriptFault(
            " starts the job in the background and ends: Slurm then ends the job; `wait` is"
            " missing",
            *("wait", "&$"),
        )
        return
    traps = [word for one in seen if one.words[0] == "trap" for word in one.words[2:]]
    is_unread = not seen or bool(launch.problem)
    is_open = is_unread or _may_trap_more(text, seen) or bool(_EXEC.search(text))
    waits = "wait" in names or launch.is_background
    if problem := _signal(directives, traps, waits=waits, is_open=is_open):
        shown = f": --signal={directives['signal']}: {problem}"
        yield ScriptFault(shown, "--signal", "^#SBATCH.*--signal", is_critical=False)


def _resumed(seen: Sequence[ShellCommand]) -> dict[str, str]:
    """Return the folders from which a training resumes, by option: without one, where it saves."""
    given = dict(pair for one in seen for pair in launcher_command.pairs(one.words))
    told = {option: value for option, value in given.items() if _RESUMES.search(option)}
    if told and not any("/" in value or value.lower() in _NEVER for value in told.values()):
        told = dict(pair for one in seen for pair in launcher_command.outputs(one.words))
        told.pop("output", None)  # of srun: its log
    return {option: path for option, path in told.items() if "/" in path}


def _once(
    directives: Mapping[str, str], seen: Sequence[ShellCommand], launch: CommandLaunch
) -> str:
    """Return that a job of several tasks with GPUs has one process, as nothing starts others."""
    nodes, each = natural(directives.get("nodes")) or 1, tasks_per_node(directives) or 1
    words = [os.path.basename(word) for one in seen for word in one.words]
    is_launched = launch.command or launch.problem or _STARTS.intersection(words)
    runs = [one for one in seen if programs.PYTHON.fullmatch(os.path.basename(one.words[0]))]
    trains = [one for one in runs if any(word.endswith(".py") for word in one.words)]
    is_packed = nodes == 1 and any(one.in_loop or one.end in {"&", ""} for one in trains)
    if is_launched or is_packed:  # perhaps one for each GPU
        return ""
    if nodes * each == 1 or not trains or not gpus_per_node(directives):
        return ""
    shown = " ".join(trains[-1].words[:2])[:60]
    return f" asks for {nodes * each} tasks, but starts `{shown}` once: srun is missing"


def _unread(text: str) -> dict[str, str]:
    """Return variables that a script reads but are never set, with those that are meant: a shell
    takes each letter, digit and underscore behind a `$` for the name.
    """
    found: dict[str, str] = {}
    lines = shell.without_comments(text)
    known = launcher_command.OF_SLURM
    for name in dict.fromkeys(_NAMED.findall(lines)):
        if _GROUP.sub("", name) in known or re.search(rf"(?<![$\w{{]){name}\b", lines):
            continue  # set, or named in another way
        meant = max((one for one in known if name.startswith(f"{one}_")), key=len, default="")
        near, is_near = launcher_command.nearest(name, known)
        if name.endswith("_") or meant:
            found[name] = meant or name.rstrip("_")
        elif name.startswith("SLURM_") and is_near and not _is_input(name, near):
            found[name] = near
    if "srun" in lines and not _MPI.search(lines):
        for name in dict.fromkeys(shell.READ.findall(lines)):
            if name in _OF_MPI and not re.search(rf"(?<![$\w{{]){name}=", lines):
                found[name] = _OF_MPI[name]
    return found


def _is_input(name: str, near: str) -> bool:
    """Return whether users set a variable for srun, in place of an option (srun(1))."""
    option = name.removeprefix("SLURM_")
    valued = launcher_command.VALUED["srun"]
    return near == f"SLURM_JOB_{option}" and option.lower().replace("_", "-") in valued


def _may_trap_more(text: str, seen: Sequence[ShellCommand]) -> bool:
    """Return whether a script may trap more than it says: by a file that cannot be read here, or
    by commands that it computes.
    """
    unread = (" ".join(one.words[1:]) for one in seen if one.words[0] in {"source", "."})
    return any(not _ACTIVATES.search(one) for one in unread) or bool(_COMPUTES.search(text))


def _signal(
    directives: Mapping[str, str], trapped: Sequence[str], *, waits: bool, is_open: bool
) -> str:
    """Return why the signal that Slurm sends before the time limit has no effect.

    `is_open` says that something else may trap it, or take the place of the shell.
    """
    match = _SIGNAL.fullmatch(directives.get("signal", ""))
    if match is None:
        return ""
    of_shell, sent, before = match[1] or "", _name(match[2]), match[3] or "60"
    limit, traps = seconds(directives.get("time", "")), {_name(one) for one in trapped}
    traps -= {"ERR", "DEBUG", "RETURN"}
    if limit is not None and int(before) >= limit:
        return f"it comes {before} s before the end of a job that has {limit} s"
    if "B" not in of_shell:
        lost = "only srun's tasks get it, not the shell that traps it: B: is missing"
        return lost * (sent in traps)
    if not traps & {sent, "EXIT"} and not is_open and not any("$" in one for one in traps):
        only = f": the trap is for {min(traps)}" if traps else ""
        return f"nothing traps {sent}, which ends the shell{only}"
    late = "the trap runs only when srun ends, because the shell does not `wait` for it"
    return late * (sent in traps and not waits)


def _name(text: str) -> str:
    """Return the name of a signal, without `SIG`, from its name or number (bash(1), trap)."""
    number = natural(text)
    named = [one.name for one in signal.Signals if one.value == number]
    return (named or [text])[0].upper().removeprefix("SIG")
