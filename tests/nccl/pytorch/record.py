"""Keep genuine logs of PyTorch over NCCL: `python -m tests.nccl.pytorch.record`.

Runs each fault, and keeps what was printed in `tests/explain/genuine-nccl.json.xz`, without paths
and names of the machine, for tests that need neither the wheel nor NCCL. A run that is kept
already is not made again.
"""

from __future__ import annotations

import json
import lzma
import re
import socket
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.nccl.pytorch import wheel
from tests.nccl.pytorch.launch import Training

STORE = Path(__file__).parents[2] / "explain" / "genuine-nccl.json.xz"
SIZE = 4
CULPRIT = 2
TIMEOUT = 6.0
"""Seconds of a collective, after which the watchdog ends the rank."""
HEARTBEAT = 15
"""Seconds for which a watchdog may say nothing."""
AT_ONCE = 3
"""Runs side by side; each mostly waits."""
RUNS = (
    ("torchrun", "absent"),
    ("torchrun", "silent-driver"),
    ("alone", "stopped"),
    ("torchrun", "other-size"),
    ("torchrun", "other-operation"),
    ("torchrun", "symmetric"),
    ("torchrun", "killed"),
    ("alone", "killed"),
    ("alone", "silent-driver"),
    ("torchrun", "raises"),
    ("torchrun", "stopped"),
    ("alone", "absent"),
    ("torchrun", "none"),
)


def record(torch: wheel.Wheel, launcher: str, fault: str) -> dict[str, str]:
    """Run a fault and return what each process printed."""
    blocked = fault == "silent-driver"
    with (
        tempfile.TemporaryDirectory() as name,
        Training(
            torch,
            Path(name),
            fault=fault,
            culprit=CULPRIT,
            size=SIZE,
            timeout=600 if blocked else TIMEOUT,
            torchrun=launcher == "torchrun",
            environment={"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT)} if blocked else None,
        ) as training,
    ):
        if launcher == "torchrun":
            training.wait_for_end()
        elif blocked:
            training.wait_for_end(*(rank for rank in range(SIZE) if rank != CULPRIT))
        else:
            training.wait_for_end(CULPRIT)
        return {log.name: neutral(log.read_text(errors="replace"), torch) for log in training.logs}


def neutral(text: str, torch: wheel.Wheel) -> str:
    """Replace what is of this machine."""
    packages = "/opt/env/lib/python3.11/site-packages"
    for mine, other in (
        (str(torch.folder), packages),
        (sysconfig.get_path("purelib"), packages),
        (str(torch.cuda), "/usr/local/cuda/lib64"),
        (str(torch.nccl), "/usr/lib/x86_64-linux-gnu"),
        (str(Path(sys.executable).parent), "/opt/env/bin"),
        (str(Path(__file__).parent), "/srv/train"),
        (socket.gethostname(), "gpu-a"),
    ):
        text = text.replace(mine, other)
    return re.sub(
        r"/[\w./-]*?/lib/python3\.11/(?!site-packages)", "/opt/python/lib/python3.11/", text
    )


def kept() -> dict[str, Any]:
    """Return what is kept: versions, and the files of each run."""
    found: dict[str, Any] = json.loads(lzma.decompress(STORE.read_bytes()))
    return found


def main() -> None:
    """Make the runs that are missing, or were made with other versions."""
    torch = wheel.prepare()
    versions = {"torch": torch.version, "nccl": wheel.NCCL}
    found = kept() if STORE.is_file() else {}
    if {name: found.get(name) for name in versions} != versions:
        found = {**versions, "runs": {}}
    missing = [run for run in RUNS if " ".join(run) not in found["runs"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {pool.submit(record, torch, *run): " ".join(run) for run in missing}
        for done in as_completed(runs):
            found["runs"][runs[done]] = done.result()
            STORE.write_bytes(lzma.compress(json.dumps(found).encode()))
            print(runs[done], flush=True)


if __name__ == "__main__":
    main()
