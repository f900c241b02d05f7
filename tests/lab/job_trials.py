"""Jobs are run and broken, fault by fault, on pairs of nodes at the same time, and what is told of
each is kept.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.lab import jobs
from tests.lab.job_faults import FAULTS, orphan
from tests.lab.jobs import Job
from tests.lab.node import Node
from tests.lab.paging import Paging
from tests.lab.receiver import FIRING, Alert
from tests.stopwatch import Stopwatch

LEARNT = 60
"""Steps after which a job is known."""
LEARNS = 480.0
"""Seconds in which it makes them: four ranks import torch beside other work."""
QUIET = 6.0
"""Seconds that each fault lasts beyond its page.

A round of all rules, in which another page would come.
"""
FOREVER = "1000000"
ENDING = 15.0
"""Seconds in which what is said of a job that has ended comes to an end as well."""

Start = Callable[[Path, Sequence[Node], int], AbstractContextManager[Job]]
"""Starts a job in a directory, on nodes, at a port."""


def deepspeed(stage: int) -> tuple[str, ...]:
    """Return script and arguments of a DeepSpeed training with this stage of ZeRO."""
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 1000000,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return "script_deepspeed.py", FOREVER, json.dumps(config)


def ddp(
    directory: Path, nodes: Sequence[Node], port: int, *flags: str
) -> AbstractContextManager[Job]:
    """Start a DDP training whose ranks may have 256 open files each."""
    return jobs.torchrun(
        directory,
        nodes,
        "script_ddp.py",
        FOREVER,
        *flags,
        port=port,
        limits=["prlimit", "--nofile=256:1024"],
    )


def zero(
    directory: Path, nodes: Sequence[Node], port: int, *, stage: int
) -> AbstractContextManager[Job]:
    """Start a DeepSpeed training."""
    return jobs.torchrun(directory, nodes, *deepspeed(stage), port=port)


def fp16(directory: Path, nodes: Sequence[Node], port: int) -> AbstractContextManager[Job]:
    """Start a DDP training with fp16, whose loss is scaled by torch's GradScaler."""
    return ddp(directory, nodes, port, "--fp16")


def wrong_interface(
    directory: Path, nodes: Sequence[Node], port: int
) -> AbstractContextManager[Job]:
    """Start a training that is told to use an interface that its second node does not have."""
    added = {nodes[1].name: {"NCCL_SOCKET_IFNAME": "ens1f0"}}
    return jobs.torchrun(directory, nodes, "script_ddp.py", FOREVER, port=port, added=added)


def rank_twice(directory: Path, nodes: Sequence[Node], port: int) -> AbstractContextManager[Job]:
    """Start a training whose last rank has the number of the one before."""
    changed = {3: {"RANK": "2"}}
    return jobs.by_hand(directory, nodes, "script_ddp.py", FOREVER, port=port, changed=changed)


def wrong_size(directory: Path, nodes: Sequence[Node], port: int) -> AbstractContextManager[Job]:
    """Start a training whose second node counts twice as many ranks."""
    changed = {rank: {"WORLD_SIZE": "8"} for rank in (2, 3)}
    return jobs.by_hand(directory, nodes, "script_ddp.py", FOREVER, port=port, changed=changed)


@dataclass(frozen=True)
class Trial:
    """A job, and the faults that it meets, one after the other."""

    start: Start
    faults: Sequence[str]


TRIALS: Sequence[Sequence[Trial]] = (
    (Trial(ddp, ["stopped", "open-files", "slow"]), Trial(wrong_interface, ["interface"])),
    (
        Trial(partial(zero, stage=1), ["input-stalls"]),
        Trial(partial(zero, stage=1), ["collective-skipped"]),
        Trial(partial(zero, stage=1), ["out-of-memory"]),
        Trial(rank_twice, ["rank-twice"]),
        Trial(ddp, ["not-a-number"]),
    ),
    (
        Trial(partial(zero, stage=2), ["network"]),
        Trial(fp16, ["overflow"]),
        Trial(wrong_size, ["world-size"]),
        Trial(orphan, ["port-held"]),
    ),
)
"""Of each pair of nodes.

A job that hung and went on is given longer the next time, so that each hangs but once.
"""


@dataclass
class Case:
    """What became of one fault."""

    nodes: Sequence[Node]
    begin: float
    worked: float = 0.0
    """Seconds from the fault to its page, less what agents and servers waited for a CPU."""
    over: float = 0.0
    """When the fault was undone, or the job ended."""
    end: float = 0.0
    """When all of it was over."""
    names: frozenset[str] = frozenset()
    """What the agents call the job, on each of its nodes."""
    told: list[Alert] = field(default_factory=list)


