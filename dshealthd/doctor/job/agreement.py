"""What a job is given and what starts there agree: one table of invariants over one model.

A `Start` holds who starts how many processes where and with what, as a batch script, a command, a
configuration of Accelerate or a pod states it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, critical, warning
from dshealthd.doctor.job.sources.launcher_command import (
    FLAGS,
    VALUED,
    LauncherCommand,
    lost_words,
    nearest,
)
from dshealthd.doctor.job.sources.layout import Layout, refusal
from dshealthd.doctor.job.sources.manifest import MIB
from dshealthd.doctor.job.sources.shell import LISTS, PER_NODE
from dshealthd.doctor.job.sources.slurm_script import gpus_per_node, tasks_per_node
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMON = (
    *("nnodes", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "master-addr", "master-port"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
)
"""Options and variables that must be the same on all nodes of a job."""
_OF_NODE = re.compile(rf"\$\{{?({'|'.join(sorted(PER_NODE))})\b")
_DEGREES = re.compile(
    r"((tensor|pipeline)_model|context|data|tensor|pipeline)_parallel"
    r"(_(shard|replicate))?_(size|degree)|parallelism_config_(tp|cp|sp|dp_shard|dp_replicate)_size"
)
"""Arguments of Megatron, NeMo, torchtitan and Accelerate that divide the ranks into parts."""
_OF_DATA = re.compile("data|_dp_")
_NVIDIA = re.compile(
    r"(?:.*:)?(?:nvidia|tesla|titan|[rg]tx|g?[abhklptv]\d)[\w.-]*:\d+", re.IGNORECASE
)
"""A request of Slurm for GPUs whose type is NVIDIA's; a container may see AMD's without --rocm."""
_ASKS = ("gres", "gpus", "gpus-per-node")
_DOCKER = {
    "driver": (
        ("--gpus", "--runtime", "--device", "--privileged"),
        "has no GPU in the container, unless the runtime of NVIDIA is its default",
    ),
    "network": (
        ("--network", "--net", "-p", "--publish"),
        "has a network of its own, where other nodes do not reach the ranks",
    ),
    "shared memory": (
        ("--ipc", "--shm-size", "-v", "--volume", "--mount"),
        "has 64 MB of shared memory: too few for NCCL between the GPUs of a node",
    ),
}
_APPTAINER = {
    "driver": (
        ("--nv", "--nvccli"),
        "has no driver in the container, unless APPTAINER_NV or apptainer.conf says so",
    )
}
RUNTIMES: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    "docker": _DOCKER,
    "podman": _DOCKER,
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
}
"""What ranks need in a container, the options that give it, and what it lacks without them."""
_NV = re.compile("(?:APPTAINER|SINGULARITY)_NV(?:CCLI)?")
_LEAST_MEMORY = 256 << 20
"""Bytes of a process that trains, at least: `import torch` alone has 219 MiB (2.13)."""
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
_LISTED = re.compile(rf"\$\{{?({'|'.join(LISTS)}|SLURM_NODELIST)\b(?!:[\d ]|[^}}]*[\[\]])")
_NO_HOST = re.compile(r"[\s,()]|[^\[]\[|\[[^\]]*$")
_VARIES_BY = {
    "rank": {"SLURM_LOCALID": "nodes", "SLURM_NODEID": "tasks"},
    "node-rank": {"SLURM_LOCALID": "nodes"},
    "local-rank": {"SLURM_PROCID": "nodes", "SLURM_NODEID": "tasks"},
}
"""Ranks, the variables of Slurm that are another kind of rank, and of what the job then has
several.
"""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A command, the nodes or pods on which it starts, and what each of these is given."""

    command: LauncherCommand | None
    layout: Layout
    """What the command starts."""
    variables: Mapping[str, str]
    requested: Mapping[str, str] = field(default_factory=dict)
    """What the job, not its srun, asks of Slurm, by option."""
    nodes: int | None = None
    """Nodes that the job is given."""
    given: str = ""
    """Who gives them, for people."""
    gpus: int | None = None
    """GPUs that each of them has for the job."""
    memory: int | None = None
    """Bytes of memory that each of them gives, if they are limited."""
    copies: int = 1
    """Nodes on which these words start the command."""
    pool: Mapping[str, set[int]] = field(default_factory=dict)
    """Slots of each host, as a hostfile gives them."""
    name: str = ""
    """What starts it, for people: empty for a script's command."""
    strange: Sequence[str] = ()
    """Options in its script that sbatch does not have."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Variables that its script reads and Slurm does not set, with the option that would."""

    @property
    def chain(self) -> list[LauncherCommand]:
        """The launchers, from the outermost in."""
        return list(self.command.chain()) if self.command else []

    def find(self, program: str) -> LauncherCommand | None:
        """Return the call of a launcher, if there is one."""
        return self.command.find(program) if self.command else None

    @property
    def program(self) -> LauncherCommand:
        """The innermost launcher, or Python."""
        return [LauncherCommand("", {}, ()), *self.chain][-1]

    @property
    def torchrun(self) -> LauncherCommand | None:
        """The call of torchrun, if there is one."""
        return self.find("torchrun")

    def option(self, name: str) -> int | None:
        """Return an option of torchrun as a number; None if it is none."""
        return self.torchrun.number(name) if self.torchrun else None

    @property
    def has_ranks(self) -> bool:
        """Whether what starts is the ranks; a single Python may start others in its own way."""
        return self.program.program != "python" or (self.layout.ranks or 0) > 1

    @property
    def numbers(self) -> dict[str, int]:
        """The arguments of the training that are whole numbers."""
        given = {name.replace("-", "_"): text for name, text in self.program.options.items()}
        stated = {**given, **self.program.stated}
        return {name: int(text) for name, text in stated.items() if natural(text) is not None}

    @property
    def degrees(self) -> dict[str, int]:
        """The parts into which the arguments of the training divide the ranks."""
        numbers = self.numbers.items()
        return {name: value for name, value in numbers if _DEGREES.fullmatch(name) and value}

    @property
    def model_parallel(self) -> int | None:
        """Ranks that share one copy of the model by these arguments; None if only a shell knows."""
        stated = self.program.stated
        if any(_DEGREES.fullmatch(name) and "$" in value for name, value in stated.items()):
            return None
        return math.prod(v for name, v in self.degrees.items() if not _OF_DATA.search(name))


