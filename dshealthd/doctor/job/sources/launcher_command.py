"""The command that launches a training job: `deepspeed`, `torchrun` or `srun`. It is never run.

Options are those of DeepSpeed 0.19.8 (launcher/runner.py), torch 2.13 (distributed/run.py) and
Slurm 25.05 (srun.1). A word that only a shell can compute, such as `$(hostname)`, stays as written,
and anything that depends on it is unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.job.sources import shell
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterator

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_WRAPPERS = frozenset(
    # easier to read
    "command exec time nohup env stdbuf nice ionice numactl taskset timeout setsid strace nsys ncu"  # noqa: SIM905
    " singularity apptainer enroot podman docker conda mamba micromamba uv poetry pixi".split()
)
"""Programs that run the command among their arguments."""
_SHELLS = frozenset({"bash", "sh", "zsh"})
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_PYTHON_VALUED = frozenset({"-W", "-X"})
_NO_JOB = frozenset(
    # easier to read
    ": [ cat chmod chown cp curl date dcgmi df du echo env export false find free git hostname"  # noqa: SIM905
    " ibstat ibv_devinfo ip ls lscpu lspci mkdir module mount mv nvidia-smi pip printenv printf"
    " pwd rdma rm rsync scontrol sed sinfo sleep squeue ss tar test touch true ulimit uname uptime"
    " wait wget which whoami".split()
)
"""Programs with which scripts prepare nodes and query them; an srun of one is not the launch."""
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}
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
_SRUN_VALUED = "ntasks-per-node gpus-per-node gres"
_SRUN_SHORT = """
N=nodes n=ntasks G=gpus w=nodelist l=label u=unbuffered v=verbose Q=quiet O=overcommit
K=kill-on-bad-exit c=cpus-per-task p=partition t=time J=job-name o=output e=error A=account q=qos
x=exclude D=chdir m=distribution C=constraint
"""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The options of a launcher, without leading dashes and with `_` written as `-`."""

    flags: frozenset[str]
    """Options without a value."""
    valued: frozenset[str]
    short: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    """Whether plugins and other releases have more options than these."""


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
        _words(_SRUN_FLAGS),
        _words(_SRUN_VALUED) | {*short_options(_SRUN_SHORT).values()} - _words(_SRUN_FLAGS),
        short_options(_SRUN_SHORT),
        is_open=True,
    ),
}


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """One launcher with its options, and what it starts."""

    program: str
    """`deepspeed`, `torchrun` or `srun`; `python` only inside an srun."""
    options: Mapping[str, str]
    """Options by long name; a flag has an empty value."""
    arguments: Sequence[str]
    """The script and its arguments."""
    unknown: Sequence[str] = ()
    """Options that the launcher does not have."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of the command."""
    inner: LauncherCommand | None = None
    """The launcher, or Python, that an `srun` starts."""
    is_partial: bool = False
    """Whether a word that only a shell can compute may hold more of its options."""

    def number(self, name: str) -> int | None:
        """Return an option's value as a number; None if it is absent or not a plain number."""
        return natural(self.options.get(name))

    def chain(self) -> Iterator[LauncherCommand]:
        """Yield the launcher, and those inside it."""
        yield self
        if self.inner is not None:
            yield from self.inner.chain()

    def find(self, program: str) -> LauncherCommand | None:
        """Return the launcher with this name: this one or one inside it; None if neither."""
        return next((one for one in self.chain() if one.program == program), None)


@dataclass(frozen=True, slots=True)
class CommandLaunch:
    """The command of a script that launches the job."""

    command: LauncherCommand | None = None
    variables: Mapping[str, shell.Value] = field(default_factory=dict)
    """The variables when it runs, or at the end of a script without a launcher."""
    problem: str = ""
    """What could not be parsed, or why the launch is not known; it may hide a launcher."""


def find_launch(
    text: str, variables: Mapping[str, shell.Value], nesting: int = 0, *, is_task: bool = False
) -> CommandLaunch:
    """Return the command of a script that launches its job, as far as known without a shell.

    That is the first one that runs `deepspeed` or `torchrun`, else Python by srun, else a program
    by srun that is not one for queries; one on all nodes comes before one on a single node. With
    `is_task`, srun runs the script itself.
    """
    now = dict(variables)
    best, weight, problem = CommandLaunch(), 0, ""
    line, is_conditional = 0, False
    try:
        for command in shell.commands(text, now):
            found = _launcher(command, now, nesting, is_task=is_task)
            rank = _weight(found, is_task=is_task)
            if rank > weight:
                best, weight, problem = CommandLaunch(found, dict(now)), rank, ""
                line, is_conditional = command.line, command.is_conditional
            elif rank and rank == weight and found != best.command:
                is_conditional = is_conditional or command.is_conditional
                if is_conditional:
                    problem = f"which of lines {line} and {command.line} runs depends on conditions"
    except (ValueError, ArithmeticError) as error:
        problem = problem or str(error)
    if best.command is None or (problem and is_conditional):
        return CommandLaunch(None, now, problem)
    return best


def parse(text: str, variables: Mapping[str, str]) -> LauncherCommand | None:
    """Return the launcher in a command line; None if there is none.

    ValueError if the line cannot be parsed.
    """
    found = find_launch(text, variables)
    if found.command is None and found.problem:
        raise ValueError(found.problem)
    return found.command


