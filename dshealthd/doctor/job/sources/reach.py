"""What reaches a process that a script starts elsewhere: its variables, files, and its command.

A process gets the variables that the program which starts it passes on: `ssh` none, `docker run`
and Open MPI on other hosts those that they are told, `srun` what `--export` says, `apptainer` all
but with `--cleanenv`. In a container it has the paths that are mounted. What stands behind `&&` or
`;` is no part of its command.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.doctor.job.sources import launcher_command
from dshealthd.doctor.job.sources.shell_faults import ScriptFault
from dshealthd.doctor.job.sources.source import training_variables

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.calls import Call
    from dshealthd.doctor.job.sources.shell import ShellCommand

_BUILTINS = frozenset({"cd", "source", ".", "export", "set", "ulimit", "alias", "module", "umask"})
"""Commands of a shell, which no other program can run."""
_STARTERS = frozenset({"srun", "mpirun", "mpiexec", "nohup", "timeout"})
_APPTAINER = frozenset({"apptainer", "singularity"})
_CONTAINERS = frozenset({"docker", "podman"})
_ISOLATES = frozenset({"cleanenv", "e", "containall", "C"})
_OPEN_MPI = frozenset({"mca", "x", "bind-to", "map-by", "allow-run-as-root", "oversubscribe"})
_HOSTS = ("hostfile", "machinefile", "H", "host", "f")
_MOUNTS = ("v", "volume", "container-mounts", "bind", "B")


_OF_CONTAINER = ("APPTAINERENV_", "SINGULARITYENV_")
"""Begin variables that set others in a container of apptainer, also with --cleanenv."""
_EPHEMERAL = frozenset({"rm", "writable-tmpfs", "container-image"})
"""Options with which what a container changes ends with it."""
_CONTAINS = frozenset({"contain", "c", "containall", "C"})
_OF_HOME = r"~|\$\{?HOME\}?|/root|/home/[^/]+"
_OF_CONTAINER_ALONE = re.compile(rf"(?:{_OF_HOME}|/tmp|/var/tmp)(?:/|$)")
"""Folders that a container of apptainer has of its own with these options (apptainer exec(1))."""
_WITHOUT_HOME = "no-container-mount-home"
"""An option of pyxis with which a container has a home of its own (github.com/NVIDIA/pyxis)."""
_MORE_MOUNTS = frozenset({"mount", "volumes-from", "tmpfs"})
"""Options of docker for mounts that are not read here."""


class Crossing(NamedTuple):
    """A program that starts processes elsewhere, and the variables that it passes on to them."""

    shown: str
    passes: Callable[[str], bool]
    remedy: str
    """How it would pass one on."""


def _named(values: Sequence[str]) -> set[str]:
    return {value.partition("=")[0] for value in values}


def crossing(call: Call, *, is_batch: bool) -> Crossing | None:
    """Return how a call starts processes elsewhere; None where all variables reach them."""
    given = call.options
    is_known = "run" in given and not {"env-file", "open"} & given.keys()
    if call.program in _CONTAINERS and is_known:
        names = _named([*given.get("e", ()), *given.get("env", ())])
        return Crossing(f"{call.program} run", names.__contains__, "-e NAME")
    if call.program in _APPTAINER and given.keys() & _ISOLATES:
        names = _named([one for text in given.get("env", ()) for one in text.split(",")])
        return Crossing(f"{call.program} --cleanenv", names.__contains__, "--env NAME=$NAME")
    is_spread = any(name in given for name in _HOSTS) and _OPEN_MPI & given.keys()
    if call.program in {"mpirun", "mpiexec"} and is_spread and not is_batch:
        names = _named(given.get("x", ()))
        return Crossing("mpirun", lambda name: name in names or name.startswith("OMPI_"), "-x NAME")
    return None


def _written(words: Sequence[str], variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return where what a command starts writes, also by the text of a shell."""
    found = [
        *launcher_command.outputs(words),
        *launcher_command.outputs(launcher_command.started(words, variables)),
    ]
    return list(dict.fromkeys(found))


def faults(
    seen: Sequence[ShellCommand],
    found: Sequence[Call],
    assigned: Mapping[str, bool],
    needed: Collection[str],
    variables: Mapping[str, str],
    *,
    is_batch: bool,
) -> Iterator[ScriptFault]:
    """Yield what does not reach the processes of a script's commands.

    `assigned` are the variables that the script sets, `needed` those of them that a training
    needs, and `variables` the values that are known.
    """
    for call in found:
        way = crossing(call, is_batch=is_batch) if "trains" in call.options else None
        text = "\n".join(call.words)
        reads = assigned.keys() & {*call.reads}
        sets = set(re.findall(r"\b([A-Za-z_]\w*)=", text))
        wanted = sorted({*needed, *training_variables(call.given)})
        lost = [one for one in (*wanted, *sorted(reads)) if way and not way.passes(one)]
        set_there = {*assigned, *call.given}  # apptainer(1), --cleanenv
        lost = [
            one
            for one in dict.fromkeys(lost)
            if one not in sets and not {f"{prefix}{one}" for prefix in _OF_CONTAINER} & set_there
        ]
        if way and lost:
            yield ScriptFault(
                f" sets {', '.join(lost[:8])}, but {way.shown} does not pass"
                f" {'it' if len(lost) == 1 else 'them'} on to its processes without {way.remedy}",
                *(lost[0], call.program),
            )
        written = _written((call.program, *call.words), variables)
        yield from _ending(call.program, call.options, written)
        yield from _unmounted(call.program, call.options, call.words)
    for at, one in enumerate(seen):
        yield from _outside(one, seen[at + 1 : at + 2])
        if one.words[0] == "srun" and (step := launcher_command.parse(one.words, {})):
            yield from _cut(step.options.get("export", ""))
            options = {name: [value] for name, value in step.options.items()}
            yield from _ending("srun", options, _written(one.words, variables))
            yield from _unmounted("srun", options, step.arguments)


