"""The local probe of one machine: its GPUs among themselves, or two processes if it has none."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dshealthd.collection.scheduler import Scheduler
from dshealthd.collectors import gpu, gpu_bus, gpu_processes
from dshealthd.core.snapshot import Snapshot
from dshealthd.core.text import plural
from dshealthd.linux.pci import bus
from dshealthd.probe.cli import report
from dshealthd.probe.members.local_membership import hostname
from dshealthd.probe.observation import Backend, Outcome, RoundKind, Stage
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.policy import BUSY, GpuOccupancy, Policy
from dshealthd.probe.rounds.conclusion import combine
from dshealthd.probe.rounds.plan import PAIR, local_job, local_plan
from dshealthd.probe.workers.store import LocalStore
from dshealthd.probe.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from dshealthd.config.config import Config
    from dshealthd.core.host import Host

DEADLINES = {
    Stage.IMPORT: 120.0,
    **dict.fromkeys((Stage.STORE, Stage.INIT, Stage.WARM_UP, Stage.SIZES, Stage.VERIFY), 60.0),
}
"""Timeout of each stage in seconds, generous because nothing else waits for the local probe."""
PATIENCE = 15.0
"""Seconds to wait for busy GPUs: a round of the agent's own, even one that hangs, takes up to 12 s.
"""


def interpreter(loaded: Config) -> str:
    """Return the configured interpreter, else this one if it has torch, else python3 of PATH."""
    if loaded.section(ProbeOptions).python is not None:
        return str(loaded.section(ProbeOptions).python)
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python3") or sys.executable


def count_gpus(host: Host) -> int:
    """Return the number of GPUs for the local probe; 0 if no driver is loaded for them."""
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

    def progress(rank: int, stage: Stage) -> None:
        if rank == 0:
            tell(f"stage {stage}")

    gpus = count_gpus(loaded.path.host)
    python = interpreter(loaded)
    document = {"kind": RoundKind.LOCAL, "gpus": gpus, "python": python, "units": report.UNITS}
    if gpus and (why := await _objection(loaded, tell)):
        declined = {"outcome": Outcome.DECLINED, "stage": Stage.INVITE, "reason": why}
        nothing = {"ranks": 0, "versions": {}, "timings": [], "checksums": [], "failures": []}
        return document | {"backend": Backend.NCCL} | declined | nothing
    worker_pool = WorkerPool(
        python, 1.0, time.monotonic, environment=loaded.section(ProbeOptions).worker.variables
    )
    tell(f"importing torch with {python}")
    try:
        reason = await worker_pool.prepare(DEADLINES[Stage.IMPORT])
        about = dict(worker_pool.about)
        if not reason and (why := worker_pool.no_gpus(gpus)):
            tell(
                f"{why}; {plural(gpus, 'GPU is', 'GPUs are')} not probed, only two processes over "
                "loopback"
            )
            gpus = 0
        job = local_job(gpus, steps, DEADLINES)
        results = await worker_pool.run(job, LocalStore(), progress)
    finally:
        await worker_pool.close()
    plan = local_plan(hostname(), gpus)
    found = combine(plan, plan.root, {plan.root: tuple(results)})
    return document | {
        "backend": job.backend,
        "gpus": gpus,
        "ranks": len(results),
        "versions": {name: about[name] for name in ("torch", "cuda", "python") if name in about},
        "outcome": found.outcome,
        "stage": found.stage,
        "reason": found.reason,
        "timings": [report.timing_fields(timing) for timing in report.timing_rows(found.timings)],
        "checksums": [
            {"gpu": one.part, "library": one.checksum.library, "checksum": one.checksum.number}
            for one in results
            if one.checksum is not None
        ],
        "failures": [
            {name: getattr(one, name) for name in ("rank", "outcome", "stage", "reason", "detail")}
            for one in results
            if one.outcome is not Outcome.OK
        ],
    }


async def _objection(loaded: Config, tell: Callable[[str], None]) -> str:
    """Return why the GPUs may not be used now, as a slug, or empty: as the agent decides it, but
    from samples of this moment.
    """
    wanted = gpu_processes.GpuProcesses.name, gpu_bus.GpuBus.name, gpu.GpuTelemetry.name
    read = replace(loaded, collectors={name: loaded.collectors[name] for name in wanted})
    end = time.monotonic() + PATIENCE
    while True:
        snapshot = Snapshot(time.monotonic, time.time)
        await Scheduler(snapshot, time.monotonic, time.time).once(read)
        gpus = GpuOccupancy(snapshot, time.monotonic)
        options = loaded.section(ProbeOptions).policy
        why = Policy(options, gpus, time.monotonic).objection(scheduled=False)
        if why != BUSY or time.monotonic() > end:
            return why
        tell("waiting for the GPUs to be idle")
        await asyncio.sleep(1.0)


def checksums(entries: list[dict[str, Any]]) -> list[str]:
    """Return the report lines on checksums; none with fewer than two GPUs."""
    if len(entries) < PAIR:
        return []
    if len({(entry["library"], entry["checksum"]) for entry in entries}) == 1:
        return [f"# checksums of matrix products: equal on {len(entries)} GPUs"]
    return [
        "# checksums of matrix products differ: a GPU computes wrongly, unless its library differs",
        *("# gpu {gpu}: {checksum:08x}, {library}".format(**entry) for entry in entries),
    ]


def show_local(document: dict[str, Any]) -> str:
    """Return the table of a local probe."""
    versions = " ".join(f"{name} {value}" for name, value in document["versions"].items() if value)
    lines = [
        (
            f"# local probe, {document['ranks']} ranks, {document['backend']}: "
            f"{versions or document['python']}"
        )
    ]
    if not document["gpus"] and document["timings"]:
        lines.append(
            "# no GPU: processes on this machine over loopback, which shows that the software "
            "works but says nothing about GPUs or links"
        )
    if document["timings"]:
        lines.append(report.table(document["timings"]))
        lines.append(report.checksum_line(Outcome(document["outcome"])))
    lines += checksums(document["checksums"])
    rank = "# rank {rank}: {outcome} at {stage}: {reason}: {detail}"
    lines += [rank.format(**entry) for entry in document["failures"]]
    if document["outcome"] is Outcome.DECLINED:
        lines.append(
            "# GPUs are probed only while they are idle, as a probe takes memory on each; "
            "probe.policy.gpus in --config.file sets when"
        )
    if document["reason"] in {"no_torch", "no_python"}:
        lines.append(
            f"# {document['python']} cannot import torch: set the interpreter of the training "
            "environment, such as --probe.python /opt/train/bin/python"
        )
    lines.append(
        f"# outcome: {document['outcome']}"
        + (f", {document['reason']}" if document["reason"] else "")
    )
    return "\n".join(lines)
