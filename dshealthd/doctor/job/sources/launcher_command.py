"""The command that launches a training job: `deepspeed`, `torchrun`, `accelerate launch` or `srun`.

It is never run.

The options of each launcher are in `launchers.toml`. A word with a `$`, which only a shell can
compute, stays as written, and anything that depends on it is unknown.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.job.sources import expansion, programs, shell
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.programs import Read

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate-launch",
}
_DATA = tomllib.loads(
    resources.files(__package__).joinpath("launchers.toml").read_text(encoding="utf-8")
)
ONLY_WITH: dict[str, str] = _DATA.pop("slurm")
"""Variables that Slurm sets only with an option, and that option."""
OF_SLURM = frozenset(_DATA.pop("variables")["names"].split()) | ONLY_WITH.keys()
"""Variables of Slurm."""
EXCLUSIVE: dict[str, list[str]] = _DATA.pop("exclusive")
"""Options of which a launcher takes one alone; sbatch refuses those of srun."""
FORMS = {name: form for form, names in _DATA.pop("forms").items() for name in names.split()}
"""What values of options can be, in any case of letters."""
FLAGS = {program: frozenset(kinds["flags"].split()) for program, kinds in _DATA.items()}
"""Options without a value, by launcher."""
VALUED = {program: frozenset(kinds["valued"].split()) for program, kinds in _DATA.items()}
"""Options with a value, by launcher; those of srun are also those of sbatch."""
SHORT = {
    "deepspeed": {"H": "hostfile", "i": "include", "e": "exclude"},
    "torchrun": {},
    "accelerate": {},
    "srun": {
        "a": "array",
        "J": "job-name",
        "o": "output",
        "N": "nodes",
        "n": "ntasks",
        "G": "gpus",
        "w": "nodelist",
        "t": "time",
        "c": "cpus-per-task",
        "B": "extra-node-info",
        "s": "oversubscribe",
    },
}
"""Short options of launchers, also of sbatch, by launcher."""
_ACCELERATE = {
    "num-machines": "nnodes",
    "machine-rank": "node-rank",
    "main-process-ip": "master-addr",
    "main-process-port": "master-port",
}
"""Options of `accelerate launch`, which runs torchrun, by the names that torchrun has for them."""
_OF_ACCELERATE = frozenset({"distributed_type", "compute_environment", "num_processes"})
"""Keys of which each configuration of Accelerate has some."""
READ = (
    *("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres"),
    *("nnodes", "nproc-per-node", "node-rank", "rdzv-backend", "rdzv-endpoint", "standalone"),
    *("master-addr", "master-port", "hostfile", "include", "exclude", "num-nodes", "num-gpus"),
    *("num-accelerators", "no-ssh", "ssh-port"),
)
"""Options that checks read; argparse accepts any prefix that no other option shares."""


_SAVES = r"(?:^|[_-])(?:save|ckpt|checkpoints?)(?:$|[_-])|^(?:exp|experiment|default_root)_dir$"
SAVES = re.compile(_SAVES)
_WRITES = re.compile(
    rf"{_SAVES}|(?:^|[_-])(?:out|output|results?)(?:$|[_-])|^(?:run|work|storage)_(?:dir|path)$"
)
"""In options that say where a training saves its checkpoints (NeMo, exp_manager; Lightning,
Trainer), and where it writes.
"""
_OF_TRAINER = frozenset({"save_steps", "save_strategy", "save_total_limit"})
"""Options of Hugging Face's Trainer, which saves in its output_dir (TrainingArguments)."""
_OF_TIER = re.compile(r"(?:^|_)(?:local|non_persistent|te?mp|scratch|cache|memory|fast)(?:_|$)")
"""In options for copies of checkpoints that are not meant to last (Megatron-LM,
--non-persistent-local-ckpt-dir).
"""
LIKENESS = 0.75
"""Share of letters in common with a known name from which that name is suggested."""
MISSPELT = 0.88
"""Likeness from which a name is taken for a misspelt one: `zero_optimisation` has 0.94."""