class Invariant(NamedTuple):
    """Something in which a start must agree with itself."""

    broken: Callable[[Start], str]
    """What disagrees; empty where all agrees, as far as known."""
    component: str
    source: str = ""
    remedy: str = ""
    """For a script; `{nodes}` and `{program}` are those of the start."""
    is_refused: bool = False
    """Whether nothing then starts as it is stated, so that the rest does not matter."""
    make: Callable[..., Result] = critical


def disagreements(start: Start) -> Iterator[Result]:
    """Yield where the quantities of a start do not fit each other."""
    for row in INVARIANTS:
        if text := row.broken(start):
            program = start.program.program
            remedy = "" if start.name else row.remedy.format(nodes=start.nodes, program=program)
            component = row.component or program
            yield row.make(f"{start.name}{text}", remedy, source=row.source, component=component)
            if row.is_refused:
                return


def _waits(start: Start) -> str:
    wanted, program = start.layout.nodes, start.program.program
    if program == "python":  # Lightning and NeMo compare it with Slurm's when they start
        wanted = start.numbers.get("num_nodes") if start.has_ranks else None
    if not wanted or not start.nodes or wanted == start.nodes:
        return ""
    return f"{program} waits for {plural(wanted, 'node')}, but {start.given}"


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


def _no_single_host(start: Start) -> str:
    """Return an address that is several hosts, or cannot be one."""
    nodes = start.nodes or start.layout.nodes
    options = start.program.options if start.program.program != "python" else start.variables
    for name in ("rdzv-endpoint", "master-addr", "MASTER_ADDR"):
        value = options.get(name, "")
        shown = f"{name if name.isupper() else start.program.spelled(name)} {value[:60]}"
        listed = _LISTED.search(value)
        if listed and ((nodes or 1) > 1 or listed[1] == "ALL_OWN_ADDRESSES"):
            return f"{shown} {LISTS.get(listed[1], LISTS['SLURM_JOB_NODELIST'])}, no host"
        if "$" not in value and _NO_HOST.search(value):
            return f"{shown} cannot be a host"
    return ""


def _other_rank(start: Start) -> str:
    """Return a rank that is set to another kind of rank."""
    program, tasks = start.program, start.layout.ranks_per_node or 1
    have = {name.replace("_", "-"): value for name, value in program.stated.items()}
    if program.program == "python":
        have = {n.lower().replace("_", "-"): v for n, v in start.variables.items()} | have
    else:
        have, tasks = dict(program.options), 1
    several = {"nodes": (start.nodes or start.layout.nodes or 1) > 1, "tasks": tasks > 1}
    for name, wrong in _VARIES_BY.items():
        for variable, of in wrong.items():
            if several[of] and re.search(rf"\$\{{?{variable}\b", have.get(name, "")):
                shown = program.spelled(name) if name in program.options else name
                return (
                    f"{shown} is {variable}, which is another number: {of} of the job have it too"
                )
    return ""


