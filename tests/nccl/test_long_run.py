"""Half an hour of a training on genuine NCCL as it goes in real life, under the shipped rules.

It stops for 3, 30 and 75 s, ends normally and begins again. Whoever is paged for anything but the
long stop, while it lasts, is paged for nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests import yaml_files
from tests.agents import RunningAgent, running
from tests.grafana.server import Prometheus, prometheus
from tests.nccl.job import Job
from tests.nccl.node import add, show

MINUTES = float(os.environ.get("DSHEALTHD_NCCL_MINUTES", "30"))
pytestmark = [pytest.mark.nccl, pytest.mark.timeout(int(MINUTES * 60) + 1800)]

VERSION = "2.30.7"
SIZE = 8
STEP = 1.0
"""Seconds from one step of the training to the next."""
STOPS = (3.0, 30.0, 75.0)
PAUSE = 75.0
"""Seconds that the training goes on between one stop and the next."""
PAGED_FROM = 60.0
"""Seconds of standing still from which a page is right."""
LINGERS = 150.0
"""Seconds that a page may outlast its cause: the next answers of RAS, and keep_firing_for."""
RULES = Path(__file__).parents[2] / "deploy/prometheus"
SHIPPED = ("thresholds.yml", "recording.yml", "alerts.yml")


@dataclass(frozen=True)
class Stop:
    """A rank that was stopped, by the wall clock."""

    job: str
    rank: int
    start: float
    end: float


class Training(threading.Thread):
    """Steps of a job over several communicators, until it is asked to end."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True)
        self.job, self.steps = job, 0
        self._ends = threading.Event()

    def run(self) -> None:
        """Step as DDP over a mesh does: halves, pairs, and all."""
        while not self._ends.wait(STEP):
            for name, operation in (
                ("half/0", "AllGather"),
                ("half/1", "AllGather"),
                *((f"pair/{number}", "ReduceScatter") for number in range(SIZE // 2)),
                ("world", "AllReduce"),
            ):
                self.job.launch(name, operation, 1)
            self.steps += 1

    def end(self) -> None:
        """End after the current step."""
        self._ends.set()
        self.join(60.0)
        assert not self.is_alive(), f"the training hangs at step {self.steps}"


def start(make_job: Callable[..., Job], number: str) -> Job:
    """Start a job with a world, eight halves and pairs."""
    job = make_job(VERSION, SIZE, SLURM_JOB_ID=number)
    job.join()
    job.split("half", [rank * 2 // SIZE for rank in range(SIZE)])
    job.split("pair", [rank // 2 for rank in range(SIZE)])
    return job


@contextlib.contextmanager
def watched(folder: Path, agent: RunningAgent) -> Iterator[Prometheus]:
    """Run a Prometheus with the shipped rules that scrapes the agent."""
    folder.mkdir()
    for name in SHIPPED:
        shutil.copy(RULES / name, folder)
    shipped = yaml_files.load(RULES / "dshealthd.yml")
    (job,) = (job for job in shipped["scrape_configs"] if job["job_name"] == "dshealthd")
    del job["file_sd_configs"]
    target = {"targets": [f"127.0.0.1:{agent.port}"], "labels": {"node": "node-1"}}
    config = {
        "rule_files": [str(folder / name) for name in SHIPPED],
        "scrape_configs": [job | {"static_configs": [target]}],
    }
    place = folder / "prometheus.yml"
    place.write_text(yaml.safe_dump(config), encoding="utf-8")
    with prometheus(folder, place) as server:
        yield server


def test_half_an_hour(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Nobody is paged but for the stop of 75 s, and no rank but the stopped one is ever dead."""
    view = tmp_path / "view"
    proc = show(view)
    flags = ("--path.procfs", str(proc), "--path.dev", str(view))
    (view / "nvidiactl").touch()
    began, stops, lives = time.time(), [], itertools.count(1)
    with (
        running(tmp_path, "", flags=flags) as agent,
        watched(tmp_path / "prometheus", agent) as server,
    ):
        while time.time() - began < MINUTES * 60:
            # The same job of the scheduler, which was requeued.
            job = start(make_job, "7")
            add(proc, job)
            training = Training(job)
            training.start()
            for seconds in STOPS:
                time.sleep(PAUSE)
                rank, before = next(lives) % SIZE, training.steps
                assert before, "the training does not step"
                began_stop = time.time()
                job.stop(rank)
                time.sleep(seconds)
                job.resume(rank)
                stops.append(Stop(job.name, rank, began_stop, time.time()))
            time.sleep(PAUSE)
            training.end()
            assert not job.ended()
            job.destroy_all()
            for rank in range(SIZE):
                job.leave(rank)
        time.sleep(LINGERS)
        fired = list(alerts(server, began))
        scraped = server.instant("count(up == 1)", time.time()).values
    assert scraped == [[1.0]]
    false = [
        (alert, round(at - began))
        for alert, job_name, at in fired
        if not any(
            stop.end - stop.start >= PAGED_FROM and stop.start < at < stop.end + LINGERS
            for stop in stops
            if stop.job == job_name
        )
    ]
    assert not false, false


def alerts(server: Prometheus, began: float) -> Iterator[tuple[str, str, float]]:
    """Yield each alert that fired for a job, at each of its evaluations."""
    step, now = 5.0, time.time()
    for start in range(int(began), int(now), 600):
        query = 'ALERTS{alertstate="firing", training_job!="", severity!="info"}'
        for at in range(start, min(start + 600, int(now)), int(step)):
            for series in server.instant(query, at).series:
                yield series["alertname"], series["training_job"], float(at)
