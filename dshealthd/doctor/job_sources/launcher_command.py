"""The command that launches a training job: `deepspeed`, `torchrun` or `srun`. It is never run.

Options are those of DeepSpeed 0.19.8 (launcher/runner.py), torch 2.13 (distributed/run.py) and
Slurm 25.05 (srun.1). A word that only a shell can compute, such as `$(hostname)`, stays as written,
and anything that depends on it is unknown.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.jobs.environment import MAX_VALUE, natural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_TEXT = 1 << 16
"""Maximum characters of a command after expansion, as variables may refer to each other."""
MAX_NESTING = 4
"""Maximum nesting of commands, such as `srun bash -c "torchrun ..."`."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}$]*))?\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_OPERATORS = frozenset(";&|()<>")
_WRAPPERS = frozenset({"exec", "time", "nohup", "env", "stdbuf", "-oL", "-eL"})
_SHELLS = frozenset({"bash", "sh", "zsh"})
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """The options of a launcher, without leading dashes and with `_` written as `-`."""

    flags: frozenset[str]
    """Options without a value."""
    valued: frozenset[str]
    short: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    """Whether it has more options than these, each with a value."""


_DEEPSPEED_FLAGS = """
module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid bind-cores-to-rank quiet
help
"""
_DEEPSPEED_VALUED = """
hostfile include exclude num-nodes num-gpus num-accelerators master-port master-addr node-rank
launcher launcher-args enable-each-rank-log autotuning bind-core-list ssh-port venv-script
log-level
"""
_TORCHRUN_FLAGS = "standalone module no-python run-path virtual-local-rank help use-env"
_TORCHRUN_VALUED = """
nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval
start-method event-log-handler role log-dir redirects tee local-ranks-filter node-rank master-addr
master-port local-addr logs-specs numa-binding shutdown-timeout signals-to-handle
duplicate-stdout-filters
duplicate-stderr-filters
"""
_SRUN_FLAGS = """
label unbuffered verbose quiet pty overlap exact overcommit exclusive preserve-env no-kill
kill-on-bad-exit contiguous multi-prog disable-status help
"""
_SRUN_VALUED = "nodes ntasks ntasks-per-node gpus gpus-per-node gres nodelist"
_SRUN_SHORT = """
N=nodes n=ntasks G=gpus w=nodelist l=label u=unbuffered v=verbose Q=quiet O=overcommit
K=kill-on-bad-exit c=cpus-per-task p=partition t=time J=job-name o=output e=error A=account q=qos
x=exclude D=chdir m=distribution C=constraint
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def short_options(text: str) -> dict[str, str]:
    """Return long option names by letter, from a text such as `N=nodes n=ntasks`."""
    return dict(pair.split("=") for pair in text.split())


GRAMMARS = {
    "deepspeed": Grammar(
        _words(_DEEPSPEED_FLAGS),
        _words(_DEEPSPEED_VALUED),
        short_options("H=hostfile i=include e=exclude q=quiet h=help"),
    ),
    "torchrun": Grammar(
        _words(_TORCHRUN_FLAGS),
        _words(_TORCHRUN_VALUED),
        short_options("m=module r=redirects t=tee h=help"),
    ),
    "srun": Grammar(
        _words(_SRUN_FLAGS), _words(_SRUN_VALUED), short_options(_SRUN_SHORT), is_open=True
    ),
}


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """One launcher with its options, and what it starts."""

    program: str
    """`deepspeed`, `torchrun` or `srun`."""
    options: Mapping[str, str]
    """Options by long name; a flag has an empty value."""
    arguments: tuple[str, ...]
    """The script and its arguments."""
    unknown: tuple[str, ...] = ()
    """Options that the launcher does not have."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of the command."""
    inner: LauncherCommand | None = None
    """The launcher that an `srun` starts."""

    def number(self, name: str) -> int | None:
        """Return an option's value as a number; None if it is absent or not a plain number."""
        return natural(self.options.get(name))

    def find(self, program: str) -> LauncherCommand | None:
        """Return the launcher with this name: this one or one inside it; None if neither."""
        if self.program == program:
            return self
        return self.inner.find(program) if self.inner else None


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a command with known variables replaced; ValueError if it grows beyond MAX_TEXT.

    `${NAME:-default}` becomes the default if the name is unknown.
    """

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[2])
        if known is not None:
            return known
        return match[0] if match[3] is None else match[3]

    expanded = _VARIABLE.sub(value, text)
    if len(expanded) > MAX_TEXT:
        message = f"the command has more than {MAX_TEXT} characters"
        raise ValueError(message)
    return expanded


def words(text: str) -> list[str]:
    """Return the words of a command line, as a shell splits them; ValueError if a quote is open."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def commands(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Yield the simple commands between the operators, without redirections."""
    found: list[str] = []
    redirected = False
    for token in tokens:
        if token and _OPERATORS.issuperset(token):
            if token.startswith(("<", ">")):
                redirected = True
                continue
            yield found
            found = []
        elif redirected:
            redirected = False
        else:
            found.append(token)
    yield found