def _behind_script(start: Start) -> str:
    """Return an option of the launcher that stands behind the script, which gets it instead."""
    program = start.program
    if program.program != "torchrun":
        return ""
    names = ("nproc-per-node", "nnodes", "rdzv-endpoint", "rdzv-backend", "standalone")
    if program.by_accelerate:
        names = ("num-processes", "num-machines", "machine-rank", "main-process-ip", "multi-gpu")
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


def _varies(start: Start) -> str:
    """Return what must be the same on all nodes, but is computed on each of them."""
    if start.copies == 1 or (start.torchrun and start.layout.nodes == 1):
        return ""
    stated = start.torchrun.options if start.torchrun else start.variables
    for name in _COMMON:
        value = stated.get(name, "")
        if found := _OF_NODE.search(value):
            return (
                f"{'--' if start.torchrun else ''}{name} {value[:80]} is another on each node,"
                f" because each node's own shell expands {found[1]}: the ranks never meet"
            )
    return ""


def _node_is_none(start: Start) -> str:
    nodes, rank = start.layout.nodes, start.option("node-rank")
    if not nodes or rank is None or rank < nodes:
        return ""
    return f"node {rank} of {plural(nodes, 'node')}: ranks of nodes begin with 0"


def _undivided(start: Start) -> str:
    nodes, total = start.layout.nodes, start.option("num-processes")
    if not nodes or not total or total % nodes == 0:
        return ""
    return (
        f"{total} processes cannot be divided among {plural(nodes, 'machine')}: accelerate starts"
        f" {total // nodes} on each"
    )


def _same_rank(start: Start) -> str:
    """Return a rank that all nodes have, though each needs another."""
    inner, protected = start.torchrun, "unless '...' or \\ protects their $"
    if start.copies == 1 or (inner and start.layout.nodes == 1):
        return ""
    if inner is None:
        rank = start.variables.get("RANK", "") if start.program.program == "python" else ""
        same = natural(rank) is not None and f"RANK={rank}"
        return f"{same} is the same in all {start.copies} copies: ranks must differ" if same else ""
    default = "" if inner.is_partial else "static"
    text = inner.options.get("node-rank", "$" if inner.is_partial else "0")
    if natural(text) is None or inner.options.get("rdzv-backend", default) != "static":
        return ""
    name = "machine" if inner.by_accelerate else "node"
    return (
        f"every node gets --{name}-rank {text}, and the static rendezvous needs another on each:"
        f" the batch shell expands words of srun once, for all nodes, {protected}"
    )


def _world(start: Start) -> str:
    """Return a WORLD_SIZE that is not the number of tasks, which only a launcher overrides."""
    said, ranks = natural(start.variables.get("WORLD_SIZE")), start.layout.ranks
    is_alone = start.program.program == "python" and start.has_ranks
    if not is_alone or not said or ranks in {None, said}:
        return ""
    return (
        f"WORLD_SIZE={said}, but {plural(ranks or 0, 'rank')} start: the rendezvous waits for the"
        " others, or refuses ranks"
    )


def _parts(start: Start) -> str:
    """Return ranks that cannot be divided as the arguments of the training say."""
    have, degrees, ranks = start.numbers, start.degrees, start.layout.ranks
    if ranks is None or not degrees or not start.has_ranks:
        return ""
    whole = math.prod(degrees.values())
    if ranks % whole:
        product = " x ".join(f"{name} {value}" for name, value in degrees.items())
        said = f"{plural(ranks, 'rank')} ({start.layout.source})"
        return f"{said} cannot be divided into groups of {product} = {whole}"
    is_data = any(map(_OF_DATA.search, degrees))
    copies = ranks if is_data else ranks // whole
    batch, micro = have.get("global_batch_size"), have.get("micro_batch_size")
    if not batch or not micro or is_data or batch % (micro * copies) == 0:
        return ""
    return (
        f"global_batch_size {batch} is not a multiple of micro_batch_size {micro} x"
        f" {plural(copies, 'data-parallel rank')} ({ranks} / {whole}) = {micro * copies}"
    )


