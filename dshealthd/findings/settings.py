"""Findings about how jobs are set up here: their variables, their ranks' places, their NCCL."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping

from dshealthd.core.text import MOST_NAMED, several
from dshealthd.findings.fabric import fabric_up
from dshealthd.findings.finding import Sign
from dshealthd.findings.past import MINUTES_5
from dshealthd.findings.series import Series, by, some

DEVICES = {
    "absent": "names nothing on this node",
    "down": "names what is down",
    "loopback": "leaves a job of several nodes only an interface inside the node",
}
"""What is wrong with a variable that names interfaces or adapters, by the collector's word."""
VALUES = {
    "out_of_range": "has a value out of its range",
    "no_number": "has a value that NCCL reads as a different number",
    "misspelt": "is probably what a misspelt name means",
    "exposed": "opens a port without authentication to other hosts",
    "differs": "differs between ranks",
}
"""What is wrong with any other NCCL variable."""
OF_DEVICES = frozenset(("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"))
TRANSPORTS = {
    "NCCL_P2P_DISABLE": "NVLink, which is up",
    "NCCL_P2P_LEVEL": "NVLink, which is up",
    "NCCL_SHM_DISABLE": "shared memory between the ranks of a node",
    "NCCL_IB_DISABLE": "InfiniBand or RoCE, which is up",
    "NCCL_NET": "InfiniBand or RoCE, which is up",
}
"""What a variable disables that would work."""
ON_ARM = "on Arm all ranks hang at one place (NVIDIA/nccl#2353)"
"""2.28.9 made a compare-and-swap of its proxy weak, which on Arm may fail without a reason and then
loses free slots of operations (`ncclProxyGetPostedOps`); 2.29.3: "Fixes CAS usage in case of weak
failure which was causing a hang on ARM". 2.28.7 and before have a strong one, by their sources.
"""
RELEASES = (
    ("2.17.1", "", "", "ncclCommAbort hangs (pytorch/pytorch#119215)"),
    ("2.21.5", "2.3", "", "it is reported to fail with PyTorch 2.3"),
    ("2.25.1", "", "", "ncclCommAbort hangs (pytorch/pytorch#149153)"),
    ("2.28.9", "", "aarch64", ON_ARM),
    ("2.29.2", "", "", "it hangs after a regression (pytorch/pytorch#174338)"),
    ("2.29.2", "", "aarch64", ON_ARM),
)
"""Releases of NCCL with a defect, the release of PyTorch and the architecture with which it shows
(empty: any), and it."""


