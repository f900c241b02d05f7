"""Options that launchers take, and what they do with them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dshealthd.doctor.check import warning
from dshealthd.doctor.job.sources.launcher_command import (
    FLAGS,
    VALUED,
    LauncherCommand,
    lost_words,
    nearest,
)
from dshealthd.doctor.job.start import Invariant

if TYPE_CHECKING:
    from dshealthd.doctor.job.start import Start

_PLACES = {
    "torchrun": ("nproc-per-node", "nnodes", "rdzv-endpoint", "rdzv-backend", "standalone"),
    "accelerate": ("num-processes", "num-machines", "machine-rank", "main-process-ip", "multi-gpu"),
    "deepspeed": ("hostfile", "num-nodes", "no-ssh"),
}
"""Options that say where ranks run, and that no script has for itself."""
EXCLUSIVE = {
    # Slurm 22.05.8, which does not refuse what sbatch(1) says of --hint
    "srun": (
        *("mem mem-per-cpu mem-per-gpu", "cpus-per-task cpus-per-gpu"),
        *("ntasks-per-gpu gpus-per-task", "ntasks-per-gpu gpus-per-socket"),
        "ntasks-per-gpu ntasks-per-node",
    ),
    # deepspeed/launcher/runner.py, parse_resource_filter and main
    "deepspeed": (
        "include exclude",
        *(f"include {one}" for one in ("num-gpus", "num-accelerators", "num-nodes")),
        *(f"exclude {one}" for one in ("num-gpus", "num-accelerators", "num-nodes")),
    ),
    # accelerate/commands/launch.py, launch_command; utils/dataclasses.py, DeepSpeedPlugin
    "accelerate": (
        "cpu multi-gpu tpu use-deepspeed use-fsdp use-megatron-lm",
        *(
            f"deepspeed-config-file {one}"
            for one in (
                *("zero-stage", "gradient-accumulation-steps", "gradient-clipping"),
                *("offload-optimizer-device", "offload-param-device", "zero3-save-16bit-model"),
            )
        ),
    ),
}
"""Options of which a launcher takes one alone; sbatch refuses those of srun."""


_COUNT = r"-?\d+"
_COUNTED = r"([a-z]\w*:)?([\w.-]+:)?\d+(,.*)?"
FORMS = {
    **dict.fromkeys(
        (
            *("ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "cpus-per-gpu"),
            *("node-rank", "master-port", "max-restarts", "num-processes", "num-nodes"),
            *("num-gpus", "num-accelerators", "zero-stage"),
        ),
        _COUNT,
    ),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), _COUNTED),
    "gres": "[a-z].*",
    "nnodes": r"\d+(:\d+)?",
    "nproc-per-node": r"[1-9]\d*|[a-z]\w*",
    "nodes": r"\d+[km]?([-:,]\d+[km]?)*",
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), r"\d+(\.\d+)?[kmgt]?b?"),
    "time": r"(\d+-)?\d+(:\d+){0,2}|unlimited|infinite|-1",
}
"""What values of options can be, in any case of letters."""
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


def _misfit(start: Start) -> str:
    """Return an option that is none of its launcher's, or whose value cannot be one."""
    sbatch = LauncherCommand("srun", start.requested, (), strange=start.strange)
    for one in (sbatch, *start.chain):
        launcher = "accelerate" if one.by_accelerate else one.program
        launcher = "sbatch" if one is sbatch else launcher
        for name in one.strange:
            known = VALUED[one.program] | FLAGS[one.program]
            if launcher == "accelerate":
                known = VALUED[launcher] | FLAGS[launcher]
            near, is_near = nearest(name, known)
            others = [] if one.program == "srun" else [o for o in VALUED if name in VALUED[o]]
            if is_near or others:
                advice = f"did you mean --{near}?" if is_near else f"it is one of {others[0]}"
                return f"{launcher} has no option --{name}: {advice}"
        for name, value in one.options.items():
            form = FORMS.get(name)
            is_text = not re.search(r"[$<{@%]", value)  # a template is filled in before
            if form and is_text and not re.fullmatch(form, value, re.IGNORECASE):
                shown = f"is {value[:40]!r}, which it cannot be" if value else "is empty"
                why = [f"Slurm sets {v} only with --{o}" for v, o in start.unset.items()]
                because = f": {'; '.join(why)}" if why and not value else ""
                return f"{one.spelled(name)} of {launcher} {shown}{because}"
    return ""


