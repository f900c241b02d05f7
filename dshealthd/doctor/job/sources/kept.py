"""Where a training of a script saves, and whether that outlasts the job.

What a node has for itself is gone with the job, and a script may remove a folder behind the
training. A command that may copy what it names is taken to do so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources import expansion, launcher_command, programs, shell
from dshealthd.doctor.job.sources.shell_faults import ScriptFault
from dshealthd.doctor.job.sources.slurm_options import nodes_of_step

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.shell import ShellCommand

OF_NODE = re.compile(r"(/tmp|/var/tmp|/dev/shm|\$\{?(SLURM_)?TMPDIR\}?)(/|$)")
"""Folders of a node; files there are of no other, and often removed behind the job."""
MAX_PATHS = 256
"""Maximum number of paths that are followed; a training has two or three."""
_COMMON = re.compile(
    r"\$\{?(?:SLURM_ARRAY_JOB_ID|SLURM_JOB_NAME|SLURM_SUBMIT_DIR|HOME|USER|PWD|SCRATCH|WORK)\b"
)
"""Variables that are the same in all tasks of an array."""
_OF_TASK = re.compile(r"(?:^|_)(?:name|version|suffix|id|tag|rank|run|experiment|exp)(?:_\w+)?=")
"""Arguments that may name a folder below, or one of several nodes."""
_COPIES = frozenset({"cp", "mv", "rsync", "tar", "rclone", "aws", "gsutil", "gcloud", "azcopy"})
_TO_LAST = frozenset({"cp", "mv", "rsync", "scp"})
"""Commands whose last argument is where files go."""
_KEEPS_NOTHING = frozenset((
    *("mkdir", "rm", "rmdir", "ls", "du", "df", "cd", "pushd", "echo", "printf", "test", "[", "[["),
    *("chmod", "chown", "touch", "stat", "trap", "set", "export", "ulimit", "umask", "date"),
    *("true", "false", ":", "sleep", "wait"),
))  # fmt: skip
"""Commands that copy nothing out of a folder that they name."""
_TO_NODES = frozenset({"srun", "sbcast"}) | programs.ELSEWHERE
"""Commands that reach other nodes."""


def faults(
    seen: Sequence[ShellCommand],
    variables: Mapping[str, str],
    directives: Mapping[str, str],
) -> Iterator[ScriptFault]:
    """Yield where a training saves what nothing keeps, or reads what its nodes do not have."""
    every, left = [*seen, *_handlers(seen, variables)], MAX_PATHS
    for at, one in enumerate(seen):
        for option, path in launcher_command.saves(launcher_command.started(one.words, variables)):
            behind = [word for other in every[at + 1 :] for word in _removed(other)]
            is_removed = any(_is_below(path, word) for word in behind)
            is_of_node = bool(directives) and OF_NODE.match(path) is not None
            left -= 1
            if left < 0:
                return
            if (is_of_node or is_removed) and not _is_kept(path, at, every):
                why = "is removed behind the training"
                yield ScriptFault(
                    f": --{option} {path[:80]}"
                    f" {'is of one node, and gone when the job ends' if is_of_node else why}:"
                    " nothing copies it",
                    *(path, option),
                    is_critical=False,
                )
    yield from _unstaged(seen, variables, directives)
    if not directives.get("array", "%1").endswith("%1"):
        yield from _overwritten(seen, variables)


def _overwritten(
    seen: Sequence[ShellCommand], variables: Mapping[str, str]
) -> Iterator[ScriptFault]:
    """Yield a folder in which all tasks of an array save at once."""
    for one in seen:
        words = launcher_command.started(one.words, variables)
        is_of_task = any(_OF_TASK.search(f"{name}={value}") for name, value in _named(words))
        for option, path in launcher_command.saves(words):
            is_common = "$" not in _COMMON.sub("", path) and not one.is_conditional
            if "/" in path and is_common and not is_of_task:
                yield ScriptFault(
                    f": all tasks of the array save in --{option} {path[:80]} at once, each over"
                    " the files of the others: $SLURM_ARRAY_TASK_ID is missing in it",
                    *(option, option.replace("_", "-")),
                    is_critical=False,
                )
                return


def _named(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that may name a folder inside, or a node."""
    yield from ((name, value) for name, value in launcher_command.pairs(words) if "$" in value)


