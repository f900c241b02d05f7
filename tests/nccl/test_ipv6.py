"""What a JSON query costs a rank of 2.28.9 over IPv6, which is why it is not asked there."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nccl.job import RAS_PORT, Job
from tests.nccl.node import Node
from tests.netns import network_namespace

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(600)]
ADDRESS = "fd00::abcd:1234:5678:1"
TAKEN_FOR_A_COUNT = 0x01000000
"""The last four bytes of the address, as the machine reads them."""
BYTES_EACH = 16
QUESTION = b"CLIENT PROTOCOL 2\nSET FORMAT json\nVERBOSE STATUS\n"


def peaks(job: Job) -> dict[int, int]:
    """Return the most memory that each rank has had in use so far, in bytes."""
    return {
        rank.number: int(match[1]) * 1024
        for rank in job.ranks
        if (match := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{rank.pid}/status").read_text()))
    }


def grown(job: Job) -> int:
    """Return by how much the peak of any rank has grown by one query, in bytes."""
    # The kernel may give the connection to the stopped rank, which is silent.
    for _ in range(20):
        before = peaks(job)
        try:
            with socket.create_connection((job.address, RAS_PORT), timeout=60) as connection:
                connection.sendall(QUESTION)
                size = 0
                while part := connection.recv(1 << 16):
                    size += len(part)
        except TimeoutError:
            continue
        assert size > 1000
        after = peaks(job)
        return max(after[rank] - before[rank] for rank in before)
    pytest.fail("no rank answered")


@pytest.mark.parametrize(("version", "family", "cost", "state"), [
    ("2.28.9", "AF_INET6", TAKEN_FOR_A_COUNT * BYTES_EACH, "unsafe_on_ipv6"),
    ("2.28.9", "AF_INET", 0, "answered"),
    ("2.30.7", "AF_INET6", 0, "answered"),
])  # fmt: skip
def test_memory(
    version: str, family: str, cost: int, state: str, make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """The peak of who answers grows by what the address reads as; dshealthd does not ask there."""
    with network_namespace():
        add = ["ip", "address", "add", f"{ADDRESS}/128", "dev", "lo", "nodad"]
        subprocess.run(add, check=True)
        job = make_job(version, 4, NCCL_SOCKET_FAMILY=family)
        job.join()
        for number in range(6):
            job.split(f"c{number}", [rank % 2 if number % 3 else 0 for rank in range(4)])
        job.stop(3)
        time.sleep(6)  # RAS waits 5 s for a peer before it answers without it
        node = Node(job, tmp_path)
        assert node.state(node.sweep()) == state
        found = grown(job)
        assert cost <= found < cost + (4 << 20)
        job.close()
