"""What ProcessGroupNCCL prints when collectives hang, by release, for logs that take GPUs.

Written from the format strings of torch's own sources: 2.0.1, 2.2.2, 2.4.1, 2.5.1, 2.7.1 and
2.9.0 (`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

RELEASES = ("2.0", "2.2", "2.4", "2.5", "2.7", "2.9")
OPERATIONS = ("ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "BROADCAST")


@dataclass
class Rank:
    """One rank in one group when its watchdog looks."""

    rank: int
    group_rank: int
    timed_out: int | None
    """None: it waits for nothing, and answers the others' signal only."""
    enqueued: int
    completed: int
    operation: str = "ALLREDUCE"
    numel: int = 1 << 20


@dataclass
class Group:
    """A process group and its ranks."""

    number: int
    name: str
    ranks: list[Rank] = field(default_factory=list)


def hung_group(world: int, chance: random.Random) -> Group:
    """Return a default group whose ranks all wait in the same collective."""
    number = chance.randrange(5, 100_000)
    operation = chance.choice(OPERATIONS)
    size = chance.randrange(8, 1 << 24) * world
    ahead = chance.randrange(4)
    return Group(0, "default_pg", [
        Rank(rank, rank, number, number + ahead, number - 1, operation, size)
        for rank in range(world)
    ])  # fmt: skip


def printed(release: str, group: Group, chance: random.Random) -> list[tuple[float, int, str]]:
    """Return the lines of all ranks of a group: seconds, rank and text."""
    lines = []
    for state in group.ranks:
        start = 600.0 + chance.uniform(0, 3)
        for number, text in enumerate(_of_rank(release, group, state)):
            lines.append((start + number * 0.001, state.rank, text))
    return lines


def _of_rank(release: str, group: Group, state: Rank) -> list[str]:
    line = {"2.0": 828, "2.2": 523, "2.4": 607, "2.5": 616, "2.7": 632, "2.9": 683}[release]
    head = f"[rank{state.rank}]:[E1122 04:44:58.4995{state.rank % 10}8410 ProcessGroupNCCL.cpp:"
    if release == "2.0":
        head = "[E ProcessGroupNCCL.cpp:"
    elif release == "2.2":
        head = f"[rank{state.rank}]:[E ProcessGroupNCCL.cpp:"
    prefix = {
        "2.0": f"[Rank {state.group_rank}]",
        "2.2": f"[Rank {state.group_rank}]",
        "2.4": f"[PG {group.number} Rank {state.group_rank}]",
    }.get(
        release,
        f"[PG ID {group.number} PG GUID {group.number}({group.name}) Rank {state.group_rank}]",
    )
    found = []
    sizes = f"NumelIn={state.numel}, NumelOut={_output(state, group)}, "
    if state.timed_out is not None:
        found.append(
            f"{head}{line}] [Rank {state.group_rank}] Watchdog caught collective operation "
            f"timeout: WorkNCCL(SeqNum={state.timed_out}, OpType={state.operation}, "
            f"{sizes if release != '2.0' else ''}Timeout(ms)=600000) ran for 600{line} "
            "milliseconds before timing out."
        )
        status = (
            f"last enqueued NCCL work: {state.enqueued}, last completed NCCL work: "
            f"{state.completed}."
        )
        if release in {"2.4", "2.5"}:
            found.append(
                f"{head}1664] {prefix} Exception (either an error or timeout) detected by "
                f"watchdog at work: {state.timed_out}, {status}"
            )
            found.append(f"{head}1709] {prefix} Timeout at NCCL work: {state.timed_out}, {status}")
        elif release in {"2.7", "2.9"}:
            found.append(
                f"{head}2271] {prefix}  failure detected by watchdog at work sequence id: "
                f"{state.timed_out} PG status: last enqueued work: {state.enqueued}, last "
                f"completed work: {state.completed}"
            )
            found.append(
                f"{head}670] Stack trace of the failed collective not found, potentially because "
                "FlightRecorder is disabled."
            )
        found.append(
            f"{head}621] [Rank {state.group_rank}] Some NCCL operations have failed or timed out. "
            "Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run "
            "on corrupted/incomplete data."
        )
        found.append(
            f"{head}1515] {prefix} Process group watchdog thread terminated with exception: "
            f"[Rank {state.group_rank}] Watchdog caught collective operation timeout: WorkNCCL("
            f"SeqNum={state.timed_out}, OpType={state.operation}, "
            f"{sizes if release != '2.0' else ''}Timeout(ms)=600000) ran for 600{line} "
            "milliseconds before timing out."
        )
        found.append("Exception raised from checkTimeout at ProcessGroupNCCL.cpp:618 (most recent")
        found += [f"frame #{number}: <unknown function> + 0xd3e95 (0x15327)" for number in range(4)]
        found.append("")
    elif release in {"2.5", "2.7", "2.9"} and group.number == 0:
        found.append(
            f"{head}1785] {prefix} Received a dump signal due to a collective timeout from  rank "
            "0 and we will try our best to dump the debug info. Last enqueued NCCL work: "
            f"{state.enqueued}, last completed NCCL work: {state.completed}.This is most likely "
            "caused by incorrect usages of collectives, e.g., wrong sizes used across ranks"
        )
    return found


def _output(state: Rank, group: Group) -> int:
    if state.operation == "_ALLGATHER_BASE":
        return state.numel * len(group.ranks)
    if state.operation == "_REDUCE_SCATTER_BASE":
        return max(1, state.numel // len(group.ranks))
    return state.numel