def _handlers(seen: Sequence[ShellCommand], variables: Mapping[str, str]) -> Iterator[ShellCommand]:
    """Yield the commands of traps, which run when the script ends or is told to."""
    for one in seen:
        if one.words[0] == "trap" and one.words[1:]:
            try:
                yield from shell.commands(one.words[1], dict(variables))
            except (ValueError, ArithmeticError):
                continue


def _removed(one: ShellCommand) -> Iterator[str]:
    """Yield the folders that a command certainly removes."""
    is_sure = one.words[0] == "rm" and not one.is_conditional
    if is_sure and re.search(r"(?:^| )(?:-\w*[rR]|--recursive)", " ".join(one.words)):
        yield from (word for word in one.words[1:] if not word.startswith("-"))


def _is_below(path: str, folder: str) -> bool:
    folder = folder.rstrip("/*")
    is_known = expansion.UNKNOWN not in folder  # of two that are unknown, each may be another
    return bool(folder) and is_known and (path == folder or path.startswith(f"{folder}/"))


def _names(words: Sequence[str], path: str) -> bool:
    """Return whether words name a path, a folder above it or a file in it."""
    parts = (part for word in words for part in re.split(r"[\s=:'\"]+", word))
    return any(_is_below(path, part) or _is_below(part, path) for part in parts)


def _is_kept(path: str, at: int, every: Sequence[ShellCommand]) -> bool:
    """Return whether a command besides that of the training may copy what is saved there."""
    enters = any(one.words[0] in {"cd", "pushd"} and _names(one.words, path) for one in every)
    for other, one in enumerate(every):
        words = one.words
        if words[0] == "srun" and (step := launcher_command.parse(words, {})):
            words = tuple(step.arguments) or words
        program = os.path.basename(words[0])
        if other == at or program in _KEEPS_NOTHING:
            continue
        if enters and program in _COPIES:
            return True
        is_unpacked = program == "tar" and re.match(r"--extract|-?\w*x", " ".join(words[1:]))
        read = words[1:-1] if program in _TO_LAST else () if is_unpacked else words[1:]
        if _names(read, path):
            return True
    return False


def _filled(one: ShellCommand) -> Iterator[str]:
    """Yield where a command writes files."""
    program = os.path.basename(one.words[0])
    if one.target:
        yield one.target
    if program in _TO_LAST:
        yield one.words[-1]
    for option, word in zip(one.words, one.words[1:], strict=False):
        if (program, option) in {("tar", "-C"), ("unzip", "-d"), ("wget", "-P"), ("wget", "-O")}:
            yield word


def _unstaged(
    seen: Sequence[ShellCommand], variables: Mapping[str, str], directives: Mapping[str, str]
) -> Iterator[ScriptFault]:
    """Yield what tasks of several nodes read in a folder that each node has for itself, and the
    script fills on the first alone.
    """
    own = [one for one in seen if os.path.basename(one.words[0]) not in _TO_NODES]
    filled = {path for one in own for path in _filled(one) if OF_NODE.match(path)}
    for one in seen if filled else ():
        step = launcher_command.parse(one.words, variables) if one.words[0] == "srun" else None
        nodes = nodes_of_step(directives, step.options) if step else None
        if step is None or (nodes or 1) == 1 or _COPIES & {*" ".join(one.words).split()}:
            continue
        others = [two for two in seen if two is not one and two not in own]
        for path in sorted(filled):
            reads = _names([*step.arguments, *list(step.chain())[-1].arguments], path)
            if reads and not any(_names(two.words, path) for two in others):
                yield ScriptFault(
                    f": {path[:80]} is of each node alone: the script fills it on the first, and"
                    f" tasks of {nodes} nodes read it: srun or sbcast is missing",
                    *(path, path),
                )
                return
