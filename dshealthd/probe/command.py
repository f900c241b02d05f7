"""The command `dshealthd probe`: the GPUs of this machine among themselves, or with a hostfile
every pair of its nodes.

The local probe needs nothing but an interpreter with torch: no configuration, no agent. Between
nodes their agents do the work, by the peer API: each pair's first node is asked to lead a round,
many pairs at a time and no node in two.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dshealthd.config import ConfigError
from dshealthd.core.address import listen_address
from dshealthd.linux.pci import bus
from dshealthd.probe import report
from dshealthd.probe.members.identity import local_addresses, own_name
from dshealthd.probe.members.local_membership import hostname
from dshealthd.probe.members.membership import MembershipError, load
from dshealthd.probe.members.schedule import Timetable
from dshealthd.probe.observation import Kind, Outcome, Stage
from dshealthd.probe.options import MembershipOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.contract import PeerError
from dshealthd.probe.peers.credentials import CredentialError
from dshealthd.probe.peers.messages import MAX_SIZE, Backend
from dshealthd.probe.rounds.conclusion import Findings, MemberResult, combine, timings_of
from dshealthd.probe.rounds.plan import ON_DEMAND, Plan, local_job, new_round
from dshealthd.probe.workers.job import DeviceSteps
from dshealthd.probe.workers.store import LocalStore
from dshealthd.probe.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dshealthd.config import Config
    from dshealthd.core.host import Host
    from dshealthd.probe.workers.job import RankResult

SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 16 << 20, 64 << 20)
SMALL = 1 << 20
REPETITIONS, FEW = 20, 5
"""Of sizes up to a mebibyte, and above."""
DEADLINES = {
    Stage.IMPORT: 120.0,
    **dict.fromkeys((Stage.STORE, Stage.INIT, Stage.WARM_UP, Stage.SIZES, Stage.VERIFY), 60.0),
}
"""Seconds for each stage of the local probe: nothing waits for it."""
LEAD = 28.0
"""Seconds for another agent to lead a round."""
TRIES = 4
"""Times that a pair is tried while one of the two is in another round."""
AT_ONCE = 64
"""Pairs that are probed at a time."""
_SIZE = re.compile(r"(\d{1,10})([KMG]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def probe(
    loaded: Config,
    file: Path | None,
    *,
    hostfile: str | None,
    kind: str | None,
    size: str | None,
    repetitions: int | None,
    as_json: bool,
) -> int:
    """Run collectives now, print what they took and return the exit status, see `report.EXIT`.

    ConfigError.
    """
    source = str(file) if file is not None else "command line"
    steps = parse_steps(size, repetitions, source)
    if hostfile is None and kind in {None, "local"}:
        document = asyncio.run(local(loaded, steps, say))
        text = show_local
    elif hostfile is None and not loaded.probe.members.sources:
        raise ConfigError(
            source, [f"--kind: {kind} needs a hostfile, or members in the configuration"]
        )
    else:
        if kind == "local":
            raise ConfigError(
                source, ["--kind: local is of this machine alone; leave the hostfile out"]
            )
        document = asyncio.run(between(loaded, source, hostfile, Kind(kind or "pair"), steps, say))
        text = show_pairs
    print(_json(document) if as_json else text(document), flush=True)
    return report.EXIT[Outcome(document["outcome"])]


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


def parse_steps(
    sizes: str | None, repetitions: int | None, source: str
) -> tuple[tuple[int, int], ...]:
    """Return bytes and repetitions from the flags; ConfigError."""
    found = []
    for text in sizes.split(",") if sizes is not None else map(str, SIZES):
        match = _SIZE.fullmatch(text.strip().upper().removesuffix("B"))
        number = int(match[1]) * _UNITS[match[2]] if match else 0
        if not 1 <= number <= MAX_SIZE:
            raise ConfigError(
                source,
                [f'--size: "{text}" is not a number of bytes up to 1G, such as 8, 32K or 64M'],
            )
        found.append(number)
    if repetitions is not None and not 1 <= repetitions <= 1000:  # noqa: PLR2004 - what peers take
        raise ConfigError(source, ["--repetitions: must be from 1 to 1000"])
    return tuple(
        (number, repetitions or (REPETITIONS if number <= SMALL else FEW)) for number in found
    )


# This machine


def interpreter(loaded: Config) -> str:
    """Return the interpreter to run workers with.

    The configured one, this one if it has torch, or the first python3.
    """
    if loaded.probe.python is not None:
        return str(loaded.probe.python)
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python3") or sys.executable


def count_gpus(host: Host) -> int:
    """Return how many GPUs the bus has; 0 where no driver is loaded for them."""
    if not os.path.exists(host.device("nvidiactl")):
        return 0
    try:
        return len(bus(host).gpus())
    except OSError:  # no PCI bus
        return 0


async def local(
    loaded: Config, steps: tuple[tuple[int, int], ...], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run the local probe and return its document."""
    gpus = count_gpus(loaded.path.host)
    python = interpreter(loaded)
    worker_pool = WorkerPool(python, 1.0, time.monotonic, environment=loaded.probe.worker.variables)
    tell(f"importing torch with {python}")
    try:
        reason = await worker_pool.prepare(DEADLINES[Stage.IMPORT])
        about = dict(worker_pool.about)
        if gpus and not about.get("cuda") and not reason:
            tell(
                f"torch {about['torch']} is built without CUDA: the {gpus} GPUs are not "
                "probed, only two processes over loopback"
            )
            gpus = 0
        job = local_job(
            gpus, steps, device_steps=DeviceSteps() if gpus else None, deadlines=DEADLINES
        )
        results = await worker_pool.run(
            job, LocalStore(), Progress(len(job.rank_specs), len(steps), tell)
        )
    finally:
        await worker_pool.close()
    backend = Backend(job.backend)
    plan = Plan(
        round=new_round(),
        epoch=ON_DEMAND,
        kind=Kind.LOCAL,
        backend=backend,
        members=(hostname(),),
        digest="",
        ranks=len(results),
    )
    found = combine(plan, plan.root, {plan.root: MemberResult(tuple(results))}, {})
    collectives = replace_parts(found)
    return {
        "kind": Kind.LOCAL,
        "backend": job.backend,
        "gpus": gpus,
        "ranks": len(results),
        "python": python,
        "versions": {name: about[name] for name in ("torch", "cuda", "python") if name in about},
        "outcome": found.outcome,
        "stage": found.stage,
        "reason": found.reason,
        "units": report.UNITS,
        "timings": [report.fields(timing) for timing in collectives],
        "failures": [failure(result) for result in results if result.outcome is not Outcome.OK],
    }


