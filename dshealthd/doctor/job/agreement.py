"""What a job is given and what starts there agree: nodes, processes, GPUs, rank, rendezvous.

A `Start` holds each quantity as a batch script, a command or a pod states it, so that one set of
invariants judges all of them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, critical, warning
from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
from dshealthd.doctor.job.sources.layout import Layout
from dshealthd.doctor.job.sources.shell import PER_NODE
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


@dataclass(frozen=True, slots=True)
class Start:
    """A command, the nodes or pods on which it starts, and what each of these is given."""

    command: LauncherCommand
    layout: Layout
    """What the command starts."""
    variables: Mapping[str, str]
    nodes: int | None = None
    """Nodes that the job is given."""
    given: str = ""
    """Who gives them, for people."""
    copies: int = 1
    """Nodes on which these words start the command."""
    name: str = ""
    """What starts it, for people: empty for a script's command."""

    @property
    def torchrun(self) -> LauncherCommand | None:
        """The call of torchrun, if there is one."""
        return self.command.find("torchrun")

    @property
    def program(self) -> LauncherCommand:
        """The innermost launcher, or Python."""
        return list(self.command.chain())[-1]

    @property
    def has_ranks(self) -> bool:
        """Whether what starts is the ranks; a single Python may start others in its own way."""
        return self.program.program != "python" or (self.layout.ranks or 0) > 1


def disagreements(start: Start) -> Iterator[Result]:
    """Yield where the quantities of a start do not fit each other."""
    yield from _nodes(start)
    yield from _common(start)
    yield from _node_rank(start)
    yield from _world(start)
    yield from _divided(start)


def _nodes(start: Start) -> Iterator[Result]:
    wanted, program = start.layout.nodes, start.program.program
    if program == "python":  # Lightning and NeMo compare it with Slurm's when they start
        wanted = arguments(start.program).get("num_nodes") if start.has_ranks else None
    if wanted and start.nodes and wanted != start.nodes:
        yield critical(
            f"{start.name}{program} waits for {plural(wanted, 'node')}, but {start.given}",
            remedy=f"torchrun --nnodes={start.nodes} ..." if start.torchrun else "",
            value=str(wanted),
            limit=str(start.nodes),
            source="--nodes" if not start.name else "",
            component=program,
        )


def _common(start: Start) -> Iterator[Result]:
    """Yield what must be the same on all nodes, but is computed on each of them."""
    if start.copies == 1 or (start.torchrun and start.layout.nodes == 1):
        return
    stated = start.torchrun.options if start.torchrun else start.variables
    for name in _COMMON:
        value = stated.get(name, "")
        if found := _OF_NODE.search(value):
            shown = f"--{name}" if start.torchrun else name
            yield critical(
                f"{start.name}{shown} {value[:80]} is another on each node, because each node's own"
                f" shell expands {found[1]}: the ranks never meet",
                remedy="scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1  # in the script"
                if not start.name
                else "",
                value=value[:80],
                component=shown,
            )


def _node_rank(start: Start) -> Iterator[Result]:
    """Yield a rank that no node has, or that all of them have."""
    inner, nodes = start.torchrun, start.layout.nodes
    if inner is None:
        return
    total, rank = inner.number("num-processes"), inner.number("node-rank")
    if nodes and rank is not None and rank >= nodes:
        yield critical(
            f"{start.name}node {rank} of {plural(nodes, 'node')}: ranks of nodes begin with 0",
            value=str(rank),
            limit=f"0 to {nodes - 1}",
            component="--node-rank",
        )
    if nodes and total and total % nodes:
        yield critical(
            f"{start.name}{total} processes cannot be divided among {plural(nodes, 'machine')}:"
            f" accelerate starts {total // nodes} on each",
            value=str(total),
            limit=f"a multiple of {nodes}",
            component="--num-processes",
        )
    if start.copies == 1 or nodes == 1:
        return
    default = "" if inner.is_partial else "static"
    text = inner.options.get("node-rank", "$" if inner.is_partial else "0")
    if natural(text) is not None and inner.options.get("rdzv-backend", default) == "static":
        of_accelerate = any("accelerate" in word for word in start.command.arguments)
        yield critical(
            f"{start.name}every node gets --{'machine' if of_accelerate else 'node'}-rank {text},"
            " and the static rendezvous needs another on each: the batch shell expands words of"
            " srun once, for all nodes, unless '...' or \\ protects their $",
            remedy="srun torchrun --rdzv-backend=c10d --rdzv-endpoint=$HOST:$PORT ...",
            source="torch/distributed/run.py, --node-rank",
            component="--node-rank",
        )


