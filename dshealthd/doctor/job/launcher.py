"""The launcher command, the batch script and the environment agree about the ranks, and no node
gets more of them than it has visible GPUs.
"""

from __future__ import annotations

import re
import signal
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job import config_conflicts
from dshealthd.doctor.job.agreement import disagreements, occupancy
from dshealthd.doctor.job.sources.launcher_command import READ
from dshealthd.doctor.job.sources.layout import refusal
from dshealthd.doctor.job.sources.slurm_script import EXCLUSIVE, gpus_per_node, tasks_per_node
from dshealthd.doctor.remedies import paste
from dshealthd.findings.finding import State
from dshealthd.jobs.environment import RENDEZVOUS, natural, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
    from dshealthd.doctor.job.sources.slurm_script import SlurmScript

_LEFT_BEHIND = ("TORCH_NCCL_", "DEEPSPEED_TIMEOUT", "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME")
"""Variables that matter on every node but that `deepspeed` does not pass on to the others."""
_ONE_A_NODE = ("torchrun", "deepspeed")
"""Launchers that start the ranks of a node themselves."""
INSIDE = "dshealthd doctor --job -- COMMAND  # in the script, with the words of its launch"
_COUNTS = frozenset({"num-gpus", "num-accelerators", "num-nodes"})
_VARIABLE = re.compile(r"\$\{?([A-Za-z]\w*)")
_SIGNAL = re.compile(r"(?:([RB]+):)?(\w+)(?:@(\d+))?")
_EXPLICIT = _COUNTS | {"include", "exclude"}


def _launch(context: JobContext, _given: object) -> Iterator[Result]:
    found = [
        *(*_readable(context), *_script(context)),
        *(*_options(context), *_left_behind(context)),
    ]
    yield from found
    if not found:
        launcher = context.launcher
        name = launcher.program if launcher else "environment"
        yield ok(
            f"{name}: {_count(context.layout.ranks, 'rank')} on"
            f" {_count(context.layout.nodes, 'node')}"
        )


def _count(number: int | None, name: str) -> str:
    return plural(number, name) if number else f"an unknown number of {name}s"


def _readable(context: JobContext) -> Iterator[Result]:
    for source in (context.command, context.script):
        if source is not None and source.value is None:
            shown = textwrap.shorten(source.name, 80)
            yield unknown(
                source.problem if source.name in source.problem else f"{shown}: {source.problem}",
                component=shown,
            )
    script, launcher = context.batch_script, context.launcher
    if script is None or context.script is None or context.command is not None:
        return
    name = context.script.name
    if launcher is None:
        why = f" ({script.problem})" if script.problem else ""
        yield unknown(
            f"{name}: no call of deepspeed, torchrun or srun is found without running it{why}",
            remedy=INSIDE,
            component=name,
        )
    elif names := _computed(context, launcher):
        yield unknown(
            f"{name}: only the shell that runs it knows {', '.join(names[:6])}: not checked here"
            f"{_never_set(launcher, script)}",
            remedy=INSIDE,
            component=name,
        )


def _computed(context: JobContext, launcher: LauncherCommand) -> list[str]:
    """Return what checks would read, and only the job's own shell can compute."""
    found = [
        f"--{option}"
        for command in launcher.chain()
        for option, value in command.options.items()
        if option in READ and "$" in value
    ]
    if any(command.is_partial for command in launcher.chain()):
        found.append("some options")
    if launcher.find("torchrun") is None and launcher.find("deepspeed") is None:
        found += [name for name in RENDEZVOUS if "$" in context.variables.get(name, "")]
    return found


def _never_set(launcher: LauncherCommand, script: SlurmScript) -> str:
    """Say which variables of the command the script does not set, where there are any."""
    words = [word for one in launcher.chain() for word in (*one.options.values(), *one.arguments)]
    names = {name for word in words for name in _VARIABLE.findall(word)}
    names = {name for name in names if name not in script.exports and name[:6] != "SLURM_"}
    return f"; nothing in it sets {', '.join(sorted(names)[:6])}" if names else ""


