"""The flight recorders of ProcessGroupNCCL, asked for through their pipes by `dshealthd
evidence`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import dshealthd
from tests.nccl.pytorch.launch import PUBLIC_PYTHON, Training
from tests.nccl.pytorch.wheel import Wheel
from tests.processes import state

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(1800)]

SIZE = 3
CULPRIT = 1
RANK_USER = 4321


@pytest.fixture
def user() -> int | None:
    """Return another user for the ranks where the tests run as root."""
    if os.geteuid() != 0:
        return None
    ask = [PUBLIC_PYTHON, "-c", "import sys; print(sys.implementation.cache_tag)"]
    tag = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    if tag != sys.implementation.cache_tag:
        pytest.skip(f"{PUBLIC_PYTHON}, which every user may run, is {tag} and the wheel is not")
    return RANK_USER


@pytest.fixture
def place(public_path: Path, user: int | None) -> Path:
    """Return a folder of the ranks' user."""
    folder = public_path / "training"
    folder.mkdir()
    if user is not None:
        os.chown(folder, user, user)
    return folder


@pytest.mark.parametrize("fault", ["absent", "stopped"])
def test_missing_rank(
    fault: str, cuda_torch: Wheel, place: Path, user: int | None, tmp_path: Path
) -> None:
    """Ranks dump when they are asked, go on, and the one is named that has not entered."""
    variables = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{place}/fr_",
        "TORCH_FR_DUMP_TEMP_FILE": f"{place}/dump_",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "200",
    }
    with Training(
        cuda_torch,
        place,
        fault=fault,
        culprit=CULPRIT,
        size=SIZE,
        timeout=600,
        environment=variables,
        user=user,
    ) as training:
        pids = training.pids()
        training.wait(lambda: state(pids[CULPRIT]) == ("T" if fault == "stopped" else "S"))
        summary, bundle = evidence(training, tmp_path)
        assert [process.poll() for process in training.processes] == [None] * SIZE
    found = sorted(path.name for path in bundle.glob("*.flight-recorder.json"))
    others = [rank for rank in range(SIZE) if rank != CULPRIT]
    answered = others if fault == "stopped" else list(range(SIZE))
    assert found == [f"rank-{rank}-{pids[rank]}.flight-recorder.json" for rank in answered], summary
    for rank in answered:
        digest = json.loads((bundle / f"rank-{rank}-{pids[rank]}.flight-recorder.json").read_text())
        (group,) = digest["groups"]
        assert group["entered"] == (3 if rank == CULPRIT else 4), digest
    if fault == "stopped":
        # It cannot dump: its peers' dumps tell what they wait in, and its state what it does.
        blamed = f"rank {CULPRIT} (pid {pids[CULPRIT]}): its process is stopped by a signal"
        assert blamed in summary, summary
        return
    assert re.search(
        rf"rank {CULPRIT} has not entered all_reduce 4 of 1024[^,]*, which ranks 0, 2 entered",
        summary,
    ), summary


def evidence(training: Training, folder: Path) -> tuple[str, Path]:
    """Take evidence by hand; return its summary and its folder."""
    kept = folder / "state"
    kept.mkdir()
    done = dshealthd(
        *("evidence", "--job", training.name, "--path.state", str(kept)),
        *("--web.listen-address", "127.0.0.1:1", "--evidence.min-free-bytes", "0"),
        seconds=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (bundle,) = (kept / "evidence").iterdir()
    return done.stdout, bundle
