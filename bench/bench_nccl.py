"""From a fault in a job of genuine NCCL to the page: seconds until the metrics of the agent name
the rank, and until Alertmanager's webhook has come.

Jobs of four ranks over two nodes of the lab, with NCCL's host code as `./dev test-nccl` builds it,
heartbeats, and agents, Prometheus and Alertmanager as shipped. Each trial is a job of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.bench_pages import p95
from bench.processes import table
from tests.lab.node import INTERFACE, Node
from tests.lab.paging import QUIET_COLLECTORS, Paging
from tests.lab.receiver import FIRING, Alert
from tests.nccl import build
from tests.nccl.job import Job

VERSIONS = ("2.28.9", "2.30.7")
SIZE, EACH = 4, 2
"""Ranks, and those of a node."""
STEP = 1.0
"""Seconds from one step of a training to the next."""
STEPS = 25
"""Steps before the fault, at least: what is usual is known after ten, and RAS has answered
twice."""
PHASE = 30.0
"""Faults begin within so many seconds, at any phase of queries, scrapes and evaluations."""
COMES = 240.0
LOOK = 1.0
"""Seconds between two looks at the metrics."""
START = 2.0
"""Seconds between the starts of two jobs, so that the trials are spread."""
PORTS = itertools.count(28100)
"""Of RAS, one a job, in the networks of the nodes, where nothing else is."""
PREFIX = "dshealthd_job_nccl_"


@dataclass(frozen=True)
class Fault:
    """What is done to one rank, and what is true of the hang that follows."""

    victim: int
    begin: Callable[[Job], object]
    truth: tuple[str, str]
    """Class of the hang, and what is wrong with the rank."""


def _skip(job: Job) -> None:
    job.ranks[2].say("skip")


FAULTS = {
    "collective skipped": Fault(2, _skip, ("desync", "ahead")),
    "killed": Fault(3, lambda job: job.kill(3), ("process", "gone")),
    "stopped": Fault(3, lambda job: job.stop(3), ("process", "stopped")),
}


@dataclass
class Trial:
    """One fault, and what came of it."""

    version: str
    fault: str
    heartbeats: bool
    job: str = ""
    began: float = 0.0
    named: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds after which RAS named a rank, by rank and what is wrong with it."""
    paged: float = float("inf")
    alerts: list[Alert] = field(default_factory=list)
    """Of the job, in the order in which they came."""
    done: bool = False

    def right(self) -> bool:
        """Tell whether all pages name the rank, and with heartbeats the class and the reason."""
        fault = FAULTS[self.fault]
        told = {
            (alert.labels.get("class"), alert.labels.get("reason"), alert.labels.get("rank"))
            for alert in self.alerts
        }
        if not self.heartbeats:
            description = " ".join(alert.annotations["description"] for alert in self.alerts)
            return f"rank {fault.victim} " in description
        return told == {(*fault.truth, str(fault.victim))}

    def __str__(self) -> str:
        """Tell in a line what came of it."""
        named = ", ".join(
            f"rank {rank} {what} {seconds:.1f} s" for (rank, what), seconds in self.named.items()
        )
        told = "; ".join(
            " ".join(
                alert.labels.get(name, "")
                for name in ("alertname", "class", "reason", "node", "rank")
            )
            for alert in self.alerts
        )
        return (
            f"{self.version} {self.fault} ({self.job}, heartbeats {self.heartbeats}): "
            f"named {named or 'nobody'}; page {self.paged:.1f} s: {told or 'none'}"
        )


class Watch(threading.Thread):
    """Looks at the metrics of the node of rank 0 for who is named, in all trials that go on."""

    def __init__(self, node: Node) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.trials: dict[str, Trial] = {}
        self._ends = threading.Event()

    def run(self) -> None:
        """Look until `end`."""
        while not self._ends.wait(LOOK):
            trials = {job: trial for job, trial in list(self.trials.items()) if trial.began}
            if not trials:
                continue
            scrape = self.node.scrape()
            now = time.monotonic()
            for key in scrape.series.get(f"{PREFIX}rank_trouble_info", {}):
                labels = dict(key)
                if (trial := trials.get(labels["training_job"])) is not None:
                    trial.named.setdefault((labels["rank"], labels["trouble"]), now - trial.began)
            for key, behind in scrape.series.get(f"{PREFIX}rank_operations_behind", {}).items():
                labels = dict(key)
                if (trial := trials.get(labels["training_job"])) is not None:
                    what = f"behind by {behind:g}"
                    trial.named.setdefault((labels["rank"], what), now - trial.began)

    def end(self) -> None:
        """Look no more."""
        self._ends.set()
        self.join(60.0)


