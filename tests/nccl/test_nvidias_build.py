"""NVIDIA's own build of NCCL, as PyTorch's CUDA wheel brings it, without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dshealthd.jobs.launches.programs import FUNCTIONS, ORDERED, UNORDERED
from dshealthd.linux.elf import functions
from tests.jobs.launches.machine import machine_of
from tests.jobs.launches.service import text_of, wait_for_original_text
from tests.nccl.header import launching
from tests.nccl.job import Job
from tests.nccl.pytorch.wheel import FOLDER

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may set breakpoints"),
]
SCRIPT = Path(__file__).with_name("enter.py")


def test_what_launches_is_counted_as_it_is_entered(tmp_path: Path) -> None:
    """Each function that takes a stream, once a call, by its communicator; afterwards the text is
    the original.
    """
    nccl = Path(os.environ.get(FOLDER) or "/nowhere") / "nvidia/nccl"
    library = nccl.resolve() / "lib/libnccl.so.2"
    if not library.is_file():
        pytest.skip(f"{FOLDER} names no folder with NVIDIA's NCCL")
    launches = launching((nccl / "include/nccl.h").read_text())
    with library.open("rb") as file:
        names = set(functions(file.fileno(), FUNCTIONS))
    assert launches.keys() == names & {*ORDERED, *UNORDERED}
    with Job(library.parent, 1, tmp_path, script=SCRIPT) as job:
        rank = job.ranks[0]
        with machine_of(tmp_path, job) as machine:
            assert machine.turn()[rank.pid]["refused"] is None
            texts = text_of(rank.pid, library, names).values()
            assert all(memory != file for memory, file in texts)
            for times, (name, argument) in enumerate(launches.items(), 1):
                rank.ask(f"enter {name} {argument} {times}")
            found = machine.turn()[rank.pid]["communicators"]
            assert sorted((one["collectives"], one["sends"]) for one in found) == sorted(
                (times, 0) if name in ORDERED else (0, times)
                for times, name in enumerate(launches, 1)
            )
        wait_for_original_text(rank.pid, library, names)