def variables(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose NCCL variables do not mean what was intended."""
    found: dict[str, dict[str, float]] = {}
    for labels, ranks in series("job_environment_problems", problem={*DEVICES, *VALUES}):
        if wrong := _wrong(labels):
            of_job = found.setdefault(labels["training_job"], {})
            of_job[wrong] = max(of_job.get(wrong, 0.0), ranks)
    for job, problems in found.items():
        yield _of_job("DshealthdJobSettings", job, problems, max(problems.values()))


def _of_job(
    alert: str,
    job: str,
    problems: Collection[str],
    value: float,
    source: str = "job_environment_problems",
) -> Sign:
    """Return the sign that a job on this node has these problems."""
    return Sign(alert, several(problems), job=job, value=value, source=source)


def _wrong(labels: Mapping[str, str]) -> str:
    """Return what is wrong with an NCCL variable; empty for what is no problem of NCCL's."""
    variable, problem = labels["variable"], labels["problem"]
    if variable in OF_DEVICES and problem in DEVICES:
        return f"{variable} {DEVICES[problem]}"
    if variable.startswith(("NCCL_", "TORCH_NCCL_")) and problem in VALUES:
        return f"{variable} {VALUES[problem]}"
    return ""


def transports(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs that disable a transport although it would work for them."""
    nvlink = some(series("nvlinks_up"))
    fabric = fabric_up(series)
    found: dict[str, dict[str, float]] = {}
    for labels, ranks in series("job_environment_problems", problem="disabled"):
        job, variable = labels["training_job"], labels["variable"]
        run = {"training_job": job, "run": labels["run"]}
        here, world = series.value("job_ranks", **run), series.value("job_world_size", **run)
        several_here = here is not None and here > 1
        uses = {
            "NCCL_P2P_DISABLE": several_here and nvlink,
            "NCCL_SHM_DISABLE": several_here,
            "NCCL_IB_DISABLE": here is not None and world is not None and here < world and fabric,
        }
        uses["NCCL_P2P_LEVEL"] = uses["NCCL_P2P_DISABLE"]
        uses["NCCL_NET"] = uses["NCCL_IB_DISABLE"]
        if uses.get(variable):
            found.setdefault(job, {})[f"{variable} disables {TRANSPORTS[variable]}"] = ranks
    for job, problems in found.items():
        sign = _of_job("DshealthdJobSettings", job, problems, max(problems.values()))
        yield dataclasses.replace(sign, apart="transport", hold=MINUTES_5)


def placement(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose ranks cannot meet, or would be refused by NCCL."""
    found: dict[str, set[str]] = {}
    for rule in (_shared, _twice, _apart):
        for job, problem in rule(series):
            found.setdefault(job, set()).add(problem)
    for job, problems in found.items():
        alert, value = "DshealthdRanksDoNotMeet", float(len(problems))
        yield _of_job(alert, job, problems, value, "job_processes")


def _shared(series: Series) -> Iterator[tuple[str, str]]:
    """Yield each GPU, not divided by MIG, that several ranks of one run have before its first step.

    NCCL refuses two ranks of a communicator on one GPU. A job that has a communicator, or makes
    steps, was not refused: its ranks share the GPU by design, as trainers and generators do. So do
    those of a program without NCCL, as simulations that MPI starts.
    """
    divided = series.parts("mig_device_info", "gpu")
    of_torch = {"nccl", "torch"}  # which has its own NCCL where none is installed
    trains = {labels["training_job"] for labels, _ in series("software_info", component=of_torch)}
    started = {
        point.labels["training_job"]
        for name in ("job_step", "job_nccl_communicators")
        for point in series(name)
        if point.value > 0
    }
    runs: dict[tuple[str, str], set[str]] = {}
    for labels, _ in series("job_processes"):
        runs.setdefault((labels["training_job"], labels["rank"]), set()).add(labels["run"])
    ranks: dict[tuple[str, str, str], set[str]] = {}
    for labels, _ in series("job_gpu_info"):
        job, rank, gpu = labels["training_job"], labels["rank"], labels["gpu"]
        if (gpu,) not in divided and job in trains - started:
            for run in runs.get((job, rank), {""}):
                ranks.setdefault((job, run, gpu), set()).add(rank)
    for (job, _, gpu), on_gpu in ranks.items():
        if len(on_gpu) > 1:
            yield job, f"{ranks_named(on_gpu)} are on GPU {gpu}, which NCCL refuses"


def _twice(series: Series) -> Iterator[tuple[str, str]]:
    """Yield each rank that several processes have, in a run whose ranks wait for each other: what
    a single task starts, and leaves alone, is its rank 0 each time.
    """
    world = by(series("job_world_size"), "run")
    for labels, processes in series("job_processes"):
        ranks = max(world.get(labels["run"], 0.0), int(labels["rank"]) + 1)
        if processes > 1 and ranks > 1:
            yield labels["training_job"], f"rank {labels['rank']} has {processes:g} processes"


def _apart(series: Series) -> Iterator[tuple[str, str]]:
    """Yield the runs here that would be one run, but for a variable in which they differ.

    Of those, one has rank 0 and lacks ranks; the others wait for a rank 0 that never comes.
    """
    lowest, world, here = (
        by(series(name), "run") for name in ("job_lowest_rank", "job_world_size", "job_ranks")
    )
    incomplete = {run for run in world if here.get(run, 0.0) < world[run]}
    kin: dict[tuple[str, str], set[str]] = {}
    for labels, _ in series("job_rendezvous_kin_info"):
        run, variable = labels["run"], labels["variable"]
        if lowest.get(run) == 0 and (run in incomplete or variable == "WORLD_SIZE"):
            kin.setdefault((variable, labels["kin"]), set()).add(run)
    connected = some(series("rendezvous_client_sockets", state="established"))
    steps = {labels["training_job"] for labels, value in series("job_step") if value > 0}
    for labels, _ in series("job_rendezvous_kin_info"):
        job, run, variable = labels["training_job"], labels["run"], labels["variable"]
        if (
            lowest.get(run, 0.0) > 0
            and (variable, labels["kin"]) in kin
            and not (variable == "MASTER_ADDR" and connected)
            and job not in steps
        ):
            ranks = {labels["rank"] for labels, _ in series("job_processes", run=run)}
            have = "has" if len(ranks) == 1 else "have"
            yield job, f"{ranks_named(ranks)} {have} another {variable} than rank 0"


def ranks_named(ranks: Collection[str]) -> str:
    """Return ranks in words, in their order: `rank 3`, or `ranks 0, 1, 2 and 5 more`."""
    named = sorted(ranks, key=lambda rank: (len(rank), rank))
    more = len(named) - MOST_NAMED
    listed = ", ".join(named[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"rank{'s' if len(named) > 1 else ''} {listed}"


def releases(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about releases of NCCL that are known to hang or fail.

    Not about those that a status query can crash: that takes another monitor, and they come with
    several releases of PyTorch.
    """
    used: dict[tuple[str, str], dict[str, set[str]]] = {}
    for labels, _ in series("software_info", component=("nccl", "torch")):
        of_place = used.setdefault((labels["environment"], labels["training_job"]), {})
        of_place.setdefault(labels["component"], set()).add(labels["version"])
    for (environment, job), versions in used.items():
        for nccl in sorted(versions.get("nccl", ())):
            for text in known_defects(nccl, versions.get("torch", set())):
                alert, reason = "DshealthdNcclKnownBad", f"NCCL {nccl}: {text}"
                part = job or environment
                yield Sign(alert, reason, part=part, job=job, source="software_info")


def known_defects(nccl: str, torch: Collection[str]) -> Iterator[str]:
    """Yield the known defects, on this machine, of an NCCL release beside these of PyTorch."""
    machine = os.uname().machine
    for release, with_torch, on, text in RELEASES:
        # With or without a vendor's suffix.
        if re.fullmatch(rf"{re.escape(release)}([.+-].*)?", nccl) and (
            on in {"", machine}
            and (not with_torch or any(one.startswith(f"{with_torch}.") for one in torch))
        ):
            yield text


def likely(series: Series, job: str) -> str:
    """Return that a job's NCCL is known to hang all its ranks at one place; empty if it is not."""
    for labels, _ in series("software_info", component="nccl", training_job=job):
        if ON_ARM in known_defects(labels["version"], ()):
            return f"; the likely cause is NCCL {labels['version']}: {ON_ARM}"
    return ""


RULES = (variables, transports, placement, releases)
