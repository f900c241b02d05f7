"""A job of genuine NCCL over two nodes: the agent of rank 0 names the rank of the other node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.agents import Scrape
from tests.lab.lab import Lab
from tests.lab.node import INTERFACE, toml
from tests.nccl import build
from tests.nccl.job import Job

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(900)]

SIZE, EACH = 4, 2
"""Ranks, and those of a node."""
VICTIM = 3
NAMED_WITHIN = 120.0
"""Seconds; RAS needs 10, and the next query comes within 15, on a machine with other work."""
PREFIX = "dshealthd_job_nccl_"


def troubles(scrape: Scrape) -> set[tuple[str, str, str, str]]:
    """Return rank, host, GPU and trouble of all who are named."""
    names = ("rank", "host", "gpu", "trouble")
    return {
        (label["rank"], label["host"], label["gpu"], label["trouble"])
        for label in map(dict, scrape.series.get(f"{PREFIX}rank_trouble_info", {}))
        if label.keys() >= set(names)
    }


def states(scrape: Scrape) -> set[str]:
    """Return what became of the queries of the job."""
    return {dict(key)["state"] for key in scrape.series.get(f"{PREFIX}ras_state", {})}


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_two_nodes(version: str, tmp_path: Path) -> None:
    """A stopped rank of the second node is named with its address; nobody is before and after."""
    lib, folder = build.build(version), tmp_path / "job"
    folder.mkdir()
    with Lab(
        tmp_path / "lab",
        2,
        config=lambda node: toml({"path": {"dev": str(node.directory / "dev")}}),
        collectors=("nccl_ras",),
        interval="15s",
        start=False,
    ) as lab:
        for node in lab.nodes:
            (node.directory / "dev").mkdir()
            (node.directory / "dev/nvidiactl").touch()
            node.start()
        places = [lab.nodes[number // EACH] for number in range(SIZE)]
        own = [
            {"NCCL_HOSTID": node.name, "LOCAL_RANK": str(number % EACH)}
            for number, node in enumerate(places)
        ]
        environment = {
            "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
            "NCCL_RAS_ADDR": "localhost:28028",
            "MASTER_ADDR": places[0].address,
        }
        stations = [node.station for node in places]
        with Job(lib, SIZE, folder, environment, own, stations) as job:
            first, second = lab.nodes
            job.join()
            job.split("pair", [0, 1, 0, 1])

            def step() -> None:
                job.launch("world", "AllReduce", 1)
                time.sleep(1.0)

            begin = time.monotonic()
            scrape = first.scrape()
            while not scrape.all(f"{PREFIX}answers_without_progress"):  # until two are compared
                step()
                scrape = first.scrape()
                assert troubles(scrape) == set()
                assert time.monotonic() - begin < 2 * NAMED_WITHIN, (scrape.text, states(scrape))
            assert states(second.scrape()) == {"elsewhere"}
            job.stop(VICTIM)
            stopped = time.monotonic()
            while not (named := troubles(first.scrape())):
                assert time.monotonic() - stopped < NAMED_WITHIN, first.scrape().text
                time.sleep(0.5)
            assert named == {("3", second.address, str(VICTIM % EACH), "unresponsive")}
            job.resume(VICTIM)
            resumed = time.monotonic()
            while troubles(first.scrape()):
                step()
                assert time.monotonic() - resumed < NAMED_WITHIN, first.scrape().text
            assert not job.ended()
