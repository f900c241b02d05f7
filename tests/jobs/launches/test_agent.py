"""An agent beside the service: what it exports, and how it says that ranks are followed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.agents import Scrape, running
from tests.jobs.launches import libraries
from tests.jobs.launches.machine import MARKS, machine_of
from tests.nccl.job import Job

pytestmark = MARKS


def test_an_agent_and_the_service(tmp_path: Path) -> None:
    """Counts reach /metrics and `dshealthd jobs`, and go with the service."""
    with Job(libraries.build(tmp_path / "lib"), 2, tmp_path) as job:
        with machine_of(tmp_path, job) as machine:
            flags = ("--path.procfs", str(machine.procfs))
        output = tmp_path / "launches.json"
        command = [sys.executable, "-m", "dshealthd"]
        service = subprocess.Popen([*command, "launches", "--output", str(output), *flags])
        config = (
            f"[collectors.job_launches]\ninterval = '1s'\nfile = '{output}'\n"
            "[collectors.job_environment]\ninterval = '1s'\n"
        )
        try:
            with running(tmp_path, config, flags=flags) as agent:

                def has(scrape: Scrape, value: float, rank: str, name: str, **labels: str) -> bool:
                    return scrape.value(f"dshealthd_job_{name}", rank=rank, **labels) == value

                agent.wait(lambda scrape: has(scrape, 0, "1", "launches", kind="collective"))
                job.join()
                job.launch("world", "AllReduce", 20)
                job.launch("world", "AllGather", 4, [0])
                agent.wait(
                    lambda scrape: (
                        has(scrape, 24, "0", "launches", kind="collective")
                        and has(scrape, 4, "1", "launches_behind")
                        and scrape.value("dshealthd_job_followed_ranks", by="launches")
                    )
                )
                shown = subprocess.run(
                    [*command, "jobs", f"127.0.0.1:{agent.port}"],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=120,
                )
                assert "followed: 2 by launches" in shown.stdout, shown
                service.terminate()
                assert service.wait(60) == 0
                agent.wait(lambda scrape: not scrape.all("dshealthd_job_launches"))
                agent.wait(
                    lambda scrape: scrape.value("dshealthd_job_followed_ranks", by="nothing")
                )
        finally:
            service.kill()
            service.wait(60)