def nearest(name: str, known: Iterable[str]) -> tuple[str, bool]:
    """Return the known name that resembles a name, and whether it certainly is what is meant."""
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=LIKENESS)
    if not close:
        return "", False
    return close[0], difflib.SequenceMatcher(None, name[:100], close[0]).ratio() >= MISSPELT


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments in words by their last name, such as `num_nodes` for `--num-nodes 2` and
    `trainer.num_nodes=2`.
    """
    for word, following in itertools.pairwise([*words, "--"]):
        name, equals, value = word.partition("=")
        if equals or word.startswith("--"):
            last = name.lstrip("-+").rpartition(".")[2].replace("-", "_")
            yield last, value if equals or following.startswith("--") else following


def outputs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments in words that say where a training writes, by their last name."""
    yield from ((name, path) for name, path in pairs(words) if _WRITES.search(name))


def saves(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield those that say where it saves what must last."""
    names = {name for name, _ in pairs(words)}
    for name, path in outputs(words):
        is_of_trainer = name == "output_dir" and bool(names & _OF_TRAINER)
        if (SAVES.search(name) or is_of_trainer) and not _OF_TIER.search(name):
            yield name, path


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """One launcher with its options, and what it starts."""

    program: str
    """`deepspeed`, `torchrun` (also for accelerate) or `srun`; `python` only inside an srun."""
    options: Mapping[str, str]
    """Options by long name; a flag has an empty value."""
    arguments: Sequence[str]
    """The script and its arguments."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of the command."""
    inner: LauncherCommand | None = None
    """The launcher, or Python, that an `srun` starts."""
    is_partial: bool = False
    """Whether a word that only a shell can compute may hold more of its options."""
    wrapper: Sequence[str] = field(default=(), compare=False)
    """Words before it, such as those of a container's runtime."""
    at_once: int | None = field(default=1, compare=False)
    """Commands like it that its shell runs at once; None if unknown."""
    by_accelerate: bool = False
    """Whether Accelerate runs this torchrun: some of its options have other names there."""
    strange: Sequence[str] = ()
    """Its options that the launcher does not have."""

    def spelled(self, name: str) -> str:
        """Return an option as people write it for this launcher."""
        if self.by_accelerate:
            names = {short: long for long, short in _ACCELERATE.items()}
            return names.get(name, name).replace("-", "_")
        return f"--{name}"

    def number(self, name: str) -> int | None:
        """Return an option's value as a number; None if it is absent or not a plain number."""
        return natural(self.options.get(name))

    @property
    def stated(self) -> dict[str, str]:
        """The arguments of the innermost program by name; those with two values are left out."""
        found: dict[str, set[str]] = {}
        for name, value in pairs(list(self.chain())[-1].arguments):
            found.setdefault(name, set()).add(value)
        return {name: values.pop() for name, values in found.items() if len(values) == 1}

    @property
    def config(self) -> str:
        """The configuration of DeepSpeed that it or the training's arguments name; else empty."""
        inner = list(self.chain())[-1]
        options = {name.replace("-", "_"): text for name, text in inner.options.items()}
        given = {**inner.stated, **options}
        names = (given.get(f"deepspeed{one}", "") for one in ("", "_config", "_config_file"))
        return next((name for name in names if name.endswith((".json", ".hjson"))), "")

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
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables when it runs, or at the end of a script without a launcher."""
    problem: str = ""
    """What could not be parsed, or why the launch is not known; it may hide a launcher."""
    is_background: bool = False
    alternatives: Sequence[LauncherCommand] = ()
    """Where conditions decide which one runs: each of them, with its variables."""


def find_launch(
    commands: Iterable[shell.ShellCommand],
    variables: expansion.Variables,
    nesting: int = 0,
    *,
    is_task: bool = False,
    read: Read = programs.no_file,
    seen: list[shell.ShellCommand] | None = None,
) -> CommandLaunch:
    """Return the command that launches a job, as far as known without a shell.

    That is the first one that runs `deepspeed` or `torchrun`, else Python by srun, else any srun;
    one on all nodes comes before one on a single node. `variables` change as `commands` are read.
    With `is_task`, srun runs the script itself. `read` returns the text of a file that the command
    names; empty where there is none. `seen` gets all commands.
    """
    seen = [] if seen is None else seen
    best, problem, is_conditional = CommandLaunch(), "", False
    weight: tuple[bool, ...] = ()
    alike: dict[int, LauncherCommand] = {}
    known: dict[int, Mapping[str, str]] = {}
    try:
        for command in commands:
            seen.append(command)
            found = _launcher(command, variables, nesting, read, is_task=is_task)
            rank = _weight(found, is_task=is_task)
            outers = [one.program if one else "" for one in (best.command, found)]
            # beside what srun starts on all nodes, another one prepares or evaluates on the first
            is_wider = rank == weight and outers[0] != "srun" == outers[1]
            if rank > weight or (is_wider and not is_conditional and not command.is_conditional):
                alike.clear()
                best = CommandLaunch(found, dict(variables), is_background=command.end == "&")
                weight, problem = rank, ""
                is_conditional = command.is_conditional
            elif rank and rank == weight and found != best.command:
                is_conditional = is_conditional or command.is_conditional
                if is_conditional:
                    problem = "which of its launches runs depends on conditions"
            if found and rank == weight:
                alike[len(seen) - 1] = found
                known[len(seen) - 1] = dict(variables)
    except (ValueError, ArithmeticError) as error:
        problem = problem or str(error)
    if best.command is None or (is_conditional and (problem or is_task)):
        return CommandLaunch(
            None,
            dict(variables),
            problem,
            alternatives=[
                replace(one, variables={**known[at], **one.variables}) for at, one in alike.items()
            ],
        )
    return replace(best, command=replace(best.command, at_once=_at_once(seen, alike)))


def _at_once(
    commands: Sequence[shell.ShellCommand], alike: Mapping[int, LauncherCommand]
) -> int | None:
    """Return how many launches run at once with the first of those alike; None if unknown."""
    first, runs = min(alike), []
    for at, one in enumerate(commands[first:], first):
        if one.words == ("wait",) and not one.is_conditional:
            break
        runs += [one] * (at in alike)
    ends = {one.end for one in runs}
    if not ends & {"&", ""}:
        return 1
    if any(one.in_loop for one in runs):
        return None  # as many as it has passes
    differ = any(one.options != alike[first].options for one in alike.values())
    return None if differ or any(one.is_conditional for one in runs) else len(runs)


def parse(
    words: Sequence[str], environment: Mapping[str, str], *, is_task: bool = False
) -> LauncherCommand | None:
    """Return the launcher in a command's words, which a shell has expanded; None if there is none.

    What a shell of each task expands has the variables of this one, except those of the task.
    """
    command = shell.ShellCommand(tuple(words))
    return find_launch([command], dict(environment), is_task=is_task).command


def started(words: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """Return the words of a command, of a launcher those of what it starts."""
    launch = parse(words, environment)
    return list(launch.chain())[-1].arguments if launch else words


def with_defaults(
    command: LauncherCommand, variables: Mapping[str, str], *, is_partial: bool = False
) -> LauncherCommand:
    """Return a command with the options of torchrun that the environment has: PET_NNODES for
    --nnodes and so on (torch/distributed/argparse_util.py). `is_partial` says that there may be
    more of them.
    """
    inner = command.inner and with_defaults(command.inner, variables, is_partial=is_partial)
    if command.program != "torchrun":
        return replace(command, inner=inner)
    own = {
        name[4:].lower().replace("_", "-"): value
        for name, value in variables.items()
        if name.startswith("PET_")
    }
    return replace(
        command, options={**own, **command.options}, is_partial=command.is_partial or is_partial
    )


def _weight(found: LauncherCommand | None, *, is_task: bool) -> tuple[bool, ...]:
    """Return how likely a command is the launch of the job, by order; empty if it is not."""
    is_python = found is not None and found.program == "python"
    if found is None or (is_python and not is_task):
        return ()
    inner = found.inner.program if found.inner else ""
    is_launcher = found.program not in {"srun", "python"} or inner in FLAGS
    is_wide = "1" not in (found.options.get("nodes"), found.options.get("ntasks"))
    return is_launcher, is_launcher or is_python or bool(inner), is_wide


def _launcher(
    command: shell.ShellCommand,
    variables: expansion.Variables,
    nesting: int,
    read: Read,
    *,
    is_task: bool,
) -> LauncherCommand | None:
    """Return the launcher that a simple command starts; None if it starts something else."""
    own = dict(command.own)
    words = programs.unwrapped(command.words, own, None if is_task else programs.WRAPPERS)
    wrapper = command.words[: len(command.words) - len(words)]
    if nesting > shell.MAX_NESTING or not words:
        return None
    program, rest = os.path.basename(words[0]), list(words[1:])
    if programs.PYTHON.fullmatch(program):
        at = rest.index("-m") if "-m" in rest else len(rest)
        program = _MODULES.get("".join(rest[at + 1 : at + 2]), "python")
        if program == "python" and rest[:1] == ["-c"]:
            return None
        if program == "python":
            return LauncherCommand(program, {}, tuple(rest), own, wrapper=wrapper)
        rest = rest[at + 2 :]
    inside = programs.text_of_shell(words, command.document, read)
    if program in programs.ELSEWHERE:
        inside = programs.text_elsewhere(words, command.document), ()
        wrapper = (*wrapper, program)
    if inside is not None:
        known: expansion.Variables = {} if program in programs.ELSEWHERE else {**variables, **own}
        launch = find_launch(
            shell.commands(inside[0], known, read, inside[1]),
            known,
            nesting + 1,
            is_task=is_task,
            read=read,
        )
        if launch.command is None:
            return None
        sets = {
            name: value for name, value in launch.variables.items() if variables.get(name) != value
        }
        below, wrapper = launch.command, (*wrapper, *launch.command.wrapper)
        return replace(below, variables={**sets, **below.variables}, wrapper=wrapper)
    if program == "accelerate" and rest[:1] == ["launch"]:
        program = "accelerate-launch"
        rest = rest[1:]
    if program == "accelerate-launch":
        return replace(_accelerate(rest, own, read), wrapper=wrapper)
    if program not in FLAGS or program == "accelerate":
        return None
    options, arguments, is_partial = _options(rest, program)
    strange = strange_options(options, program)
    inner = None
    if program == "srun" and arguments:
        started = shell.ShellCommand(tuple(arguments), document=command.document)
        passed = options.get("export", "ALL")
        passes_all = "ALL" in passed or "$" in passed
        known = {
            name: value
            for name, value in variables.items()
            if not expansion.is_of_task(name) and (passes_all or name in passed.split(","))
        }
        inner = _launcher(started, {**known, **own}, nesting + 1, read, is_task=True)
    words = tuple(arguments)
    return LauncherCommand(
        program, options, words, own, inner, is_partial, wrapper, strange=strange
    )


def _accelerate(rest: Sequence[str], own: dict[str, str], read: Read) -> LauncherCommand:
    """Return `accelerate launch` as torchrun; a configuration that is not known may say more."""
    options, arguments, _ = _options(rest, "accelerate")
    settings = accelerate_settings(read(options["config-file"])) if "config-file" in options else {}
    found = _of_accelerate({**settings, **options}, arguments, own)
    return replace(found, strange=strange_options(options, "accelerate"))


def _of_accelerate(
    options: Mapping[str, str], arguments: Sequence[str], own: dict[str, str]
) -> LauncherCommand:
    options = {_ACCELERATE.get(name, name): value for name, value in options.items()}
    nodes, ranks = natural(options.get("nnodes")), natural(options.get("num-processes"))
    if nodes and ranks is not None:
        options["nproc-per-node"] = str(ranks // nodes)
    if "config-file" not in options or nodes:
        options.setdefault("rdzv-backend", "static")
    if (gpus := options.get("gpu-ids", "all")) != "all":
        own = {"CUDA_VISIBLE_DEVICES": gpus, **own}
    return LauncherCommand(
        "torchrun", options, tuple(arguments), own, is_partial=True, by_accelerate=True
    )


def of_accelerate(settings: Mapping[str, str]) -> LauncherCommand:
    """Return what a configuration of Accelerate starts; its options may be overridden."""
    return _of_accelerate(settings, (), {})


def accelerate_settings(text: str) -> dict[str, str]:
    """Return the settings of a configuration of Accelerate, which has one level of blocks, as
    options; empty for another document.
    """
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError):
        return {}
    if not isinstance(found, dict) or not _OF_ACCELERATE & found.keys():
        return {}
    blocks = [value for value in found.values() if isinstance(value, dict)]
    pairs = [pair for block in (found, *blocks) for pair in block.items()]
    return {
        str(name).replace("_", "-"): str(value)
        for name, value in pairs
        if value is not None and not isinstance(value, dict)
    }


def _options(rest: Sequence[str], program: str) -> tuple[dict[str, str], list[str], bool]:
    """Return a launcher's options, and the words from the first argument on.

    Also return whether a word that only a shell can compute may hold more options.
    """
    options: dict[str, str] = {}
    at, is_partial = 0, False
    while at < len(rest) and rest[at].startswith(("-", "$")) and rest[at] != "-":
        word = rest[at]
        if word.startswith("$"):
            if "/" in word:  # a path, below a folder that only the shell knows
                break
            is_partial = True
            if program != "srun":  # it may as well be the script, whose options follow
                break
            at += 1
            continue
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = long_option(name.replace("_", "-"), program)
        else:
            name, value = SHORT[program].get(word[1], word[1]), word[2:]
            equals = value
        if name in FLAGS[program]:
            value = ""
        elif not equals and not _is_flag(name, rest[at : at + 1], program):
            value = rest[at]
            at += 1
        options[name] = value
    return options, list(rest[at:]), is_partial


def _is_flag(name: str, following: Sequence[str], program: str) -> bool:
    """Return whether an option has no value, as the word after it says if it is not known.

    A value is no option itself, and rarely the name of a program. An option that begins with `no-`
    switches something off.
    """
    if not following or name in VALUED[program]:
        return not following
    if name.startswith("no-") or following[0].startswith("-"):
        return True
    word = os.path.basename(following[0])
    return programs.runs_programs(word) or word in programs.WRAPPERS


def long_option(name: str, program: str) -> str:
    """Return the option that a name stands for: parsers accept any prefix of one option alone."""
    name = "ntasks-per-node" if name == "tasks-per-node" else name
    known = FLAGS[program] | VALUED[program]
    longer = [option for option in known if option.startswith(name)]
    return longer[0] if len(longer) == 1 and name not in known else name


def strange_options(options: Mapping[str, str], program: str) -> tuple[str, ...]:
    """Return the options that a launcher does not have."""
    known = FLAGS[program] | VALUED[program]
    return tuple(name for name in options if len(name) > 1 and name not in known)


def from_json(document: dict[str, Any] | None) -> LauncherCommand | None:
    """Return the launcher command whose fields a JSON document has."""
    if document is None:
        return None
    return LauncherCommand(**document | {"inner": from_json(document["inner"])})