def _too_often(start: Start) -> str:
    """Return a launcher of all ranks that srun starts more than once for them."""
    program, outer = start.program.program, start.find("srun")
    if outer is None or program not in {"torchrun", "deepspeed"}:
        return ""
    nodes = start.nodes or start.layout.nodes
    given = {"nodes": str(nodes)} if nodes else {}
    tasks = tasks_per_node({**given, **start.requested, **outer.options})
    by_ssh = program == "deepspeed" and "no-ssh" not in start.program.options
    if not ((tasks or 1) > 1 or (by_ssh and (start.nodes or 1) > 1)):
        return ""
    starts = (
        f"{tasks} times on each node" if (tasks or 1) > 1 else f"on each of {start.nodes} nodes"
    )
    return (
        f"srun starts {program} {starts}, and each one starts all ranks of the"
        f" {'job' if by_ssh else 'node'}: every rank exists more than once"
    )


def _too_rarely(start: Start) -> str:
    if start.program.program != "torchrun" or start.copies > 1 or (start.nodes or 1) == 1:
        return ""
    if start.name or start.find("srun"):
        return ""
    return f"the job has {start.nodes} nodes but torchrun starts only on the first: srun is missing"


def _no_script(start: Start) -> str:
    is_launcher = start.program.program in {"torchrun", "deepspeed"}
    if not is_launcher or start.program.arguments or any(one.is_partial for one in start.chain):
        return ""
    return f"{start.program.program} is given no script to run"


def _no_host(start: Start) -> str:
    inner = start.find("deepspeed")
    problem = refusal(start.pool, inner.options) if inner and start.pool else ""
    is_known = problem not in {"", "$"}
    return f"deepspeed refuses --include or --exclude, and ends at once: {problem}" * is_known


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


def _beyond(start: Start) -> str:
    """Return more nodes than tasks, and more for srun than the job has."""
    job, outer = start.requested, start.find("srun")
    nodes, tasks = natural(job.get("nodes")), natural(job.get("ntasks"))
    if nodes and tasks and tasks < nodes:
        shown = f"{plural(tasks, 'task')} for {plural(nodes, 'node')}"
        return f"{shown}: Slurm gives the job as many nodes as it has tasks"
    step = outer.options if outer else {}
    asked = natural(step.get("nodes"))
    if nodes and asked and asked > nodes:
        return f"srun asks for {plural(asked, 'node')}, but the job has {nodes}"
    have, wanted = gpus_per_node(job), gpus_per_node({"nodes": job.get("nodes", ""), **step})
    if have and wanted and wanted > have:
        return f"srun asks for {plural(wanted, 'GPU')} on each node, but the job has {have}"
    return ""


def _devices(start: Start) -> str:
    """Return other processes than Slurm's tasks: Lightning compares both when it starts."""
    outer, wanted = start.find("srun"), start.numbers.get("devices")
    step = {**start.requested, **outer.options} if outer else {}
    tasks = natural(step.get("ntasks-per-node"))
    if start.program.program != "python" or not wanted or not tasks or wanted == tasks:
        return ""
    started = f"srun starts {plural(tasks, 'task')} on each node (--ntasks-per-node)"
    return f"the training wants {plural(wanted, 'process', 'processes')} (devices), but {started}"


def _isolated(start: Start) -> str:
    """Return what a container is not given that the ranks in it need: each runtime's own table."""
    outer = start.find("srun")
    asked = {**start.requested, **(outer.options if outer else {})}
    words = [word for one in start.chain for word in one.wrapper]
    at, runtime = next(
        ((at, one) for at, one in enumerate(map(os.path.basename, words)) if one in RUNTIMES),
        (0, ""),
    )
    if (
        not runtime
        or words[at + 1 : at + 2] == ["build"]
        or any(word.startswith("$") for word in words)
    ):
        return ""  # a variable may hold the options
    is_nvidia = any(_NVIDIA.fullmatch(asked.get(name, "")) for name in _ASKS)
    ranks, nodes = start.layout.ranks_per_node or 1, start.nodes or start.layout.nodes or 1
    needed = {"driver": is_nvidia, "network": nodes > 1, "shared memory": ranks > 1}
    for need, (options, lack) in RUNTIMES[runtime].items():
        given = any(word.partition("=")[0] in options for word in words[at:])
        if needed[need] and not given and not any(map(_NV.fullmatch, start.variables)):
            return f"{runtime} without {options[0]} {lack}"
    return ""


def _lost(start: Start) -> str:
    """Return words behind the script of a shell, which it does not read."""
    outer = start.find("srun")
    lost = lost_words(outer.arguments) if outer else ""
    return f"bash -c runs {lost[:40]!r} alone: the words behind it are its $0, $1, ..." * bool(lost)


