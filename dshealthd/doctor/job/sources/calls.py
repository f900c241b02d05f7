"""The calls of programs in a script that are no launchers of its own, such as `docker run`."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.doctor.job.sources import programs, shell
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.programs import Read

_OUTER = programs.WRAPPERS | programs.ELSEWHERE | {"srun"}
"""Programs that run another one among their words."""
_HOSTS = frozenset({"hostfile", "machinefile", "host", "H"})
"""Options of mpirun that say where it starts its processes, and how many."""
OF_OPERATOR = frozenset({"/etc/mpi/hostfile", "$OMPI_MCA_orte_default_hostfile"})
"""The hostfile of the workers (mpi-operator, mpi_job_controller.go, configMountPath)."""
_COUNTS = ("np", "n", "c")
"""Options of mpirun that say how many processes it starts."""
_STARTS_RANKS = programs.LAUNCHERS | {"torch.distributed.run", "torch.distributed.launch"}
_MAY_HOLD_OPTIONS = re.compile(r"\$(?!(?:\w+|\{\w+\})[/:])")
"""Begins a word that may become several; a path that begins with a variable is one."""


class Call(NamedTuple):
    """One call of a program."""

    program: str
    words: Sequence[str]
    """What stands behind it."""
    by: str = ""
    """The program that runs it, if not the shell."""
    end: str = "\n"
    """The operator that ends the command."""
    given: Mapping[str, str] = {}
    """Variables that are set in front of the command."""
    reads: Sequence[str] = ()
    """Variables that it leaves to the shell inside."""

    @property
    def own(self) -> list[str]:
        """Its words before another program that is known, which has options of its own."""
        names = map(os.path.basename, self.words)
        inner = (at for at, name in enumerate(names) if programs.runs_programs(name))
        return list(self.words[: next(inner, None)])

    @property
    def hosts(self) -> set[str]:
        """Hosts and files of them that mpirun is given."""
        given = self.options
        return {text for name in given.keys() & _HOSTS for text in given[name]}

    @property
    def processes(self) -> int | None:
        """Ranks of a training that mpirun starts with it, each of them Python alone; None if it
        starts something else, or only on hosts that are chosen, or their number is unknown.
        """
        names = [os.path.basename(word) for word in self.words]
        is_alone = any(map(programs.PYTHON.fullmatch, names)) and not _STARTS_RANKS & {*names}
        given = self.options
        if self.program not in programs.MPI or not is_alone or not self.hosts <= OF_OPERATOR:
            return None
        return natural("".join(next((given[name][0] for name in _COUNTS if name in given), "")))

    @property
    def options(self) -> Mapping[str, list[str]]:
        """Its options, and its subcommand, with their values."""
        words = " ".join(self.own).replace("$", "")  # names of variables say something, too
        found: dict[str, list[str]] = {"by": [self.by], "end": [self.end], "words": [words]}
        found["program"] = [self.program]
        if any(programs.runs_programs(os.path.basename(word)) for word in self.words):
            found["trains"] = [""]
        if any(_MAY_HOLD_OPTIONS.match(word) for word in self.own):  # `rules`
            found["open"] = [""]
        found |= {word: [""] for word in self.words[:1]}
        for word, following in itertools.pairwise([*self.own, "--"]):
            if not word.startswith("-"):
                continue
            name, equals, value = word.lstrip("-").partition("=")
            value = value if equals or following.startswith("-") else following
            found.setdefault(name.replace("_", "-"), []).append(value)
        return found


def calls(
    commands: Iterable[shell.ShellCommand],
    read: Read = programs.no_file,
    by: str = "",
    nesting: int = 0,
) -> Iterator[Call]:
    """Yield the calls in commands, also in the text of a shell that they run."""
    for command in commands:
        words = command.words
        names = [os.path.basename(word) for word in words]
        inside = programs.text_elsewhere(words, command.document)
        for at, name in enumerate(names):
            if name in programs.CALLED and (at == 0 or names[0] in _OUTER):
                outer = next((one for one in reversed(names[:at]) if one in _OUTER), by)
                reads = sorted(command.reads)
                yield Call(name, words[at + 1 :], outer, command.end, command.own, reads)
            if programs.runs_shell([name]) or (name.endswith(".sh") and not inside):
                found = programs.text_of_shell(words[at:], command.document, read)
                inside = (found[0] if found else "") or inside
        if inside and nesting < shell.MAX_NESTING:
            try:
                below = list(shell.commands(inside, {}, read))
                yield from calls(below, read, "bash", nesting + 1)
            except (ValueError, ArithmeticError):
                continue  # the launch's own reader reports it
