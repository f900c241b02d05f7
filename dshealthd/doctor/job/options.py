"""Options that launchers take, and what they do with them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dshealthd.doctor.check import warning
from dshealthd.doctor.job.sources.launcher_command import (
    EXCLUSIVE,
    FLAGS,
    FORMS,
    VALUED,
    LauncherCommand,
    nearest,
)
from dshealthd.doctor.job.sources.programs import lost_words
from dshealthd.doctor.job.start import Invariant, Start

_PLACES = {
    "torchrun": ("nproc-per-node", "nnodes", "rdzv-endpoint", "rdzv-backend", "standalone"),
    "accelerate": ("num-processes", "num-machines", "machine-rank", "main-process-ip", "multi-gpu"),
    "deepspeed": ("hostfile", "num-nodes", "no-ssh"),
}
"""Options that say where ranks run, and that no script has for itself."""
_KINDS = {
    "multi-gpu": "MULTI_GPU",
    "use-fsdp": "FSDP",
    "use-deepspeed": "DEEPSPEED",
    "use-megatron-lm": "MEGATRON_LM",
    "cpu": "NO",
}
"""Options of Accelerate that choose what it starts, and `distributed_type` for the same."""
_SETTINGS = {
    "FSDP": re.compile(r"fsdp-(?!version)\w.*"),
    "DEEPSPEED": re.compile(r"deepspeed-config-file|zero-stage|offload-\w+-device"),
    "MEGATRON_LM": re.compile(r"megatron-lm-(tp|pp)-degree"),
}
"""Options of Accelerate that only one kind of training reads."""


def _given(start: Start) -> Iterator[tuple[str, LauncherCommand]]:
    """Yield the launchers of a start by name, with what a script asks of Slurm as the first."""
    yield "sbatch", LauncherCommand("srun", start.requested, (), strange=start.strange)
    for one in start.chain:
        yield "accelerate" if one.by_accelerate else one.program, one


def _strange(start: Start) -> Iterator[str]:
    """Yield an option that is none of its launcher's, but resembles one or is another's."""
    for launcher, one in _given(start):
        table = {"sbatch": "srun"}.get(launcher, launcher)
        for name in one.strange:
            near, is_near = nearest(name, VALUED[table] | FLAGS[table])
            others = [] if table == "srun" else [other for other in VALUED if name in VALUED[other]]
            if is_near or others:
                advice = f"did you mean --{near}?" if is_near else f"it is one of {others[0]}"
                yield f"{launcher} has no option --{name}: {advice}"


def _misfit(start: Start) -> Iterator[str]:
    """Yield an option whose value cannot be one."""
    for launcher, one in _given(start):
        for name, value in one.options.items():
            form = FORMS.get(name)
            is_text = not re.search(r"[$<{@%]", value)  # a template is filled in before
            if form and is_text and not re.fullmatch(form, value, re.IGNORECASE):
                shown = f"is {value[:40]!r}, which it cannot be" if value else "is empty"
                why = [f"Slurm sets {v} only with --{o}" for v, o in start.unset.items()]
                because = f": {'; '.join(why)}" if why and not value else ""
                yield f"{one.spelled(name)} of {launcher} {shown}{because}"


def _no_script(start: Start) -> Iterator[str]:
    is_launcher = start.program.program in {"torchrun", "deepspeed"}
    is_known = not start.program.arguments and not any(one.is_partial for one in start.chain)
    if is_launcher and is_known:
        yield f"{start.program.program} is given no script to run"


def _behind_script(start: Start) -> Iterator[str]:
    """Yield an option of the launcher that stands behind the script, which gets it instead."""
    program = start.program
    names = _PLACES.get("accelerate" if program.by_accelerate else program.program, ())
    is_known = not "".join(program.arguments[:1]).startswith("$")  # which may hold its options
    for at in (name.replace("-", "_") for name in names if is_known):
        if at in program.stated and not program.options.keys() & {*names, "nnodes", "config-file"}:
            yield f"--{at} stands behind the script, which gets it in place of the launcher"


def _other_kind(start: Start) -> Iterator[str]:
    """Yield what a configuration of Accelerate states, but what it starts does not read."""
    inner = start.torchrun
    if inner is None or not inner.by_accelerate:
        return
    stated, count = inner.options.get("distributed-type", ""), inner.number("num-processes") or 0
    name = next((name for name in _KINDS if name in inner.options), "")
    kind = _KINDS.get(name, stated)
    shown = f"--{name.replace('-', '_')}" if name else f"distributed_type {kind}"
    if name and stated in _SETTINGS and stated != kind:
        yield f"{shown} overrides distributed_type {stated}: it has no effect"
    if kind == "NO" and count > 1:
        yield f"{shown} starts one process, not num_processes {count}"
    # without a kind, a configuration of the user's home may say more
    for other, pattern in _SETTINGS.items() if kind and (kind != "NO" or count > 1) else ():
        if other != kind and (found := next(filter(pattern.fullmatch, inner.options), "")):
            yield f"{found.replace('-', '_')} has no effect: {shown} is no {other}"


def _exclusive(start: Start) -> Iterator[str]:
    """Yield options of which a launcher takes one alone."""
    for launcher, one in _given(start):
        for group in EXCLUSIVE.get({"sbatch": "srun"}.get(launcher, launcher), ()):
            names = sorted({*group.split()} & one.options.keys())
            if names[1:]:
                dashes = "" if launcher == "accelerate" else "--"  # keys of its configuration
                shown = " and ".join(
                    dashes + (name if one.program == "srun" else name.replace("-", "_"))
                    for name in names
                )
                yield f"{shown} exclude each other: {launcher} refuses them"


def _lost(start: Start) -> Iterator[str]:
    """Yield words behind the script of a shell, which it does not read."""
    outer = start.find("srun")
    if outer and (lost := lost_words(outer.arguments)):
        yield f"bash -c runs {lost[:40]!r} alone: the words behind it are its $0, $1, ..."


OPTIONS = (
    Invariant(_exclusive, "options", "sbatch(1); deepspeed/launcher/runner.py", is_refused=True),
    Invariant(_strange, "options", "--help of the launcher", is_refused=True),
    Invariant(_misfit, "options", "man page or --help of the launcher", is_refused=True),
    Invariant(_no_script, ""),
    Invariant(_behind_script, "options"),
    Invariant(_other_kind, "distributed_type", "accelerate/commands/launch.py", make=warning),
    Invariant(_lost, "bash -c", "bash(1), -c"),
)
"""In which the options of launchers must agree with what they take."""
