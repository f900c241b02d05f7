"""`explain`: reading a log against ripgrep with the same texts, side by side.

Four logs: steps of a training, NCCL INFO in between, and lines of which none is like another,
without and with what looks like a failure. ripgrep counts the lines that hold one of the literals; `explain` does
that and all that follows from it, in one process. The first run keeps Hyperscan's database in the
user's cache, as it does for everybody. An argument is the size of the logs in MB.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dshealthd.explain.patterns import load

MEGABYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 100
TURNS = 3
WHOLE_TURNS = 7
_EXPLAIN = (
    "import sys, time\n"
    "from dshealthd.explain import command, finders, input as logs\n"
    "if sys.argv[1] == 'python': logs.finder = lambda literals, keep: finders.Templates(literals)\n"
    "start = time.process_time(); recogniser, _ = command.read([sys.argv[2]])\n"
    "command.conclude(recogniser); spent = time.process_time() - start\n"
    "import resource; print(spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)\n"
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


def unlike(chance: random.Random) -> str:
    """Return lines that are each of their own, and hold nothing that is looked for."""
    return _random(chance, "etoishrdlu      ")


def noisy(chance: random.Random) -> str:
    """Return such lines of which one in 170 holds ` nan`, as a word of something else begins."""
    return _random(chance, "etaoinshrdlu      ")


def _random(chance: random.Random, letters: str) -> str:
    return "".join("".join(chance.choices(letters, k=99)) + "\n" for _ in range(10_000))


def timed(command: list[str]) -> tuple[float, str]:
    """Run a command and return its CPU time in seconds and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return spent, done.stdout


def commands(path: Path, literals: Path) -> tuple[float, float]:
    """Return the least CPU time of ripgrep and of `dshealthd explain`, as whole commands in turns.

    With bytecode, as an installed program has it.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    search = [shutil.which("rg") or "rg", "-c", "-F", "-f", str(literals), str(path)]
    explain = [sys.executable, "-m", "dshealthd", "explain", str(path)]
    timed(explain)  # which writes the bytecode and keeps the database
    turns = [(timed(search)[0], timed(explain)[0]) for _ in range(WHOLE_TURNS)]
    return min(one for one, _ in turns), min(other for _, other in turns)


def main() -> None:
    """Print a table of MB by second of CPU time: the best of TURNS turns."""
    ripgrep = shutil.which("rg")
    print("| log | ripgrep | explain, hyperscan | explain, Python | ratio | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        literals = Path(folder, "literals")
        literals.write_text("\n".join(load().literals) + "\n")
        whole = []
        for make in (steps, mixed, unlike, noisy):
            path = Path(folder, "job.out")
            block = make(random.Random(1))
            with path.open("w") as file:
                for _ in range(MEGABYTES * 1_000_000 // len(block)):
                    file.write(block)
            whole.append((make.__name__, commands(path, literals)))
            size = path.stat().st_size / 1e6
            found: dict[str, list[float]] = {"rg": [], "hyperscan": [], "python": []}
            peak = 0
            for _ in range(TURNS):
                if ripgrep:
                    search = [ripgrep, "-c", "-F", "-f", str(literals), str(path)]
                    found["rg"].append(size / timed(search)[0])
                for kind in ("hyperscan", "python"):
                    _, text = timed([sys.executable, "-c", _EXPLAIN, kind, str(path)])
                    spent, memory = text.split()
                    found[kind].append(size / float(spent))
                    peak = max(peak, int(memory))
            rates = {kind: max(values) for kind, values in found.items() if values}
            ratio = rates["hyperscan"] / rates["rg"] if "rg" in rates else float("nan")
            print(f"| {make.__name__} | {rates.get('rg', 0):.0f} | {rates['hyperscan']:.0f} | "
                  f"{rates['python']:.0f} | {ratio:.2f} | {peak} |", flush=True)  # fmt: skip
    print("\n| log | rg, s | dshealthd explain, s | ratio |\n| --- | --- | --- | --- |")
    for name, (ripgrep_s, explain_s) in whole:
        print(f"| {name} | {ripgrep_s:.3f} | {explain_s:.3f} | {ripgrep_s / explain_s:.2f} |")


if __name__ == "__main__":
    main()
