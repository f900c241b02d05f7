"""Healthy trainings, for long: `python -m tests.lab.healthy_jobs` ends with status 1 if anybody is
told of anything.

A DDP and a DeepSpeed training on two nodes each compute, evaluate, write checkpoints and pause.
Beside them another training ends in order every few minutes and is started again, and the nodes
have other work to do now and then. Only the Watchdog may speak.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import job_trials, jobs
from tests.lab.paging import Paging
from tests.lab.receiver import WATCHDOG_MISSED, Alert

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lab.jobs import Job
    from tests.lab.node import Node

AVERAGED = 10
"""Steps over which the agent's step time is averaged."""
SHORT_STEPS, SHORT_PORT = "2000", 29510
"""Of the training that ends and is started again: some three minutes."""
LOOK_SECONDS = 15.0
LOADS = (("--cpu", "1"), ("--iomix", "1"), ("--vm", "1", "--vm-bytes", "256M"), ("--cpu", "2"))
"""Bursts of other work, as options of stress-ng."""
LOAD_SECONDS, LOAD_EVERY = "10", 45.0


@dataclass
class Look:
    """What the nodes of a job say at one moment, and what the job itself has said of the same
    steps.
    """

    name: str
    """What the job is called: by its ranks' own environment."""
    ranks: list[set[str]]
    """Which report under this name, on each node."""
    step_seconds: dict[str, float]
    logged_seconds: dict[str, float]


@dataclass
class Healthy:
    """A job that runs well."""

    title: str
    looks: list[Look] = field(default_factory=list)


@dataclass
class Watched:
    """What was seen and told."""

    jobs: Sequence[Healthy]
    told: Sequence[Alert]
    silence: float
    """The longest time without a Watchdog, in seconds."""
    minutes: float


def look(job: Job) -> Look:
    """Compare what the agents tell with what the job has printed."""
    name = job.name()
    reached: dict[str, tuple[int, float]] = {}
    ranks = []
    for node in job.nodes:
        scrape = node.scrape()
        values: dict[str, dict[str, float]] = defaultdict(dict)
        for metric in ("step", "step_seconds"):
            for key, value in scrape.series.get(f"dshealthd_job_{metric}", {}).items():
                labels = dict(key)
                if labels["training_job"] == name:
                    values[metric][labels["rank"]] = value
        ranks.append(set(values["step"]))
        reached |= {
            rank: (round(step), values["step_seconds"][rank])
            for rank, step in values["step"].items()
        }
    time.sleep(0.5)  # what a rank has told it prints a moment later
    logged = job.steps()
    return Look(
        name=name,
        ranks=ranks,
        step_seconds={rank: seconds for rank, (_, seconds) in reached.items()},
        logged_seconds={
            rank: moving_average(logged[int(rank)][:step]) for rank, (step, _) in reached.items()
        },
    )


def moving_average(seconds: Sequence[float]) -> float:
    """Return the mean over about ten steps at the end of a log, of which a heartbeat does not know
    the first.
    """
    mean = 0.0
    for number, value in enumerate(seconds[1:], 1):
        mean += (value - mean) / min(number, AVERAGED)
    return mean


def watch(
    lab: Paging, directory: Path, seconds: float, progress: Callable[[str], None] = lambda _: None
) -> Watched:
    """Run two jobs on four nodes for so long, or until somebody is told of something."""
    lab.until_watched()
    ddp, zero = Healthy("DDP"), Healthy("DeepSpeed, ZeRO 1")
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(job_trials.ddp(directory / "ddp", lab.lab.nodes[:2], 29500))
        other = stack.enter_context(
            job_trials.zero(directory / "zero", lab.lab.nodes[2:4], 29500, stage=1)
        )
        for job in (one, other):
            job.until(job_trials.LEARNT, job_trials.LEARNS)
        begin = time.monotonic()
        while (gone := time.monotonic() - begin) < seconds and not lab.receiver.told():
            for kind, job in ((ddp, one), (zero, other)):
                kind.looks.append(look(job))
            progress(
                f"{gone:4.0f} s: at steps {[min(map(len, job.steps().values())) for job in (one, other)]}"
            )
            lab.receiver.wait(lambda: bool(lab.receiver.told()), LOOK_SECONDS)
        minutes, silence = (time.monotonic() - begin) / 60, lab.receiver.longest_silence(begin)
    return Watched([ddp, zero], lab.receiver.told(), silence, minutes)


def other_work(
    directory: Path,
    nodes: Sequence[Node],
    stopped: threading.Event,
    progress: Callable[[str], None],
) -> int:
    """Run a training that ends in order on the first two nodes, again and again, and bursts of load
    on all in turn, until `stopped` is set.

    Return how many trainings have ended by themselves; AssertionError with its logs if one has
    failed.
    """
    bursts = itertools.cycle(itertools.product(nodes, LOADS))
    number = 0
    while True:
        with jobs.torchrun(
            directory / f"short-{number}", nodes[:2], "script_ddp.py", SHORT_STEPS, port=SHORT_PORT
        ) as job:
            while any(launcher.poll() is None for launcher in job.launchers):
                if stopped.wait(LOAD_EVERY):
                    return number
                node, load = next(bursts)
                progress(f"load on {node.name}: {' '.join(load)}")
                node.station.popen(
                    ["stress-ng", "--quiet", *load, "--timeout", LOAD_SECONDS],
                    stdout=subprocess.DEVNULL,
                )
            assert all(launcher.wait() == 0 for launcher in job.launchers), job.text()[-3000:]
            number += 1
            progress(f"trainings that have ended in order: {number}")


def main() -> int:
    """Watch, and say what came."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.healthy_jobs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Paging(Path(name), 4, gpus=2) as lab:
        if lab.lab.limits:
            sys.exit("; ".join(lab.lab.limits))
        directory, stopped, say = Path(name), threading.Event(), partial(print, flush=True)
        with ThreadPoolExecutor(1, thread_name_prefix="other work") as pool:
            work = pool.submit(
                other_work, directory, lab.lab.nodes[2:] + lab.lab.nodes[:2], stopped, say
            )
            try:
                watched = watch(lab, directory, 60 * options.minutes, say)
            finally:
                stopped.set()
            ended = work.result()
        apart = [
            abs(seconds / look.logged_seconds[rank] - 1)
            for job in watched.jobs
            for look in job.looks
            for rank, seconds in look.step_seconds.items()
        ]
        print(
            f"{watched.minutes:.1f} minutes, {ended} trainings that ended in order: "
            f"{len(watched.told)} pages and tickets"
        )
        print(
            f"step times of {len(apart)} readings differ from the logs by {max(apart):.2%} at most"
        )
        print(f"at most {watched.silence:.0f} s without a Watchdog")
        for alert in watched.told:
            print(f"  {alert}: {alert.annotations['description']}")
        return 1 if watched.told or watched.silence > WATCHDOG_MISSED else 0


if __name__ == "__main__":
    sys.exit(main())