@dataclass
class Story:
    """What became of all."""

    cases: Mapping[str, Case]
    others: Sequence[str]
    """What came and was not expected of any fault."""
    left: Sequence[str]
    """What still fired at the end."""


def run(lab: Paging, directory: Path, trials: Sequence[Sequence[Trial]]) -> Story:
    """Run the trials of each pair of nodes one after the other, all pairs at once."""
    cases: dict[str, Case] = {}
    pairs = [lab.lab.nodes[2 * number : 2 * number + 2] for number in range(len(trials))]

    def play(number: int) -> None:
        for turn, trial in enumerate(trials[number]):
            port = 29500 + 10 * number + turn
            _play(lab, trial, cases, pairs[number], directory / f"job-{port}", port)

    with ThreadPoolExecutor(len(trials), thread_name_prefix="pair") as pool:
        for future in [pool.submit(play, number) for number in range(len(trials))]:
            future.result()
    told = lab.receiver.told()
    for name, case in cases.items():
        case.told += [one for one in _of_fault(name, case, told) if one.received <= case.end]
    begin = min(case.begin for case in cases.values())
    others = [
        f"{alert.received - begin:.0f} s: {alert}"
        for alert in told
        if not any(alert in case.told for case in cases.values()) and not _follows(alert, cases)
    ]
    left = [str(alert) for alert in lab.receiver.firing() if not _follows(alert, cases)]
    return Story(cases, others, left)


def _follows(alert: Alert, cases: Mapping[str, Case]) -> bool:
    """Tell whether an alert follows from a fault that had come before."""
    return any(
        case.begin <= alert.received and FAULTS[name].follows(alert) for name, case in cases.items()
    )


def _play(
    lab: Paging,
    trial: Trial,
    cases: dict[str, Case],
    nodes: Sequence[Node],
    directory: Path,
    port: int,
) -> None:
    begin = time.monotonic()
    with trial.start(directory, nodes, port) as job:
        for name in trial.faults:
            fault = FAULTS[name]
            if fault.inject is not None:
                job.until(LEARNT, LEARNS)
                begin = time.monotonic()
            case = cases[name] = Case(nodes, begin, names=_names(nodes))
            stopwatch = Stopwatch(
                *(node.agent.pid for node in nodes),
                lab.prometheus.process.pid,
                lab.alertmanager.process.pid,
            )
            with fault.inject(job) if fault.inject is not None else contextlib.nullcontext():
                told = lab.receiver.wait(partial(_firing, lab, name, case), fault.seconds)
                case.worked = stopwatch.seconds()
                lab.lab.progress(
                    f"{name}: {'told' if told else 'NOT told'} after "
                    f"{time.monotonic() - case.begin:.1f} "
                    f"s, {case.worked:.1f} s without what other work took"
                )
                time.sleep(QUIET)
                case.names |= _names(nodes)
            if not fault.ends:
                _end(lab, name, case)
    if fault.ends and not fault.restarts:
        _end(lab, name, case)
    if fault.restarts:
        case.over = time.monotonic()
        with trial.start(directory.with_suffix(".again"), nodes, port) as job:
            job.until(LEARNT, LEARNS)
            _end(lab, name, case)


def _firing(lab: Paging, name: str, case: Case) -> list[Alert]:
    """Return what fires of a fault, and did not before it."""
    told = _of_fault(name, case, lab.receiver.told())
    last = {(alert.receiver, alert.fingerprint): alert for alert in told}
    return [alert for alert in last.values() if alert.status == FIRING]


def _of_fault(name: str, case: Case, told: Iterable[Alert]) -> list[Alert]:
    """Return the alerts of a fault since it began, and their ends, whose text says less where a
    node has forgotten the job.
    """
    found: list[Alert] = []
    known = set()
    for alert in told:
        if alert.received >= case.begin:
            key = alert.receiver, alert.fingerprint
            if FAULTS[name].names(alert, case.nodes):
                known.add(key)
            if key in known:
                found.append(alert)
    return found


def _end(lab: Paging, name: str, case: Case) -> None:
    """Wait until a fault that is undone is told to be over, and a little longer."""
    case.over = case.over or time.monotonic()
    over = lab.receiver.wait(lambda: not _firing(lab, name, case), FAULTS[name].over)
    lab.lab.progress(
        f"{name}: {'over' if over else 'NOT over'} after {time.monotonic() - case.over:.1f} s"
    )
    time.sleep(ENDING)
    case.end = time.monotonic()


def _names(nodes: Sequence[Node]) -> frozenset[str]:
    """Return what the agents call the jobs of these nodes."""
    return frozenset(
        dict(labels)["training_job"]
        for node in nodes
        for labels in node.scrape().series.get("dshealthd_job_run_info", {})
    )