def _world(start: Start) -> Iterator[Result]:
    """Yield a WORLD_SIZE that is not the number of tasks, which only a launcher overrides."""
    said = natural(start.variables.get("WORLD_SIZE"))
    if (
        start.program.program == "python"
        and start.has_ranks
        and said
        and start.layout.ranks not in {None, said}
    ):
        yield critical(
            f"{start.name}WORLD_SIZE={said}, but {plural(start.layout.ranks or 0, 'rank')} start:"
            " the rendezvous waits for the others, or refuses ranks",
            value=str(said),
            limit=str(start.layout.ranks),
            source=start.layout.source,
            component="WORLD_SIZE",
        )


def _divided(start: Start) -> Iterator[Result]:
    """Yield ranks that cannot be divided as the arguments of the training say."""
    have, ranks = arguments(start.program), start.layout.ranks
    degrees = {name: value for name, value in have.items() if _DEGREES.fullmatch(name) and value}
    whole = math.prod(degrees.values())
    product = " x ".join(f"{name} {value}" for name, value in degrees.items())
    if ranks is None or not degrees or not start.has_ranks:
        return
    if ranks % whole:
        yield critical(
            f"{start.name}{plural(ranks, 'rank')} ({start.layout.source}) cannot be divided into"
            f" groups of {product} = {whole}",
            value=str(ranks),
            limit=f"a multiple of {whole}",
            component=next(iter(degrees)),
        )
        return
    is_data = any("data" in name or "_dp_" in name for name in degrees)
    copies = ranks if is_data else ranks // whole
    batch, micro = have.get("global_batch_size"), have.get("micro_batch_size")
    if batch and micro and not is_data and batch % (micro * copies):
        yield critical(
            f"{start.name}global_batch_size {batch} is not a multiple of micro_batch_size {micro} x"
            f" {plural(copies, 'data-parallel rank')} ({ranks} / {whole}) = {micro * copies}",
            value=str(batch),
            limit=f"a multiple of {micro * copies}",
            component="global_batch_size",
        )


def occupancy(layout: Layout, gpus: int | None, place: str) -> Iterator[Result]:
    """Yield processes of a node or pod that have no GPU, and GPUs that have no process."""
    ranks = layout.ranks_per_node
    if ranks and gpus and ranks != gpus:
        make, effect = warning, "idle GPUs"
        if ranks > gpus:
            make, effect = critical, "ranks without a GPU fail with `invalid device ordinal`"
        yield make(
            f"{place}: {plural(ranks, 'process', 'processes')} ({layout.source}) for"
            f" {plural(gpus, 'GPU')}: {effect}",
            value=str(ranks),
            limit=str(gpus),
            component="LOCAL_RANK",
        )


def arguments(command: LauncherCommand) -> dict[str, int]:
    """Return the training's arguments that are whole numbers, by their last name, such as
    `num_nodes` for `--num-nodes 2` and `trainer.num_nodes=2`; one with two values is left out.
    """
    found: dict[str, set[int | None]] = {}
    words = [*command.arguments, ""]
    for word, following in itertools.pairwise(words):
        name, equals, value = word.partition("=")
        if equals or word.startswith("--"):
            last = name.lstrip("-+").rpartition(".")[2].replace("-", "_")
            found.setdefault(last, set()).add(natural(value if equals else following))
    return {
        name: value for name, values in found.items() for value in values
        if value is not None and len(values) == 1
    }  # fmt: skip
