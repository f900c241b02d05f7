"""The launcher command, the batch script and the environment agree about the ranks, and no node
gets more of them than it has visible GPUs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job import config_conflicts
from dshealthd.doctor.job.agreement import INVARIANTS, OCCUPANCY
from dshealthd.doctor.job.sources.launcher_command import READ, LauncherCommand
from dshealthd.doctor.job.sources.slurm_options import gpus_per_node
from dshealthd.doctor.job.start import broken
from dshealthd.doctor.remedies import paste
from dshealthd.jobs.environment import RENDEZVOUS, visible

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.slurm_script import SlurmScript

_LEFT_BEHIND = ("TORCH_NCCL_", "DEEPSPEED_TIMEOUT", "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME")
"""Variables that matter on every node but that `deepspeed` does not pass on to the others."""
INSIDE = "dshealthd doctor --job -- COMMAND  # in the script, with the words of its launch"
_EXPLICIT = frozenset({"num-gpus", "num-accelerators", "num-nodes", "include", "exclude"})


def _launch(context: JobContext, _given: object) -> Iterator[Result]:
    found = list(_judged(context))
    yield from found
    if not found:
        name = context.launcher.program if context.launcher else "environment"
        layout = context.layout
        counts = ((layout.ranks, "rank"), (layout.nodes, "node"))
        known = [plural(count, name) if count else f"unknown {name}s" for count, name in counts]
        yield ok(f"{name}: {' on '.join(known)}")


def _judged(context: JobContext) -> Iterator[Result]:
    for source in (context.command, context.script):
        if source is not None and source.value is None:
            shown, problem = textwrap.shorten(source.name, 80), source.problem
            yield unknown(problem if source.name in problem else f"{shown}: {problem}")
    if context.script is not None and context.batch_script is not None:
        if context.command is None:
            yield from _not_known(context, context.script.name, context.batch_script.problem)
        yield from _script(context, context.script.name, context.batch_script)
    start = context.start
    found = [*broken(start, INVARIANTS)]
    for one in context.alternatives if context.command is None else ():
        found += [other for other in broken(one, INVARIANTS) if other not in found]
    for row, text in found:
        program = start.program.program
        remedy = row.remedy.format(nodes=start.nodes, program=program)
        yield row.make(text, remedy, source=row.source, component=row.component or program)
    if context.command is not None and context.launcher is not None:
        yield from config_conflicts.of_accelerate(context.command.name, context.launcher)
    yield from _left_behind(context)


def _not_known(context: JobContext, name: str, problem: str) -> Iterator[Result]:
    """Yield what of a launch only the job's own shell knows."""
    launcher = context.launcher
    if launcher is None:
        why = f" ({problem})" if problem else ""
        none = "no call of deepspeed, torchrun or srun is found without running it"
        yield unknown(f"{name}: {none}{why}", INSIDE)
    elif names := _computed(context, launcher):
        yield unknown(
            f"{name}: only the shell that runs it knows {', '.join(names[:6])}: not checked here",
            INSIDE,
        )


def _computed(context: JobContext, launcher: LauncherCommand) -> list[str]:
    """Return what checks would read, and only the job's own shell can compute."""
    chain = list(launcher.chain())
    options = [pair for command in chain for pair in command.options.items()]
    found = [f"--{name}" for name, value in options if name in READ and "$" in value]
    if any(command.is_partial for command in chain):
        found.append("some options")
    if launcher.find("torchrun") is None and launcher.find("deepspeed") is None:
        found += [name for name in RENDEZVOUS if "$" in context.variables.get(name, "")]
    return found


def _script(context: JobContext, name: str, script: SlurmScript) -> Iterator[Result]:
    """Yield what the batch script states and Slurm or its shell does not do."""
    for one in script.faults:
        yield (critical if one.is_critical else warning)(
            f"{name}{one.text}",
            paste("grep", "-n", "-e", one.at, "--", name),
            source="sbatch(1); bash(1)",
            component=one.component,
        )
    asked, lost = _not_passed_on(context, script)
    if context.command is None and lost:
        make = critical if {*lost} & {*RENDEZVOUS, *script.left} else warning
        them, is_all = "it" if len(lost) == 1 else "them", "ALL" in asked or "$" in asked
        why = "`export` is missing" if is_all else f"--export={asked[:60]} holds for srun, too"
        yield make(
            f"{name} sets {', '.join(lost[:8])}, but does not pass {them} on to the ranks: {why}",
            f"export {' '.join(lost[:8])}" if is_all else "srun --export=ALL ...",
            source="srun(1), --export",
            component=lost[0],
        )


