"""What a job is given and what starts there agree: one table of invariants over one model."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from functools import partial

from dshealthd.doctor.check import warning
from dshealthd.doctor.job.facts import RULES
from dshealthd.doctor.job.limits import LIMITS
from dshealthd.doctor.job.options import OPTIONS
from dshealthd.doctor.job.sources.expansion import PER_NODE
from dshealthd.doctor.job.sources.layout import refusal
from dshealthd.doctor.job.sources.manifest import INDEX
from dshealthd.doctor.job.sources.programs import ELSEWHERE
from dshealthd.doctor.job.sources.slurm_options import tasks_per_node
from dshealthd.doctor.job.start import Invariant, Start, unlike, within

_HOSTS = ("rdzv-endpoint", "master-addr")
_PORTS = ("rdzv-endpoint", "master-port")
_COMMON = (*_HOSTS, "nnodes", "rdzv-id", "rdzv-backend", "master-port", "world-size")
"""What must be the same on all nodes of a job."""
_RANKS = {
    "rank": {"SLURM_LOCALID": "nodes", "SLURM_NODEID": "tasks", INDEX: "groups"},
    "node-rank": {"SLURM_LOCALID": "nodes", INDEX: "groups"},
    "local-rank": {"SLURM_PROCID": "nodes", "SLURM_NODEID": "tasks"},
}
"""Ranks, the variables that are another kind of rank, and of what the job then has several."""
_IN_SCRIPT = "scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1  # in the script"
_PORT = "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))  # in the script"
_DRAWN = frozenset({"RANDOM", "BASHPID"})
"""Variables of a shell from which ports are made."""
_LISTED = r"\$\{?(SLURM_(?:JOB_|STEP_)?NODELIST|NAMES_OF_ALL_NODES)\b(?!:[\d ]|[^}]*[\[\]])"
OCCUPANCY = (
    Invariant(
        within("processes", operator.le, "GPUs",
               "{0:process/processes} ({start.layout.source}){start.of_all} for {1:GPU}: ranks"
               " without a GPU fail with `invalid device ordinal`"), "LOCAL_RANK"),
    Invariant(
        within("processes", operator.ge, "GPUs",
               "{0:process/processes} ({start.layout.source}){start.of_all} for {1:GPU}: idle"
               " GPUs"),
        "LOCAL_RANK", make=warning),
)  # fmt: skip
"""Processes of a node or pod that have no GPU, and GPUs that have no process."""


def _multiple(one: int, other: int) -> bool:
    return one % other == 0


def _too_often(start: Start, *, by_ssh: bool) -> Iterator[str]:
    """Yield a launcher of all ranks, of the node or by SSH of the job, that srun starts more than
    once for them.
    """
    program, outer = start.program.program, start.find("srun")
    if outer is None or program not in {"torchrun", "deepspeed"}:
        return
    nodes = start.nodes or start.layout.nodes
    given = {"nodes": str(nodes)} if nodes else {}
    tasks = tasks_per_node({**given, **start.requested, **outer.options}) or 1
    is_by_ssh = program == "deepspeed" and "no-ssh" not in start.program.options
    if is_by_ssh == by_ssh and (tasks > 1 or (by_ssh and (start.nodes or 1) > 1)):
        starts = f"{tasks} times on each node" if tasks > 1 else f"on each of {start.nodes} nodes"
        yield (
            f"srun starts {program} {starts}, and each one starts all ranks of the"
            f" {'job' if by_ssh else 'node'}: every rank exists more than once"
        )


def _too_rarely(start: Start) -> Iterator[str]:
    """Yield a launcher of one node that nothing starts on the others of the job."""
    is_elsewhere = any(ELSEWHERE.intersection(one.wrapper) for one in start.chain)
    is_alone = start.program.program == "torchrun" and not start.find("srun") and not is_elsewhere
    if start.requested and is_alone and (start.nodes or 1) > 1:
        yield f"the job has {start.nodes} nodes but torchrun starts on the first: srun is missing"


def _without_hosts(start: Start) -> Iterator[str]:
    program = start.program
    is_here = start.pool.keys() <= {"localhost"}
    is_alone = program.program == "deepspeed" and not start.find("srun") and is_here
    is_known = program.is_partial or {"hostfile", "no-ssh"} & program.options.keys()
    if start.requested and is_alone and not is_known and (start.nodes or 1) > 1:
        yield (
            f"the job has {start.nodes} nodes but deepspeed starts on the first alone, unless there"
            " is a /job/hostfile: --hostfile is missing"
        )


def _no_host(start: Start) -> Iterator[str]:
    inner = start.find("deepspeed")
    problem = refusal(start.pool, inner.options) if inner and start.pool else ""
    if problem not in {"", "$"}:
        yield f"deepspeed refuses --include or --exclude, and ends at once: {problem}"


def _same_port(start: Start) -> Iterator[str]:
    """Yield a port that launches which run at once on a node would share."""
    inner = start.torchrun
    at_once = max((one.at_once or 1 for one in start.chain), default=1)
    if inner is None or at_once == 1 or inner.is_partial or "standalone" in inner.options:
        return
    text = inner.options.get("rdzv-endpoint") or inner.options.get("master-port", "29500")
    if start.nodes == 1 and "$" not in text and not re.search(r":0$|^0$", text):
        port = text.rpartition(":")[2]
        yield f"{at_once} launches at once on one node share the port {port}: one can open it"


INVARIANTS = (
    *OPTIONS,
    *RULES,
    *LIMITS,
    Invariant(
        within(
            *("tasks of the job", operator.ge, "nodes of the job"),
            "{0:task} for {1:node}: Slurm gives the job as many nodes as it has tasks",
        ),
        *("srun", "sbatch(1), --ntasks"),
        is_refused=True,
    ),
    *(
        Invariant(
            within(f"{what} of srun", operator.le, f"{what} of the job", text),
            *("srun", "srun(1)"),
            is_refused=True,
        )
        for what, text in (
            ("nodes", "srun asks for {0:node}, but the job has {1}"),
            ("GPUs", "srun asks for {0:GPU} on each node, but the job has {1}"),
        )
    ),
    *(
        Invariant(unlike(names, pattern, several, text), component, source, remedy)
        for names, pattern, several, component, text, source, remedy in (
            (_HOSTS, _LISTED, "nodes", "rendezvous", "{} is a list of nodes, no host",
             "sbatch(1), SLURM_JOB_NODELIST", _IN_SCRIPT),
            (_HOSTS, r"\$\{?(ALL_OWN_ADDRESSES)", "", "rendezvous",
             "{} is a list of all addresses of a node, no host", "hostname(1), -I", _IN_SCRIPT),
            (_HOSTS, r"^(?!.*(?:\$|\{\{)).*?([\s,()]|[^\[]\[|\[[^\]]*$)", "", "rendezvous",
             "{} cannot be a host", "", _IN_SCRIPT),
            (("nnodes",), r"\$[({]?(WORLD_SIZE)\b", "processes", "--nnodes",
             "{} is the number of processes, not of nodes",
             "training-operator, pkg/controller.v1/pytorch/envvar.go", ""),
            (_PORTS, r"\$\{?(SLURM_JOB_?ID)\}?$", "", "--master-port",
             "{} is the job's number, which passes 65535: take it modulo 10000",
             "slurm.conf(5), MaxJobId: 67043328", _PORT),
            *(
                (_COMMON, rf"\$\{{?({'|'.join(sorted(variables))})\b", "copies", "rendezvous",
                 "{} is another on each node, because each node's own shell expands {}",
                 "bash(1), EXPANSION", remedy)
                for variables, remedy in ((PER_NODE - _DRAWN, _IN_SCRIPT), (_DRAWN, _PORT))
            ),
        )
    ),
    *(
        Invariant(
            unlike((rank,), rf"\$\{{?({variable})\b", several,
                   "{} is another number: {} is the same in several of its " + several),
            *("rank", "srun(1), OUTPUT ENVIRONMENT VARIABLES"))
        for rank, variables in _RANKS.items() for variable, several in variables.items()
    ),
    Invariant(
        within("nodes that it waits for", operator.eq, "nodes",
               "{start.program.program} waits for {0:node}, but {start.given}"),
        "", remedy="torchrun --nnodes={nodes} ..."),
    Invariant(
        within("num_nodes", operator.eq, "nodes",
               "python waits for {0:node}, but {start.given}"),
        "", remedy="srun python SCRIPT --num_nodes={nodes} ..."),
    Invariant(
        within("node", operator.lt, "nodes of the launcher",
               "node {0} of {1:node}: ranks of nodes begin with 0"), "--node-rank"),
    Invariant(
        within("num_processes", _multiple, "nodes of the launcher",
               "{0} processes cannot be divided among {1:machine}"), "--num-processes"),
    Invariant(
        unlike(("node-rank",), r"^(\d+)$", "static copies",
               "every node gets {}, and the static rendezvous needs another on each: the batch"
               " shell expands words of srun once, for all nodes, unless '...' or \\ protects"
               " their $"),
        *("--node-rank", "torch/distributed/run.py, --node-rank"),
        "srun torchrun --rdzv-backend=c10d --rdzv-endpoint=$HOST:$PORT ..."),
    Invariant(
        unlike(("rank",), r"^(\d+)$", "copies", "{} is the same in all copies: ranks must differ"),
        "RANK"),
    Invariant(
        within("WORLD_SIZE", operator.eq, "ranks",
               "WORLD_SIZE={0}, but {1:rank} start: the rendezvous waits for the others, or"
               " refuses ranks"), "WORLD_SIZE"),
    Invariant(
        within("ranks", _multiple, "parts",
               "{0:rank} ({start.layout.source}) cannot be divided into groups of"
               " {start.product} = {1}"), "parallelism"),
    Invariant(
        within("global batch", _multiple, "batch of all copies",
               "global_batch_size {0} is not a multiple of micro_batch_size x data-parallel ranks"
               " = {1}"),
        *("parallelism", "megatron/core/num_microbatches_calculator.py")),
    Invariant(
        within("global batch", _multiple, "micro batch",
               "global_batch_size {0} is not a multiple of the {1} of a micro-batch, so it fits no"
               " number of ranks"),
        *("parallelism", "torchtitan/trainer.py, local_batch_size")),
    Invariant(
        within("processes of mpirun", operator.ge, "GPUs of workers",
               "mpirun -np {0}, but its nodes have {1:GPU}: idle GPUs"),
        *("mpirun", "mpirun(1), -np"), make=warning),
    *(
        Invariant(partial(_too_often, by_ssh=by_ssh), "srun", remedy=remedy)
        for by_ssh, remedy in (
            (False, "srun --ntasks-per-node=1 {program} ..."),
            (True, "deepspeed --hostfile=FILE ...  # no srun"),
        )
    ),
    Invariant(
        _without_hosts,
        *("--hostfile", "deepspeed/launcher/runner.py, fetch_hostfile"),
        "deepspeed --hostfile=FILE ...", make=warning),
    Invariant(_too_rarely, "torchrun", remedy="srun --ntasks-per-node=1 torchrun ..."),
    Invariant(
        _no_host,
        *("--include", "deepspeed/launcher/runner.py, parse_resource_filter"),
        "deepspeed --include HOST:SLOT,... SCRIPT"),
    Invariant(
        within("devices", operator.eq, "tasks",
               "the training wants {0:process/processes} (devices), but srun starts {1:task} on"
               " each node (--ntasks-per-node)"),
        *("devices", "lightning/fabric/plugins/environments/slurm.py")),
    Invariant(
        within("memory", operator.ge, "least memory",
               "{0} MiB of memory on a node, where its processes take more than {1} and are killed"
               " (a number of --mem without a unit is in MiB, one of Kubernetes in bytes)"),
        *("memory", "sbatch(1), --mem")),
    Invariant(_same_port, "--master-port", "torch/distributed/run.py", "dshealthd free-port"),
)  # fmt: skip
"""In which a start must agree with itself."""
