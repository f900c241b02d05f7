"""Programs that run others: launchers, shells, Python, and those that run the command among their
words.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Container, Sequence

from dshealthd.jobs.environment import natural

Read = Callable[[str], str]
"""Returns the text of a file; empty where there is none."""

LAUNCHERS = frozenset({"torchrun", "deepspeed", "accelerate", "accelerate-launch", "srun"})
CONTAINERS = frozenset({"singularity", "apptainer", "enroot", "podman", "docker"})
MPI = frozenset({"mpirun", "mpiexec"})
CALLED = MPI | {"ray"} | CONTAINERS - {"enroot"}
"""Programs whose options rules read, besides those of launchers."""
HERE = frozenset(
    "command exec time nohup env stdbuf nice ionice chrt numactl taskset"  # noqa: SIM905
    " timeout sudo setsid strace nsys ncu py-spy catchsegv unbuffer"
    " conda mamba micromamba uv uvx poetry pipenv pixi pdm hatch".split()
)
"""Programs that run the command among their words, with the files and variables that they have."""
ELSEWHERE = frozenset({"ssh", "pdsh", "clush"})
"""Programs that have a shell of another host read their last words, or their input."""
WRAPPERS = HERE | CONTAINERS | {"xargs", "parallel"}  # which may run it several times
_SHELLS = frozenset({"bash", "sh", "dash", "ksh"})
"""Shells that are read; zsh splits no words, and counts elements from 1 (zshexpn(1))."""
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_RUNS = re.compile("-[a-z]*c")
"""The option behind which a shell has its script."""


def no_file(_name: str) -> str:
    """Read no file."""
    return ""


def runs_programs(name: str) -> bool:
    """Return whether a name is that of a launcher, a shell or Python."""
    return name in LAUNCHERS or name in _SHELLS or PYTHON.fullmatch(name) is not None


def runs_shell(words: Sequence[str]) -> bool:
    """Return whether one of these words is a shell, which reads what follows."""
    return any(os.path.basename(word) in _SHELLS for word in words)


def gpus_of_container(words: Sequence[str]) -> int | None:
    """Return the GPUs that --gpus of docker gives a container; None for all, or unknown
    (docs.docker.com/reference/cli/docker/container/run, --gpus).
    """
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == "--gpus":
            kind, _, listed = (value if equals else following).strip("'\"").partition("=")
            is_known = "$" not in listed and '"' not in listed
            return len(listed.split(",")) if kind == "device" and is_known else natural(kind)
    return None


def is_file(word: str) -> bool:
    """Return whether a program is a file of somebody's own, which may start anything."""
    return re.search(r"/|\.(?:sh|py)$", word) is not None


def leaves_to_others(line: str) -> bool:
    """Return whether the here-document of a line is for a program that is neither a shell nor one
    that prints or keeps it.
    """
    names = set(map(os.path.basename, re.split(r"[\s;|&(]+", line)))
    return not names & (_SHELLS | ELSEWHERE | {"cat", "tee", "read", "eval"})


def interpreter(text: str) -> str:
    """Return the program that the first line of a script names; empty without one (execve(2))."""
    words = text.partition("\n")[0].removeprefix("#!").split() if text.startswith("#!") else []
    names = (os.path.basename(word) for word in words if not re.match("-|[A-Za-z_]+=", word))
    return next((name for name in names if name != "env"), "")


def is_foreign(text: str, name: str = "") -> bool:
    """Return whether a script, in a file of this name, is one of a language that is not read."""
    program = interpreter(text)
    return program not in _SHELLS if program else os.path.splitext(name)[1] not in {"", ".sh"}


def lost_words(words: Sequence[str]) -> str:
    """Return the script of a shell that words follow which it does not read; empty for none."""
    for at, word in enumerate(words[:-2]):
        if os.path.basename(word) in _SHELLS and _RUNS.fullmatch(words[at + 1]):
            text, behind = words[at + 2], words[at + 3 :]
            return text if behind and not re.search(r"\$\{?[\d@*]|^[$-]", text) else ""
    return ""


def text_of_shell(
    words: Sequence[str], document: str, read: Read
) -> tuple[str, Sequence[str]] | None:
    """Return the script that a shell runs, from its option, a file or its input, and its arguments;
    None for another program, empty where it is not known.
    """
    program = os.path.basename(words[0]) if words else ""
    if program.endswith(".sh"):
        text = read(words[0])
        return "" if is_foreign(text) else text, words[1:]
    if program not in _SHELLS:
        return None
    at = next((at for at, word in enumerate(words) if at and _RUNS.fullmatch(word)), len(words))
    if words[at + 1 :]:
        return words[at + 1], words[at + 3 :]
    files = [at for at, word in enumerate(words) if at and not word.startswith(("-", "+"))]
    if files:
        return read(words[files[0]]), words[files[0] + 1 :]
    return document, ()


def text_elsewhere(words: Sequence[str], document: str) -> str:
    """Return the script that a shell of another host runs for a program such as ssh; else empty."""
    if not words or os.path.basename(words[0]) not in ELSEWHERE:
        return ""
    # options and a host stand before it
    return document or " ".join(itertools.dropwhile(_is_word, words[1:]))


def _is_word(word: str) -> bool:
    """Return whether a word is neither several nor the name of a program that is known."""
    name = os.path.basename(word)
    return not word.split()[1:] and not runs_programs(name) and name not in CALLED


def unwrapped(
    words: Sequence[str], own: dict[str, str], wrappers: Container[str] | None = WRAPPERS
) -> Sequence[str]:
    """Return the words of the program that a command runs, without wrappers such as `env`; all of
    them where none is known.

    Variables that wrappers set are added to `own`. Without `wrappers`, any program may be one: of a
    container, or one that binds a task to its cores.
    """
    begin = 0
    while begin < len(words) and (match := ASSIGNMENT.fullmatch(words[begin])):
        own[match[1]] = match[2]
        begin += 1
    words = words[begin:] or words  # what is left of variables alone is the name of a command
    program = os.path.basename(words[0]) if words else ""
    is_open = program.startswith("$")  # only the shell knows what it is: a wrapper, or variables
    is_any = wrappers is None and not runs_programs(program)
    if not is_open and not is_any and program not in (wrappers or ()):
        return words
    for at, word in enumerate(words[1:], 1):
        if program == "env" and (match := ASSIGNMENT.fullmatch(word)):
            own[match[1]] = match[2]
        name = os.path.basename(word)
        # a path of another kind is a folder, for example one that a container binds
        is_file = wrappers is not None and name.endswith(".sh")
        is_program = name == word or "/bin/" in word or is_file
        before = words[at - 1] if at > 1 and program not in WRAPPERS else "--"
        is_value = before.startswith("-") and "=" not in before and before != "--"
        is_known = runs_programs(name) or is_file or name in CALLED | ELSEWHERE | {"env"}
        if is_program and not word.startswith("-") and not is_value and is_known:
            return unwrapped(words[at:], own, wrappers)
    return words