@contextlib.contextmanager
def running(trial: Trial, nodes: Sequence[Node], folder: Path) -> Iterator[Job]:
    """Run the job of a trial on two nodes."""
    places = [nodes[number // EACH] for number in range(SIZE)]
    folder.mkdir()
    shared = {
        "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
        "NCCL_RAS_ADDR": f"localhost:{next(PORTS)}",
        "MASTER_ADDR": places[0].address,
        **({} if trial.heartbeats else {"DSHEALTHD_HEARTBEAT": "0"}),
    }
    own = [
        {
            "NCCL_HOSTID": node.name,
            "LOCAL_RANK": str(number % EACH),
        }
        for number, node in enumerate(places)
    ]
    stations = [node.station for node in places]
    with Job(build.build(trial.version), SIZE, folder, shared, own, stations) as job:
        trial.job = job.name
        job.join()
        job.split("pair", [0, 1, 0, 1])
        yield job


def try_it(lab: Paging, watch: Watch, trial: Trial, folder: Path, until: float) -> None:
    """Have a job train, break it, and wait for its page; not where it is too late to begin."""
    if time.monotonic() > until:
        return
    with running(trial, lab.lab.nodes, folder) as job:
        watch.trials[trial.job] = trial
        ready = time.monotonic() + random.uniform(0, PHASE)
        for step in itertools.count():
            for rank in job.ranks:
                rank.say("train world")
            for rank in job.ranks:
                rank.hear()
            if step >= STEPS and time.monotonic() > ready + STEPS * STEP:
                break
            time.sleep(STEP)
        fault = FAULTS[trial.fault]
        job.hold()
        trial.began = time.monotonic()
        fault.begin(job)
        for rank in job.ranks:
            if rank.number != fault.victim:
                rank.say("train world")

        def pages() -> list[Alert]:
            return [
                alert
                for alert in lab.receiver.told("page")
                if alert.labels.get("training_job") == trial.job and alert.status == FIRING
            ]

        lab.receiver.wait(lambda: bool(pages()), COMES)
        end = time.monotonic() + 10 * LOOK  # a second page, and who is named late
        while time.monotonic() < end or (
            not trial.named and time.monotonic() < trial.began + COMES / 2
        ):
            time.sleep(LOOK)
        if found := pages():
            trial.paged = found[0].received - trial.began
            trial.alerts = list({alert.fingerprint: alert for alert in found}.values())
        trial.began, trial.done = 0.0, True
    print(trial, file=sys.stderr, flush=True)


def run(trials: Sequence[Trial], at_once: int, minutes: float) -> None:
    """Run trials, so many side by side; none begins after so many minutes."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Paging(
            Path(directory),
            SIZE // EACH,
            gpus=SIZE,
            as_shipped=True,
            collectors=QUIET_COLLECTORS,
            progress=lambda what: print(what, file=sys.stderr, flush=True),
        ) as lab,
    ):
        for node in lab.lab.nodes:
            (node.directory / "dev/nvidiactl").touch()
        lab.until_watched()
        watch = Watch(lab.lab.nodes[0])
        watch.start()
        until = time.monotonic() + minutes * 60
        with ThreadPoolExecutor(at_once) as pool:
            done = []
            for number, trial in enumerate(trials):
                folder = Path(directory) / f"job-{number}"
                done.append(pool.submit(try_it, lab, watch, trial, folder, until))
                time.sleep(START)
            for future in done:
                future.result()
        watch.end()


def rows(trials: Sequence[Trial]) -> list[list[object]]:
    """Return a row for each release and fault."""
    found: list[list[object]] = []
    keys = dict.fromkeys((trial.version, trial.fault, trial.heartbeats) for trial in trials)
    for version, fault, heartbeats in keys:
        of = [
            trial
            for trial in trials
            if (trial.version, trial.fault, trial.heartbeats) == (version, fault, heartbeats)
        ]
        victim = str(FAULTS[fault].victim)
        named = [
            min(
                (seconds for (rank, _), seconds in trial.named.items() if rank == victim),
                default=float("inf"),
            )
            for trial in of
        ]
        paged = [trial.paged for trial in of]
        others = sum(any(rank != victim for rank, _ in trial.named) for trial in of)
        found.append(
            [
                version,
                fault,
                "yes" if heartbeats else "no",
                len(of),
                *(f"{p95(values):.0f} ({max(values):.0f})" for values in (named, paged)),
                f"{sum(trial.right() for trial in of)} of {len(of)}",
                f"{others} of {len(of)}",
            ]
        )
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=["2.30.7"], help="of NCCL (%(default)s)")
    parser.add_argument("--trials", type=int, default=20, help="of each fault (%(default)s)")
    parser.add_argument("--at-once", type=int, default=6, help="8 at most (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="at most (%(default)s)")
    parser.add_argument("--no-heartbeats", action="store_true", help="RAS alone")
    options = parser.parse_args()
    trials = [
        Trial(version, fault, not options.no_heartbeats)
        for version in options.versions
        for _ in range(options.trials)
        for fault in FAULTS
    ]
    random.shuffle(trials)
    run(trials, options.at_once, options.minutes)
    trials = sorted(
        (trial for trial in trials if trial.done), key=lambda trial: (trial.version, trial.fault)
    )
    print(f"load {os.getloadavg()[0]:.0f}\n")
    head = ["NCCL", "fault", "heartbeats", "trials", "named, p95 (max) s", "page, p95 (max) s"]
    head += ["page right", "another named as well"]
    print(table(head, rows(trials)), flush=True)


if __name__ == "__main__":
    main()