def _weight(found: LauncherCommand | None, *, is_task: bool) -> int:
    """Return how likely a command is the launch of the job; 0 if it is not."""
    if found is None:
        return 0
    if found.program == "python":
        return 4 * is_task
    if found.program != "srun":
        return 6
    if found.inner is not None:
        weight = 4 if found.inner.program == "python" else 6
    elif not found.arguments or os.path.basename(found.arguments[0]) in {*_NO_JOB, *_SHELLS}:
        weight = 2 * (len(found.arguments) > 1 and found.arguments[0] not in _NO_JOB)
    else:
        weight = 2
    is_single = "1" in (found.options.get("nodes"), found.options.get("ntasks"))
    return max(0, weight - is_single)


def _launcher(
    command: shell.ShellCommand,
    variables: Mapping[str, shell.Value],
    nesting: int,
    *,
    is_task: bool,
) -> LauncherCommand | None:
    """Return the launcher that a simple command starts; None if it starts something else."""
    own = dict(command.own)
    program, rest = _unwrapped(list(command.words), own)
    if nesting > shell.MAX_NESTING:
        return None
    if _PYTHON.fullmatch(program):
        options: list[str] = []
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
            options.append(rest.pop(0))
            if options[-1] in _PYTHON_VALUED and rest:
                rest.pop(0)
        if rest[:1] != ["-m"] or rest[1:2] == [] or rest[1] not in _MODULES:
            return LauncherCommand("python", {}, tuple(rest), variables=own)
        program, rest = _MODULES[rest[1]], rest[2:]
    if program == "eval" or program in _SHELLS:
        texts = [
            rest[at + 1] for at, word in enumerate(rest[:-1]) if re.fullmatch("-[a-z]*c", word)
        ]
        if program == "eval":
            texts = [" ".join(rest)]
        known = {**variables, **own}
        if not texts:
            return None
        return find_launch(texts[0], known, nesting + 1, is_task=is_task).command
    if program not in GRAMMARS:
        return None
    named, unknown, arguments, is_partial = _options(rest, GRAMMARS[program])
    inner = None
    if program == "srun" and arguments:
        started = shell.ShellCommand(command.line, tuple(arguments))
        inner = _launcher(started, {**variables, **own}, nesting + 1, is_task=True)
    return LauncherCommand(program, named, tuple(arguments), tuple(unknown), own, inner, is_partial)


def _unwrapped(words: list[str], own: dict[str, str]) -> tuple[str, list[str]]:
    """Return the program that a command runs, without wrappers such as `env`, and its arguments.

    Variables that wrappers set are added to `own`.
    """
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        own[match[1]] = match[2]
        words.pop(0)
    program = os.path.basename(words.pop(0)) if words else ""
    if program not in _WRAPPERS:
        return program, words
    for at, word in enumerate(words):
        if program == "env" and (match := _ASSIGNMENT.fullmatch(word)):
            own[match[1]] = match[2]
        name = os.path.basename(word)
        # a path of another kind is a folder, for example one that a container binds
        is_program = name == word or "/bin/" in word
        if is_program and _runs_programs(name):
            return name, words[at + 1 :]
    return program, words


def _options(
    rest: Sequence[str], grammar: Grammar
) -> tuple[dict[str, str], list[str], list[str], bool]:
    """Return a launcher's options, the unknown options, and the words from the first argument on.

    Also return whether a word that only a shell can compute may hold more options.
    """
    options: dict[str, str] = {}
    unknown: list[str] = []
    waiting = list(rest)
    is_partial = False
    while waiting and waiting[0].startswith(("-", "$")) and waiting[0] != "-":
        if waiting[0].startswith("$"):
            is_partial = True
            if not grammar.is_open:  # it may as well be the script, whose options follow
                break
            waiting.pop(0)
            continue
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
        elif name in grammar.valued or (grammar.is_open and not _is_flag(name, waiting)):
            options[name] = value if equals else waiting.pop(0) if waiting else ""
        elif grammar.is_open:
            options[name] = value
        else:
            unknown.append(word.partition("=")[0])
    return options, unknown, waiting, is_partial


def _is_flag(name: str, following: Sequence[str]) -> bool:
    """Return whether an option that is not known has no value: the words after it say so.

    A value is followed by the command, it is no option itself, and rarely the name of a program. An
    option that begins with `no-` switches something off.
    """
    if name.startswith("no-") or all(word.startswith("-") for word in following[1:]):
        return True
    name = os.path.basename(following[0])
    return following[0].startswith("-") or _runs_programs(name) or name in _WRAPPERS


def _runs_programs(name: str) -> bool:
    return name in GRAMMARS or name in _SHELLS or _PYTHON.fullmatch(name) is not None


def _long(name: str, grammar: Grammar) -> str:
    """Return the option that a name stands for: argparse accepts any unique prefix."""
    known = grammar.flags | grammar.valued
    if name in known or grammar.is_open:
        return name
    longer = [option for option in known if option.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def from_json(document: dict[str, Any] | None) -> LauncherCommand | None:
    """Return the launcher command whose fields a JSON document has."""
    if document is None:
        return None
    return LauncherCommand(**document | {"inner": from_json(document["inner"])})