def replace_parts(found: Findings) -> list[Any]:
    """Return the slowest rank's time of each collective, and every GPU's own of what it does alone."""
    slowest: dict[tuple[str, int], Any] = {}
    alone = []
    for timing in found.timings:
        if timing.op != "all_reduce":
            alone.append(timing)
        elif timing.seconds > getattr(slowest.get((timing.op, timing.size)), "seconds", 0.0):
            slowest[timing.op, timing.size] = replace(timing, part="")
    return [*slowest.values(), *sorted(alone, key=lambda timing: (timing.op, timing.part))]


def failure(result: RankResult) -> dict[str, Any]:
    """Return what became of one rank."""
    return {
        "rank": result.rank,
        "outcome": result.outcome,
        "stage": result.stage,
        "reason": result.reason,
        "detail": result.detail,
    }


class Progress:
    """Tells when all ranks have come to a stage."""

    def __init__(self, ranks: int, sizes: int, tell: Callable[[str], None]) -> None:
        self._ranks, self._sizes, self._tell = ranks, sizes, tell
        self._at: dict[tuple[Stage, int], int] = {}
        self._counts: dict[tuple[int, Stage], int] = {}

    def __call__(self, rank: int, stage: Stage) -> None:
        """Note that a rank has come to a stage; it comes to `sizes` once for each size."""
        time_of = self._counts[rank, stage] = self._counts.get((rank, stage), 0) + 1
        there = self._at[stage, time_of] = self._at.get((stage, time_of), 0) + 1
        if there == self._ranks:
            which = f" {min(time_of, self._sizes)} of {self._sizes}" if stage is Stage.SIZES else ""
            self._tell(f"{self._ranks} ranks: {str(stage).replace('_', ' ')}{which}")


def show_local(document: dict[str, Any]) -> str:
    """Return the table of a local probe."""
    versions = " ".join(f"{name} {value}" for name, value in document["versions"].items() if value)
    lines = [
        f"# local probe, {document['ranks']} ranks, {document['backend']}: {versions or document['python']}"
    ]
    if not document["gpus"] and document["timings"]:
        lines.append(
            "# no GPU: processes on this machine over loopback, which says that the software "
            "works and nothing of GPUs or links"
        )
    if document["timings"]:
        lines.append(report.table([timing_of(entry) for entry in document["timings"]]))
        lines.append(report.sums(Outcome(document["outcome"])))
    rank = "# rank {rank}: {outcome} at {stage}: {reason}: {detail}"
    lines += [rank.format(**entry) for entry in document["failures"]]
    if document["reason"] in {"no_torch", "no_python"}:
        lines.append(
            f"# {document['python']} cannot import torch: name the interpreter of the training "
            "environment, such as --probe.python /opt/train/bin/python"
        )
    lines.append(
        f"# outcome: {document['outcome']}"
        + (f", {document['reason']}" if document["reason"] else "")
    )
    return "\n".join(lines)


def timing_of(entry: dict[str, Any]) -> Any:
    """Return the timing of a document's entry."""
    (timing,) = timings_of(
        [
            {name: entry[name] for name in ("op", "size", "seconds", "part")}
            | {"bus_bandwidth": entry["busbw"]}
        ]
    )
    return timing


# Between nodes