def _script(context: JobContext) -> Iterator[Result]:
    """Yield what the batch script states and Slurm or its shell does not do."""
    name, script = context.script.name if context.script else "", context.batch_script
    if script is None:
        return
    for line in script.ignored[:1]:
        more = f", and {plural(len(script.ignored) - 1, 'more line')}" if script.ignored[1:] else ""
        yield warning(
            f"{name}:{line}{more}: Slurm ignores #SBATCH after the first command",
            remedy=paste("sed", "-n", f"{line}p", "--", name),
            source="sbatch(1)",
            component=f"{name}:{line}",
        )
    for option, value in script.directives.items():
        if "$" in value:
            make = critical if option in READ else warning
            yield make(
                f"{name}: #SBATCH --{option}={value[:60]} is read as it stands: no shell expands"
                " lines with #SBATCH",
                remedy=f"sbatch --{option}=... {name}",
                source="sbatch(1)",
                component=f"--{option}",
            )
    of_srun = context.launcher.options if context.launcher else {}
    for program, options in (("sbatch", script.directives), ("srun", of_srun)):
        for both in (sorted(group & options.keys()) for group in EXCLUSIVE):
            if both[1:]:
                yield critical(
                    f"{name}: {' and '.join(f'--{option}' for option in both)} exclude each other:"
                    f" {program} refuses them",
                    source=f"{program}(1), --{both[0]}",
                    component=f"--{both[0]}",
                )
    if problem := _signal(script):
        yield warning(
            f"{name}: --signal={script.directives['signal']}: {problem}",
            source="sbatch(1), --signal; bash(1), SIGNALS",
            component="--signal",
        )
    if context.command is None and (lost := _not_passed_on(context, script)):
        make = critical if {*lost} & {*RENDEZVOUS} else warning
        yield make(
            f"{name} sets {', '.join(lost[:8])}, but does not pass"
            f" {'it' if len(lost) == 1 else 'them'} on to the ranks: `export` or --export=ALL is"
            " missing",
            remedy=f"export {' '.join(lost[:8])}",
            source="srun(1), --export",
            component=lost[0],
        )


def _signal(script: SlurmScript) -> str:
    """Return why the signal that Slurm sends before the time limit has no effect."""
    match = _SIGNAL.fullmatch(script.directives.get("signal", ""))
    if match is None:
        return ""
    of_shell, sent, seconds = match[1] or "", _name(match[2]), match[3] or "60"
    limit = _seconds(script.directives.get("time", ""))
    if limit is not None and int(seconds) >= limit:
        return f"it comes {seconds} s before the end of a job that has {limit} s"
    traps = {_name(one) for one in script.traps} - {"ERR", "DEBUG", "RETURN"}
    if "B" not in of_shell:
        is_lost = sent in traps
        return "only srun's tasks get it, not the shell that traps it: B: is missing" * is_lost
    if traps and not traps & {sent, "EXIT"} and not any("$" in one for one in traps):
        return f"nothing traps {sent}, which ends the shell: the trap is for {min(traps)}"
    if sent in traps and not script.waits:
        return "the trap runs only when srun ends, because the shell does not `wait` for it"
    return ""


def _name(text: str) -> str:
    """Return the name of a signal, without `SIG`, from its name or number (bash(1), trap)."""
    number = natural(text)
    named = [one.name for one in signal.Signals if one.value == number]
    return (named or [text])[0].upper().removeprefix("SIG")


def _seconds(limit: str) -> int | None:
    """Return the seconds of Slurm's [DAYS-][[HOURS:]MINUTES[:SECONDS]]; None if it is none."""
    days, dash, rest = limit.rpartition("-")
    parts = [natural(part) for part in rest.split(":")]
    if None in parts or (dash and natural(days) is None):
        return None
    numbers = [part or 0 for part in parts]
    has_hours = dash or len(numbers) == len(("hours", "minutes", "seconds"))
    hours = numbers if has_hours else [0, *numbers]
    hours = [*hours, 0, 0][:3]
    return (natural(days) or 0) * 86_400 + hours[0] * 3_600 + hours[1] * 60 + hours[2]


