"""`explain` beside the deterministic stage of NVIDIA's Restart Agent, on the logs of their tests.

`python -m bench.explain_nvrx CHECKOUT` with a checkout of NVIDIA/nvidia-resiliency-ext, whose
stage L0 runs without GPU and model; it needs `httpx`. Both read the same files in one process, and
CPU time is counted.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import nvidia_logs
from bench.bench_explain import mixed
from dshealthd.explain import command

if TYPE_CHECKING:
    from collections.abc import Callable

MEGABYTES = 5
FAILURE = (
    "[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "/srv/train.py", line 7, in step\n'
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


def ours(path: Path) -> tuple[str, list[int]]:
    """Return outcome and the lines that prove it."""
    recognizer, _ = command.read([str(path)])
    finding = command.conclude(recognizer)
    return finding.outcome, [place.line for place in finding.proof]


def theirs(checkout: Path) -> Callable[[Path], int | None]:
    """Return their stage as a function that tells the line of the primary failure."""
    sys.path.insert(0, str(checkout / "src"))
    package: Any = __import__("nvidia_resiliency_ext.attribution.restart_agent.l0", fromlist=["l0"])
    decision: Any = __import__(f"{package.__name__}.decision", fromlist=["decision"])

    def primary(path: Path) -> int | None:
        bundle = package.build_l0_bundle(str(path))
        candidate = decision.build_decision_evidence(bundle).deterministic_primary_candidate
        return None if candidate is None else int(candidate.line)

    return primary


def rate(read: Callable[[Path], object], path: Path) -> float:
    """Return MB by second of CPU time."""
    start = time.process_time()
    read(path)
    return path.stat().st_size / 1e6 / (time.process_time() - start)


def main() -> None:
    """Print how often both point at the same line, and how fast each is."""
    checkout = Path(sys.argv[1])
    primary = theirs(checkout)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.log")
        for text in nvidia_logs.logs(checkout / "tests/attribution/unit").values():
            path.write_text(text)
            line, (outcome, proof) = primary(path), ours(path)
            if line is None:
                counts[f"theirs nothing, ours {outcome}"] += 1
            elif line in proof:
                counts["the same line"] += 1
            else:
                counts[f"theirs a line, ours {outcome} elsewhere"] += 1
        block = mixed(random.Random(1))
        path.write_text(block * (MEGABYTES * 1_000_000 // len(block)) + FAILURE)
        speeds = rate(ours, path), rate(primary, path)
    print(*(f"{count} {what}" for what, count in counts.most_common()), sep="\n")
    print(f"{speeds[0]:.0f} MB/s ours, {speeds[1]:.2f} MB/s theirs")


if __name__ == "__main__":
    main()