def _same_port(start: Start) -> str:
    """Return a port that launches which run at once on a node would share."""
    inner = start.torchrun
    at_once = max((one.at_once or 1 for one in start.chain), default=1)
    if inner is None or at_once == 1 or inner.is_partial or "standalone" in inner.options:
        return ""
    text = inner.options.get("rdzv-endpoint") or inner.options.get("master-port", "29500")
    if start.nodes != 1 or "$" in text or re.search(r":0$|^0$", text):
        return ""
    port = text.rpartition(":")[2]
    return f"{at_once} launches at once on one node share the port {port}: one alone can open it"


def _little_memory(start: Start) -> str:
    ranks = start.layout.ranks_per_node or 1
    if start.memory is None or start.memory >= ranks * _LEAST_MEMORY:
        return ""
    return (
        f"{start.memory / MIB:.3g} MiB of memory for {plural(ranks, 'process', 'processes')}: each"
        f" takes more than {_LEAST_MEMORY // MIB} MiB, and is killed (a number of --mem without a"
        " unit is in MiB, one of Kubernetes in bytes)"
    )


INVARIANTS = (
    Invariant(_exclusive, "options", "sbatch(1); deepspeed/launcher/runner.py", is_refused=True),
    Invariant(_misfit, "options", "man page or --help of the launcher", is_refused=True),
    Invariant(_beyond, "srun", "srun(1)", is_refused=True),
    Invariant(_no_script, ""),
    Invariant(_behind_script, "options"),
    Invariant(_other_kind, "distributed_type", "accelerate/commands/launch.py", make=warning),
    Invariant(
        _no_single_host,
        "rendezvous",
        "sbatch(1), SLURM_JOB_NODELIST",
        "scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1  # in the script",
    ),
    Invariant(_other_rank, "rank", "srun(1), OUTPUT ENVIRONMENT VARIABLES"),
    Invariant(_waits, "", remedy="torchrun --nnodes={nodes} ..."),
    Invariant(
        _varies,
        "rendezvous",
        remedy="scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1  # in the script",
    ),
    Invariant(_node_is_none, "--node-rank"),
    Invariant(_undivided, "--num-processes"),
    Invariant(
        _same_rank,
        "--node-rank",
        "torch/distributed/run.py, --node-rank",
        "srun torchrun --rdzv-backend=c10d --rdzv-endpoint=$HOST:$PORT ...",
    ),
    Invariant(_world, "WORLD_SIZE"),
    Invariant(_parts, "parallelism"),
    Invariant(_too_often, "srun", remedy="srun --ntasks-per-node=1 {program} ..."),
    Invariant(_too_rarely, "torchrun", remedy="srun --ntasks-per-node=1 torchrun ..."),
    Invariant(
        _no_host,
        "--include",
        "deepspeed/launcher/runner.py, parse_resource_filter",
        "deepspeed --include HOST:SLOT,... SCRIPT",
    ),
    Invariant(_devices, "devices", "lightning/fabric/plugins/environments/slurm.py"),
    Invariant(_little_memory, "memory", "sbatch(1), --mem"),
    Invariant(_isolated, "container", "docker-run(1); apptainer-exec(1)", make=warning),
    Invariant(_lost, "bash -c", "bash(1), -c"),
    Invariant(_same_port, "--master-port", "torch/distributed/run.py", "dshealthd free-port"),
)
"""In which a start must agree with itself."""


def occupancy(start: Start, place: str) -> Iterator[Result]:
    """Yield processes of a node or pod that have no GPU, and GPUs that have no process."""
    ranks, gpus = start.layout.ranks_per_node, start.gpus
    for one in start.chain:
        if ranks and gpus and ranks <= gpus:  # else one alone has too many
            ranks = one.at_once and min(gpus, ranks * one.at_once)
    if ranks and gpus and ranks != gpus:
        make, effect = warning, "idle GPUs"
        if ranks > gpus:
            make, effect = critical, "ranks without a GPU fail with `invalid device ordinal`"
        said = f"{plural(ranks, 'process', 'processes')} ({start.layout.source})"
        if (start.layout.nodes or 1) > 1 and (total := start.option("num-processes")):
            said += f" of num_processes {total}, the sum of all nodes,"
        yield make(
            f"{place}: {said} for {plural(gpus, 'GPU')}: {effect}",
            limit=str(gpus),
            component="LOCAL_RANK",
        )