def _no_script(start: Start) -> str:
    is_launcher = start.program.program in {"torchrun", "deepspeed"}
    if not is_launcher or start.program.arguments or any(one.is_partial for one in start.chain):
        return ""
    return f"{start.program.program} is given no script to run"


def _behind_script(start: Start) -> str:
    """Return an option of the launcher that stands behind the script, which gets it instead."""
    program = start.program
    names = _PLACES.get("accelerate" if program.by_accelerate else program.program, ())
    said = program.stated
    for name in names:
        at = name.replace("-", "_")
        if at in said and not program.options.keys() & {*names, "nnodes"}:
            return f"--{at} stands behind the script, which gets it in place of the launcher"
    return ""


def _other_kind(start: Start) -> str:
    """Return what a configuration of Accelerate states, but what it starts does not read."""
    inner = start.torchrun
    if inner is None or not inner.by_accelerate:
        return ""
    stated = inner.options.get("distributed-type", "")
    chosen = [(name, kind) for name, kind in _KINDS.items() if name in inner.options]
    name, kind = chosen[0] if chosen else ("", stated)
    if name and stated in _SETTINGS and stated != kind:
        return f"--{name.replace('-', '_')} overrides distributed_type {stated}: it has no effect"
    if not stated and not chosen:
        return ""  # a configuration of the user's home may say more
    for other, pattern in _SETTINGS.items():
        found = next(filter(pattern.fullmatch, inner.options), "")
        if found and other != kind and (kind != "NO" or (inner.number("num-processes") or 0) > 1):
            shown = f"--{name.replace('-', '_')}" if name else f"distributed_type {kind}"
            return f"{found.replace('-', '_')} has no effect: {shown} is no {other}"
    count = inner.number("num-processes") or 0
    if kind == "NO" and count > 1:
        return f"distributed_type NO starts one process, not num_processes {count}"
    return ""


def _exclusive(start: Start) -> str:
    """Return options of which a launcher takes one alone."""
    given = [(one.program, one.options) for one in start.chain]
    for program, options in (*given, ("sbatch", start.requested)):
        launcher = {"torchrun": "accelerate", "sbatch": "srun"}.get(program, program)
        for group in EXCLUSIVE.get(launcher, ()):
            names = sorted({*group.split()} & options.keys())
            if names[1:]:
                dashes = "" if launcher == "accelerate" else "--"  # keys of its configuration
                names = names if launcher == "srun" else [one.replace("-", "_") for one in names]
                shown = " and ".join(dashes + one for one in names)
                return f"{shown} exclude each other: {program if dashes else launcher} refuses them"
    return ""


def _lost(start: Start) -> str:
    """Return words behind the script of a shell, which it does not read."""
    outer = start.find("srun")
    lost = lost_words(outer.arguments) if outer else ""
    return f"bash -c runs {lost[:40]!r} alone: the words behind it are its $0, $1, ..." * bool(lost)


OPTIONS = (
    Invariant(_exclusive, "options", "sbatch(1); deepspeed/launcher/runner.py", is_refused=True),
    Invariant(_misfit, "options", "man page or --help of the launcher", is_refused=True),
    Invariant(_no_script, ""),
    Invariant(_behind_script, "options"),
    Invariant(_other_kind, "distributed_type", "accelerate/commands/launch.py", make=warning),
    Invariant(_lost, "bash -c", "bash(1), -c"),
)
"""In which the options of launchers must agree with what they take."""