def parse(text: str, variables: Mapping[str, str]) -> LauncherCommand | None:
    """Return the first launcher in a command line; None if there is none.

    ValueError if the line cannot be parsed.
    """
    return _parse(text, variables, 0)


def _parse(text: str, variables: Mapping[str, str], nesting: int) -> LauncherCommand | None:
    for command in commands(words(expand(text, variables))):
        found = launcher(command, variables, nesting)
        if found is not None:
            return found
    return None


def launcher(
    command: Sequence[str], variables: Mapping[str, str], nesting: int = 0
) -> LauncherCommand | None:
    """Return the launcher that a simple command starts; None if it starts something else."""
    own: dict[str, str] = {}
    rest = list(command)
    while rest and ((match := _ASSIGNMENT.fullmatch(rest[0])) or rest[0] in _WRAPPERS):
        if match and len(match[2]) <= MAX_VALUE:
            own[match[1]] = match[2]
        rest.pop(0)
    if not rest or nesting > MAX_NESTING:
        return None
    program = os.path.basename(rest.pop(0))
    if _PYTHON.fullmatch(program):
        while rest and rest[0] in {"-u", "-O", "-P", "-s", "-B"}:
            rest.pop(0)
        if rest[:1] != ["-m"] or rest[1:2] == [] or rest[1] not in _MODULES:
            return None
        program, rest = _MODULES[rest[1]], rest[2:]
    if program in _SHELLS:
        scripts = [
            rest[at + 1] for at, word in enumerate(rest[:-1]) if re.fullmatch("-[a-z]*c", word)
        ]
        return _parse(scripts[0], {**variables, **own}, nesting + 1) if scripts else None
    if program not in GRAMMARS:
        return None
    options, unknown, arguments = _options(rest, GRAMMARS[program])
    inner = None
    if program == "srun":
        inner = launcher(arguments, {**variables, **own}, nesting + 1)
    return LauncherCommand(program, options, tuple(arguments), tuple(unknown), own, inner)


def _options(rest: Sequence[str], grammar: Grammar) -> tuple[dict[str, str], list[str], list[str]]:
    """Return a launcher's options, the unknown options, and the words from the first argument on."""
    options: dict[str, str] = {}
    unknown: list[str] = []
    waiting = list(rest)
    while waiting and waiting[0].startswith("-") and waiting[0] != "-":
        word = waiting.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            written, equals, value = word[2:].partition("=")
            name = _long(written.replace("_", "-"), grammar)
        else:
            name = grammar.short.get(word[1], word[1])
            value = word[2:].removeprefix("=")
            equals = value
            if name in grammar.flags:
                equals = value = ""
        if name in grammar.flags:
            options[name] = value
        elif name in grammar.valued or grammar.is_open:
            options[name] = value if equals else waiting.pop(0) if waiting else ""
        else:
            unknown.append(word.partition("=")[0])
    return options, unknown, waiting


def _long(name: str, grammar: Grammar) -> str:
    """Return the option that a name stands for: argparse accepts any unique prefix."""
    known = grammar.flags | grammar.valued
    if name in known or grammar.is_open:
        return name
    longer = [option for option in known if option.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def as_json(command: LauncherCommand | None) -> dict[str, Any] | None:
    """Return a launcher command as JSON."""
    if command is None:
        return None
    return {
        "program": command.program,
        "options": dict(command.options),
        "arguments": list(command.arguments),
        "unknown": list(command.unknown),
        "variables": dict(command.variables),
        "inner": as_json(command.inner),
    }


def from_json(document: Mapping[str, Any] | None) -> LauncherCommand | None:
    """Return the launcher command in a JSON document."""
    if document is None:
        return None
    return LauncherCommand(
        document["program"],
        document["options"],
        tuple(document["arguments"]),
        tuple(document["unknown"]),
        document["variables"],
        from_json(document["inner"]),
    )