def _cut(export: str) -> Iterator[ScriptFault]:
    """Yield a list in `--export`, which srun takes for several entries."""
    for above, entry in itertools.pairwise(export.split(",")):
        if "=" in above and "=" not in entry and not re.fullmatch(r"[A-Z_][A-Z0-9_]*|\$.*", entry):
            yield ScriptFault(
                f": --export separates its entries at commas: the tasks get {above}, without"
                f" {entry} and what follows; export the variable, and name it alone",
                *("--export", "export"),
            )
            return


def _outside(one: ShellCommand, following: Sequence[ShellCommand]) -> Iterator[ScriptFault]:
    """Yield a command of a shell that another program is to run, or one behind its `&&`."""
    program = os.path.basename(one.words[0])
    if program in _STARTERS:
        step = launcher_command.parse(one.words, {}) if program == "srun" else None
        words = step.arguments if step else [w for w in one.words[1:] if not w.startswith("-")]
        first = words[0] if words else ""
        if first in _BUILTINS:
            yield ScriptFault(
                f": {program} cannot run {' '.join(words[:2])[:60]}, a command of a shell: it takes"
                f" {program} bash -c '...'"
                + ", and what is behind && runs outside of it"
                * (one.end == "&&"),
                *(f"{program} {first}", program),
            )
        elif one.end == "&&" and program == "srun" and following and words:
            behind = os.path.basename(following[0].words[0])
            if behind == os.path.basename(first) and behind not in {"echo", "test", "mkdir"}:
                yield ScriptFault(
                    f": srun runs only what is before &&: {' '.join(following[0].words[:3])[:60]}"
                    " runs in the script's own shell, on the first node: srun bash -c '... && ...'",
                    *("&&", "&&"),
                )


def _mounts(program: str, options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return where in a container paths of the host are, by these."""
    mounts: dict[str, str] = {}
    for text in (text for name in _MOUNTS for text in options.get(name, ())):
        for one in (text,) if program in _CONTAINERS else text.split(","):
            source, colon, target = one.partition(":")
            mounts[source.rstrip("/")] = (target if colon else source).partition(":")[0].rstrip("/")
    return mounts


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in folders if one)


def _ending(
    program: str, options: Mapping[str, Sequence[str]], written: Sequence[tuple[str, str]]
) -> Iterator[ScriptFault]:
    """Yield a path where the processes of a container write that ends with the container."""
    mounts = _mounts(program, options)
    is_known = not any(re.match(r"\$(?!\{?HOME\b)", source) for source in mounts)
    inside = {source: target for source, target in mounts.items() if _top(source) != _top(target)}
    own = {_top(target) for target in inside.values()}  # folders that the host need not have
    ends = set() if "container-name" in options else _EPHEMERAL & options.keys()
    alone = _CONTAINS & options.keys() if program in _APPTAINER else set()
    alone = set() if options.keys() & {"home", "H", "workdir", "W"} else alone
    whose, alike = "its home and /tmp are its own", _OF_CONTAINER_ALONE
    if program == "srun" and "container-name" not in options and is_known:
        alone = {_WITHOUT_HOME} & options.keys()
        whose, alike = "its home is its own", re.compile(rf"(?:{_OF_HOME})(?:/|$)")
    # docker has nothing of the host but its mounts
    has_all = program in _CONTAINERS and is_known and not {"open", *_MORE_MOUNTS} & options.keys()
    for option, path in written:
        is_own = path.startswith("/") and (has_all or _top(path) in own)
        if alone and alike.match(path) and not _is_in(path, mounts.values()):
            yield ScriptFault(
                f": --{option} {path[:80]} is lost when its container ends: with"
                f" {'-' * min(2, len(min(alone)))}{min(alone)} {whose}, and nothing is mounted"
                " there",
                *(path, path),
            )
        elif ends and is_own and not _is_in(path, mounts.values()):
            yield ScriptFault(
                f": --{option} {path[:80]} is lost when its container ends: nothing is mounted"
                f" there, and --{min(ends)} keeps no changes of an image",
                *(path, path),
            )


def _unmounted(
    program: str, options: Mapping[str, Sequence[str]], words: Sequence[str]
) -> Iterator[ScriptFault]:
    """Yield a path of the host that the processes of a container are given, but which is mounted
    at another place there.
    """
    if program not in {*_CONTAINERS, "srun"}:
        return  # others have more of the host than is said
    mounts = _mounts(program, options)
    last = max((at for at, word in enumerate(words) if word in mounts or ":" in word), default=-1)
    texts = words if program == "srun" else words[last + 1 :]
    for path in re.findall(r"(?:^|[\s='\"])((?:/|\$\{?\w+\}?/)[\w./-]+)", "\n".join(texts)):
        sources = [source for source in mounts if _is_in(path, [source])]
        if sources and not _is_in(path, mounts.values()):
            source = max(sources, key=len)
            yield ScriptFault(
                f": the container has no {path[:80]}: {source} is mounted at {mounts[source]}",
                *(path, source),
            )
            return


def _top(path: str) -> str:
    """Return the first folder of a path."""
    return path.split("/")[1] if path.startswith("/") else path.partition("/")[0]