def _not_passed_on(context: JobContext, script: SlurmScript) -> list[str]:
    """Return the variables of training that the script sets, but the ranks do not get."""
    if context.launcher is None:
        return []
    asked = context.launcher.options.get("export", script.directives.get("export", "ALL"))
    is_python = list(context.launcher.chain())[-1].program == "python"
    passes_all = "ALL" in asked or "$" in asked or "SLURM_EXPORT_ENV" in script.exports
    return [
        name
        for name, is_exported in script.carried.items()
        if not (is_exported and passes_all)
        and name not in asked
        and not any(name in one.variables for one in context.launcher.chain())
        and (is_python or name not in RENDEZVOUS)  # other launchers set these themselves
    ]


def _options(context: JobContext) -> Iterator[Result]:
    launcher, start = context.launcher, context.start
    if launcher is None or start is None:
        return
    yield from disagreements(start)
    if context.command is not None and "zero_stage" in " ".join(start.program.arguments):
        words = (word.removeprefix("--").partition("=") for word in start.program.arguments)
        stated = {name: value for name, _, value in words}
        yield from config_conflicts.of_accelerate(context.command.name, stated)
    outer = launcher if launcher.program == "srun" else None
    for program in _ONE_A_NODE:
        if (inner := launcher.find(program)) is None:
            continue
        given = start.nodes or context.layout.nodes
        asked = {**({"nodes": str(given)} if given else {}), **context.slurm_options}
        tasks, nodes = tasks_per_node(asked), start.nodes or 1
        by_ssh = program == "deepspeed" and context.by_ssh
        problem = remedy = ""
        if not inner.arguments and not any(one.is_partial for one in launcher.chain()):
            problem = f"{program} is given no script to run"
        elif outer is not None and ((tasks or 1) > 1 or (by_ssh and nodes > 1)):
            starts = f"{tasks} times on each node"
            if tasks is None or tasks == 1:
                starts = f"on each of {nodes} nodes"
            problem = (
                f"srun starts {program} {starts}, and each one starts all ranks of the"
                f" {'job' if by_ssh else 'node'}: every rank exists more than once"
            )
            remedy = f"srun --ntasks-per-node=1 {program} ..."
            if by_ssh:
                remedy = f"{program} ...  # without srun"
        elif outer is None and nodes > 1 and program == "torchrun":
            remedy = "srun --ntasks-per-node=1 torchrun ..."
            problem = (
                f"the job has {nodes} nodes but torchrun starts only on the first: srun is missing"
            )
        if problem:
            yield critical(problem, remedy=remedy, component="srun" if outer else program)
        pool = {one.name: set(range(one.slots or 0)) for one in context.members}
        problem = refusal(pool, inner.options) if pool else ""
        if inner.options.keys() & {"include", "exclude"} and inner.options.keys() & _COUNTS:
            problem = "--include and --exclude exclude --num_gpus and --num_nodes"
        if problem not in {"", "$"}:
            yield critical(
                f"deepspeed refuses --include or --exclude, and ends at once: {problem}",
                remedy="deepspeed --include HOST:SLOT,... SCRIPT",
                source="deepspeed/launcher/runner.py, parse_resource_filter",
                component="--include",
            )


def _left_behind(context: JobContext) -> Iterator[Result]:
    """Yield variables that `deepspeed` does not pass on to the other nodes."""
    # nodes
    if context.deepspeed is None or not context.by_ssh or (context.layout.nodes or 1) < 2:  # noqa: PLR2004
        return
    taken = context.in_deepspeed_env
    exported = (taken.value if taken else None) or ()  # an unreadable one counts as empty
    names = sorted(
        name for name in context.variables if name.startswith(_LEFT_BEHIND) and name not in exported
    )
    if names:
        yield warning(
            f"{', '.join(names[:8])}: deepspeed does not pass"
            f" {'this' if len(names) == 1 else 'these'} on to the other nodes unless set in"
            " ~/.deepspeed_env",
            remedy="cat ~/.deepspeed_env",
            source="deepspeed/launcher/runner.py, EXPORT_ENVS: NCCL*, PYTHON*, MLFLOW*, MV2*, UCX*",
            component=names[0],
        )


CHECK = check_of(
    lambda job: job.command or job.script,
    "no launcher command or script is given (-- COMMAND, FILE)",
    "rendezvous-env-mismatch",
    "launcher",
    "Launcher, script and environment agree",
    _launch,
)


