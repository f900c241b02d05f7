"""`explain`: reading a log against `grep -F` with the same texts, side by side.

Six logs: steps of a training, NCCL INFO in between, the chatter of nine frameworks, lines of which
none is like another, without and with what looks like a failure, and nothing but lines that look
like failures. `grep` counts the lines that hold one of the literals, of the chatter those with
`error`; `explain` does that and all that follows from it. Both are whole commands, in turns. An
argument is the size of the logs in MB.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from dshealthd.explain.patterns import load
from tests.explain.test_healthy import CHATTER

MEGABYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 100
TURNS = 2
_EXPLAIN = (
    "import resource, sys\nfrom dshealthd.explain import command\nrecognizer, _ = "
    "command.read([sys.argv[1]]); "
    "command.conclude(recognizer)\nprint(recognizer.found.statistics.examined, "
    "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)\n"
)


def steps(chance: random.Random) -> str:
    """Return lines of a training's progress."""
    start = chance.randrange(100_000)
    return "".join(
        f"2026-01-05 10:{n % 60:02d}:00 step {start + n}/800000 | loss {chance.random():.4f} | "
        f"lr 1.00e-05 | {chance.random():.3f} s/it | tokens {n * 4096}\n"
        for n in range(8000)
    )


def mixed(chance: random.Random) -> str:
    """Return progress with what NCCL and DeepSpeed print at INFO."""
    return "".join(
        f"step {n}/800000 | loss {chance.random():.4f}\n"
        if n % 2
        else f"gpu-{n % 8}:{n}:{n} [{n % 8}] NCCL INFO Channel {n % 32:02d}/0 : {n % 8}[{n % 8}] "
        "-> "
        f"{(n + 1) % 8}[{(n + 1) % 8}] via P2P/CUMEM/read\n"
        for n in range(12_000)
    )


def chatter(chance: random.Random) -> str:
    """Return what healthy trainings and servers print at every step."""
    return "".join(
        chance.choice(CHATTER).format(
            n=chance.randrange(10**6),
            s=chance.randrange(60),
            h=chance.randrange(8),
            g=chance.randrange(8),
        )
        + "\n"
        for _ in range(60_000)
    )


def unlike(chance: random.Random) -> str:
    """Return lines that are each of their own, and hold nothing that is looked for."""
    return _random(chance, "etoishrdlu      ")


def noisy(chance: random.Random) -> str:
    """Return such lines of which one in 170 holds ` nan`, as a word of something else begins."""
    return _random(chance, "etaoinshrdlu      ")


def _random(chance: random.Random, letters: str) -> str:
    return "".join("".join(chance.choices(letters, k=99)) + "\n" for _ in range(10_000))


def failures(chance: random.Random) -> str:
    """Return lines of which each holds a literal, and half match a pattern."""
    return "".join(
        f"[rank{n % 64}]:[E1122 04:44:{n % 60:02d}.{chance.randrange(10**8):08d} "
        "ProcessGroupNCCL.cpp:616] "
        f"[PG ID 0 PG GUID 0(default_pg) Rank {n % 64}]  failure detected by watchdog at work "
        "sequence id: "
        f"{n} PG status: last enqueued work: {n}, last completed work: {n - 1}\n"
        if n % 2
        else (
            f"gpu-{n % 8}:{900 + n % 8}:{990 + n % 8} [{n % 8}] NCCL WARN Call to "
            f"{chance.randrange(10**6)} failed, as no pattern says\n"
        )
        for n in range(1, 12_001)
    )


def timed(command: list[str]) -> tuple[float, str]:
    """Run a command and return its CPU time in seconds and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return spent, done.stdout


def main() -> None:
    """Print a table of CPU seconds: the least of TURNS turns."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with bytecode, as an installed program has it
    print("| log | grep -F, s | explain, s | ratio | µs by examined line | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        literals = Path(folder, "literals")
        anchors = {anchor for pattern in load().every for anchor in pattern.need.anchors}
        literals.write_text("\n".join(sorted(anchors)) + "\n")
        for make in (steps, mixed, chatter, unlike, noisy, failures):
            path = Path(folder, "job.out")
            block = make(random.Random(1))
            # A log of failures alone is not that long.
            size = MEGABYTES * 1_000_000 // (10 if make is failures else 1)
            with path.open("w") as file:
                for _ in range(max(1, size // len(block))):
                    file.write(block)
            texts = ["error"] if make is chatter else ["-f", str(literals)]
            search = ["grep", "-c", "-F", *texts, str(path)]
            explain = [sys.executable, "-c", _EXPLAIN, str(path)]
            turns = [(timed(search)[0], timed(explain)) for _ in range(TURNS)]
            searched = min(spent for spent, _ in turns)
            spent = min(spent for _, (spent, _) in turns)
            told = [text.split() for _, (_, text) in turns]
            examined, peak = int(told[0][0]), max(int(memory) for _, memory in told)
            print(f"| {make.__name__} | {searched:.2f} | {spent:.2f} | {spent / searched:.2f} | "
                  f"{spent / examined * 1e6:.0f} | {peak} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
