"""What a job is given and what starts there agree: one table of invariants over one model."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import critical, warning
from dshealthd.doctor.job.options import OPTIONS
from dshealthd.doctor.job.sources.layout import refusal
from dshealthd.doctor.job.sources.manifest import MIB
from dshealthd.doctor.job.sources.shell import LISTS, PER_NODE
from dshealthd.doctor.job.sources.slurm_script import gpus_per_node, tasks_per_node
from dshealthd.doctor.job.start import OF_DATA, Invariant
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.doctor.check import Result
    from dshealthd.doctor.job.start import Start

_COMMON = (
    *("nnodes", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "master-addr", "master-port"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
)
"""Options and variables that must be the same on all nodes of a job."""
_OF_NODE = re.compile(rf"\$\{{?({'|'.join(sorted(PER_NODE))})\b")
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


def _no_port(start: Start) -> str:
    """Return a port that is the number of the job, which has no bound that a port has."""
    options = start.program.options if start.program.program != "python" else start.variables
    for name in ("rdzv-endpoint", "master-port", "MASTER_PORT"):
        value = options.get(name, "")
        port = value.rpartition(":")[2] if name == "rdzv-endpoint" else value
        if re.search(r"\$\{?SLURM_JOB_?ID\b(?!%|:)", port):
            shown = name if name.isupper() else start.program.spelled(name)
            return (
                f"{shown} is the job's number, which passes 65535: take it modulo, as in"
                " $((20000 + SLURM_JOB_ID % 10000))"
            )
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
    heads, tensor = have.get("num_attention_heads", 0), degrees.get("tensor_model_parallel_size", 1)
    if heads % tensor:  # megatron/core/transformer/transformer_config.py
        return (
            f"num_attention_heads {heads} is not a multiple of tensor_model_parallel_size {tensor}"
        )
    is_data = any(map(OF_DATA.search, degrees))
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


def _no_host(start: Start) -> str:
    inner = start.find("deepspeed")
    problem = refusal(start.pool, inner.options) if inner and start.pool else ""
    is_known = problem not in {"", "$"}
    return f"deepspeed refuses --include or --exclude, and ends at once: {problem}" * is_known


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
    *OPTIONS,
    Invariant(_beyond, "srun", "srun(1)", is_refused=True),
    Invariant(
        _no_single_host,
        "rendezvous",
        "sbatch(1), SLURM_JOB_NODELIST",
        "scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1  # in the script",
    ),
    Invariant(_no_port, "--master-port", "slurm.conf(5), MaxJobId: 67043328"),
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