def _not_passed_on(context: JobContext, script: SlurmScript) -> tuple[str, list[str]]:
    """Return what --export says, and variables that the script sets, but ranks do not get."""
    chain = list(context.launcher.chain()) if context.launcher else []
    asked = script.directives.get("export", "ALL")
    asked = chain[0].options.get("export", asked) if chain else asked
    is_python = bool(chain) and chain[-1].program == "python"
    passes_all = "ALL" in asked or "$" in asked or "SLURM_EXPORT_ENV" in script.exports
    return asked, [
        name
        for name, is_exported in script.carried.items()
        if not (is_exported and passes_all)
        and name not in asked
        and not any(name in one.variables for one in chain)
        # other launchers set these themselves
        and (name in script.left or (chain and (is_python or name not in RENDEZVOUS)))
    ]


def _left_behind(context: JobContext) -> Iterator[Result]:
    """Yield variables that `deepspeed` does not pass on to the other nodes."""
    if context.deepspeed is None or not context.by_ssh or (context.layout.nodes or 1) == 1:
        return
    taken = context.in_deepspeed_env
    exported = (taken.value if taken else None) or ()  # an unreadable one counts as empty
    names = sorted(
        name for name in context.variables if name.startswith(_LEFT_BEHIND) and name not in exported
    )
    if names:
        these = "this" if len(names) == 1 else "these"
        yield warning(
            f"{', '.join(names[:8])}: deepspeed does not pass {these} on to the other nodes unless"
            " set in ~/.deepspeed_env",
            "cat ~/.deepspeed_env",
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


def _ranks(context: JobContext, _given: object) -> Iterator[Result]:
    gpus, per_node = context.gpus_per_node, context.layout.ranks_per_node
    text = context.variables.get("CUDA_VISIBLE_DEVICES", "$")
    shown = f"CUDA_VISIBLE_DEVICES={text[:40]}"
    limit = gpus
    if "$" not in text and (ignored := _ignores_visible(context, text)):
        yield warning(
            f"deepspeed ignores {shown} because of {ignored}",
            paste("deepspeed", "--include", f"localhost:{text}"),
            source="deepspeed/launcher/runner.py, main",
            component="CUDA_VISIBLE_DEVICES",
        )
    elif "$" not in text:
        seen = visible(text, gpus)
        limit = len(seen.devices)
        problem = "lists a GPU twice, so CUDA shows none" if seen.repeated else ""
        if seen.missing:
            problem = f"names a GPU that does not exist: the node has {gpus}"
        if problem:
            yield critical(
                f"{shown} {problem}",
                "unset CUDA_VISIBLE_DEVICES",
                source="torch.cuda._parse_visible_devices",
                component="CUDA_VISIBLE_DEVICES",
            )
    is_counted_by_ssh = bool(context.layout.hosts) and context.by_ssh
    if per_node is not None and limit is None and not is_counted_by_ssh:
        problem = context.gpus.problem if context.gpus else ""
        yield unknown(
            f"{plural(per_node, 'rank')} per node ({context.layout.source}); the number of GPUs"
            f" per node is unknown: {problem or 'NVML was not queried'} (--gpus-per-node)"
        )
    of_slurm = context.gpus_wanted is None and gpus_per_node(context.slurm_options) is not None
    says_idle = of_slurm and limit == gpus and context.layout.source == "torchrun"
    remedy = f"sbatch --gpus-per-node={per_node} ..." if of_slurm else "nvidia-smi -L"
    for row, text in broken(replace(context.start, gpus=limit), OCCUPANCY):
        if row.make is critical or says_idle:
            said = f"each node: {text}"
            yield row.make(said, remedy, limit=str(limit), component=row.component)


def _ignores_visible(context: JobContext, text: str) -> str:
    """Return what makes `deepspeed` ignore CUDA_VISIBLE_DEVICES; empty if it does not."""
    inner = context.deepspeed
    if inner is None:
        return ""
    first = ",".join(map(str, range(inner.number("num-gpus") or 0)))
    options = sorted(_EXPLICIT & inner.options.keys())
    if context.members or inner.options.get("include", "localhost:" + first) == f"localhost:{text}":
        return ""  # the same GPUs, as the remedy suggests
    return ", ".join(f"--{name.replace('-', '_')}" for name in options)


RANKS = check_of(
    lambda job: job.layout.ranks_per_node is not None or "CUDA_VISIBLE_DEVICES" in job.variables,
    "the number of ranks per node is unknown (-- COMMAND)",
    "device-ordinal",
    "ranks-and-gpus",
    "Every rank has its own GPU",
    _ranks,
)