def _ranks_and_gpus(context: JobContext, _given: object) -> Iterator[Result]:
    found = list(_ranks(context))
    yield from found
    if not found:
        ranks = context.layout.ranks_per_node
        counted = (
            f"{plural(ranks, 'rank')} per node ({context.layout.source})"
            if ranks
            else "an unknown number of ranks"
        )
        limit = context.gpus_per_node
        gpus = ", an unknown number of GPUs per node"
        if limit:
            gpus = f", {plural(limit, 'GPU')} per node"
        elif _is_counted_by_ssh(context):
            gpus = "; the check `ssh` counts each host's GPUs"
        yield ok(f"{counted}{gpus}")


def _ranks(context: JobContext) -> Iterator[Result]:
    gpus, per_node = context.gpus_per_node, context.layout.ranks_per_node
    text = context.variables.get("CUDA_VISIBLE_DEVICES")
    limit = gpus
    if text is not None and "$" not in text:
        ignored = _ignores_visible(context)
        if ignored:
            yield warning(
                f"deepspeed ignores CUDA_VISIBLE_DEVICES={text[:40]} because of {ignored}",
                remedy=paste("deepspeed", "--include", f"localhost:{text}"),
                source="deepspeed/launcher/runner.py, main",
                component="CUDA_VISIBLE_DEVICES",
            )
        else:
            seen = visible(text, gpus)
            problem = "lists a GPU twice, so CUDA shows none" if seen.repeated else ""
            if seen.missing:
                problem = f"names a GPU that does not exist: the node has {gpus}"
            if problem:
                yield critical(
                    f"CUDA_VISIBLE_DEVICES={text[:40]} {problem}",
                    remedy="unset CUDA_VISIBLE_DEVICES",
                    value=text[:40],
                    limit="" if gpus is None else f"0 to {gpus - 1}",
                    source="torch.cuda._parse_visible_devices",
                    component="CUDA_VISIBLE_DEVICES",
                )
            limit = len(seen.devices)
    if per_node is None:
        return
    if limit is None:
        if _is_counted_by_ssh(context):
            return
        problem = context.gpus.problem if context.gpus else ""
        yield unknown(
            f"{plural(per_node, 'rank')} per node ({context.layout.source}); the number of GPUs"
            f" per node is unknown: {problem or 'NVML was not queried'} (--gpus-per-node)"
        )
        return
    of_slurm = _is_of_slurm(context)
    says_idle = of_slurm and limit == gpus and context.layout.source == "torchrun"
    for found in occupancy(context.layout, limit, "each node"):
        if found.outcome is State.CRITICAL or says_idle:
            remedy = f"sbatch --gpus-per-node={per_node} ..." if of_slurm else "nvidia-smi -L"
            source = "CUDA_VISIBLE_DEVICES" if limit != gpus else _source(context)
            yield replace(found, remedy=remedy, source=source)


def _ignores_visible(context: JobContext) -> str:
    """Return what makes `deepspeed` ignore CUDA_VISIBLE_DEVICES; empty if it does not."""
    inner = context.deepspeed
    if inner is None:
        return ""
    text, count = context.variables["CUDA_VISIBLE_DEVICES"], inner.number("num-gpus") or 0
    first = ",".join(map(str, range(count)))
    options = sorted(_EXPLICIT & inner.options.keys())
    if context.members or inner.options.get("include", "localhost:" + first) == f"localhost:{text}":
        return ""  # the same GPUs, as the remedy suggests
    return ", ".join(f"--{name.replace('-', '_')}" for name in options)


def _is_counted_by_ssh(context: JobContext) -> bool:
    """Whether the check `ssh` compares each host's GPUs with its ranks."""
    return bool(context.layout.hosts) and context.by_ssh


def _is_of_slurm(context: JobContext) -> bool:
    return context.gpus_wanted is None and gpus_per_node(context.slurm_options) is not None


def _source(context: JobContext) -> str:
    if _is_of_slurm(context):
        return "the job's request of Slurm"
    return "--gpus-per-node" if context.gpus_wanted is not None else "NVML of this node"


RANKS = check_of(
    lambda job: job.layout.ranks_per_node is not None or "CUDA_VISIBLE_DEVICES" in job.variables,
    "the number of ranks per node is unknown (-- COMMAND)",
    "device-ordinal",
    "ranks-and-gpus",
    "Every rank has its own GPU",
    _ranks_and_gpus,
)