@dataclass(frozen=True)
class Ask:
    """What is asked of the agents."""

    kind: Kind
    steps: tuple[tuple[int, int], ...]


async def between(
    loaded: Config,
    source: str,
    hostfile: str | None,
    kind: Kind,
    steps: tuple[tuple[int, int], ...],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Have the agents of a hostfile's nodes, or of the configured members, probe each other, and
    return the document; ConfigError.
    """
    from pathlib import Path

    options = loaded.probe
    members = (
        MembershipOptions(hostfile=Path(hostfile), name=options.members.name)
        if hostfile is not None
        else options.members
    )
    if not options.peer.listen_address:
        raise ConfigError(
            source,
            [
                (
                    "probe.peer: between nodes their agents' key and address are needed: "
                    "--config.file of an agent"
                )
            ],
        )
    try:
        names = load(members).names
        me = own_name(names, hostname(), local_addresses(loaded.path.host), members.name)
        _, port = listen_address(options.peer.listen_address)
        client = PeerClient(options.peer, me, lambda name: (name, port))
    except (MembershipError, CredentialError) as error:
        raise ConfigError(source, list(error.errors)) from error
    ask = Ask(kind, steps)
    entries: list[dict[str, Any]] = []
    try:
        if kind is Kind.GROUP:
            others = [name for name in names if name != me]
            entries.append(await one(client, (*others, me), ask))
            tell(_line(entries[0]))
        else:
            timetable = Timetable(names, {})
            pairs: set[frozenset[str]] = set()
            limit = asyncio.Semaphore(AT_ONCE)

            async def pair(group: Sequence[str]) -> None:
                async with limit:
                    # This node's own agent takes no calls of its own name, so the other one leads.
                    entry = await one(
                        client, tuple(sorted(group, key=lambda name: name == me)), ask
                    )
                entries.append(entry)
                tell(_line(entry))

            for epoch in range(timetable.cycle):
                groups = [
                    group for group in timetable.groups(epoch) if frozenset(group) not in pairs
                ]
                pairs.update(map(frozenset, groups))
                await asyncio.gather(*map(pair, groups))
    finally:
        await client.close()
    return {
        "kind": kind,
        "members": list(names),
        "outcome": report.worst(Outcome(entry["outcome"]) for entry in entries),
        "units": report.UNITS,
        "rounds": entries,
    }


async def one(client: PeerClient, members: tuple[str, ...], ask: Ask) -> dict[str, Any]:
    """Have the first of the members lead a round with the others."""
    body = {
        "members": members,
        "kind": ask.kind,
        "steps": [{"size": size, "repetitions": repetitions} for size, repetitions in ask.steps],
    }
    entry: dict[str, Any] = {
        "members": list(members),
        "kind": ask.kind,
        "backend": "",
        "stage": Stage.INVITE,
        "late": [],
        "timings": [],
    }
    for attempt in range(TRIES):
        try:
            answer = await client.call(members[0], "lead", body, LEAD)
        except PeerError as error:
            late = [] if error.outcome is Outcome.DECLINED else [members[0]]
            entry |= {"outcome": error.outcome, "reason": error.reason, "late": late}
        else:
            timings = [report.fields(timing) for timing in timings_of(answer["timings"])]
            entry |= {**answer, "late": list(answer["late"]), "timings": timings}
        if entry["reason"] != "already_testing":
            break
        await asyncio.sleep(1.0 + attempt)
    return entry


def show_pairs(document: dict[str, Any]) -> str:
    """Return the matrix of the pairs, and a line for each that is not well."""
    cells: dict[frozenset[str], str] = {}
    largest = 0
    for entry in document["rounds"]:
        timing = max(entry["timings"], key=lambda timing: timing["size"], default=None)
        if entry["outcome"] != Outcome.OK or timing is None:
            cells[frozenset(entry["members"])] = str(entry["outcome"])
        else:
            light = "~" if entry["kind"] is Kind.LIGHT else ""
            cells[frozenset(entry["members"])] = f"{light}{timing['busbw'] / 1e9:.3f}"
            largest = max(largest, timing["size"])
    lines = []
    if document["kind"] is not Kind.GROUP:
        what = f"{document['kind']}: bus bandwidth (GB/s) at {largest} bytes; ~ is an echo between the agents, no GPU was used"
        lines.append(report.matrix(document["members"], cells, what))
    for entry in document["rounds"]:
        if document["kind"] is Kind.GROUP and entry["timings"]:
            lines.append(report.table([timing_of(timing) for timing in entry["timings"]]))
        if entry["outcome"] != Outcome.OK or entry["reason"] or document["kind"] is Kind.GROUP:
            lines.append(f"# {_line(entry)}")
    lines.append(f"# outcome: {document['outcome']}")
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    reason = f", {entry['reason']}" if entry["reason"] else ""
    late = f" (late: {', '.join(entry['late'])})" if entry["late"] else ""
    return f"{' -- '.join(entry['members'])}: {entry['kind']} {entry['outcome']}{reason}{late}"


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2)
