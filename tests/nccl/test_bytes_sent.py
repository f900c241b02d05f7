"""What one collection of `dshealthd metrics` sends to a job, seen on its system calls.

Nothing goes to releases that are refused; to the others, what may be sent, and nothing else.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.jobs.ras.protocol import MAY_BE_SENT
from tests.agents import Scrape
from tests.nccl.job import Job
from tests.nccl.node import show

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(1200)]

SENDING = "connect,sendto,sendmsg,sendmmsg,write,writev,sendfile"
"""Every call by which bytes can reach a TCP socket, and the one that makes a connection."""
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def traced(job: Job, folder: Path) -> tuple[Scrape, str]:
    """Collect once, with workers; return the metrics and the calls that concern the job's RAS."""
    record = folder / "calls"
    proc = show(folder / "view", job)
    (folder / "view/nvidiactl").touch()
    command = [sys.executable, "-m", "dshealthd", "metrics"]
    command += ["--path.procfs", str(proc), "--path.dev", str(folder / "view")]
    command += ["--path.state", str(folder / "state")]
    # Everything the agent starts is followed; -yy says to whom a socket is connected.
    trace = ["strace", "-f", "-qq", "-yy", "-s", "200", "-e", f"trace={SENDING}", "-o", str(record)]
    done = subprocess.run(
        [*trace, *command], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = record.read_text(errors="replace").splitlines()
    ours = [line for line in calls if job.address in line]
    return Scrape(done.stdout, 0.0), "\n".join(ours)


def broken_job(make_job: Callable[..., Job], version: str) -> Job:
    """Return a job with what makes an unsafe release overrun: communicators, and a rank missing."""
    job = make_job(version, 4)
    job.join()
    for number in range(4):
        job.split(f"c{number}", [rank % 2 for rank in range(4)])
    job.kill(3)
    return job


def test_no_byte_to_a_refused_release(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """2.27.7 is neither connected to nor sent anything, and the metrics say why."""
    job = broken_job(make_job, "2.27.7")
    scrape, calls = traced(job, tmp_path)
    assert calls == ""
    assert scrape.all("dshealthd_job_nccl_ras_state", training_job=job.name) == [1]
    assert (
        scrape.value("dshealthd_job_nccl_ras_state", training_job=job.name, state="unsafe_release")
        == 1
    )
    assert not job.ended()


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_bytes_to_releases_that_are_asked(
    version: str, make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """The same trace shows what is sent to the others: lines of the closed list alone."""
    job = broken_job(make_job, version)
    scrape, calls = traced(job, tmp_path)
    assert (
        scrape.value("dshealthd_job_nccl_ras_state", training_job=job.name, state="answered") == 1
    )
    said = [
        QUOTED.search(line)
        for line in calls.splitlines()
        if not re.search(r"\bconnect\(|<\.\.\. connect", line)
    ]
    lines = {match[1].encode().decode("unicode_escape").encode() for match in said if match}
    assert lines
    assert all(said)
    assert lines <= MAY_BE_SENT, lines - MAY_BE_SENT
    assert not job.ended()
