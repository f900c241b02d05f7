"""The same failure as different people would hand it in: per rank, merged, cut, mixed, skewed."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAX_SKEW = 5.0
"""Seconds by which the clocks of two hosts differ."""

MARKS = {
    "user-error": "KeyError: 4",
    "oom-forward": "CUDA out of memory",
    "oom-backward": "CUDA out of memory",
    "host-allocation": "DefaultCPUAllocator",
    "disk-full": "No space left",
    "hang": "Timed out waiting",
    "hang-backward": "Timed out waiting",
    "stuck-init": "imeout|Timed out",
    "unreachable": r"client socket has timed out",
    "device-ordinal": "invalid device ordinal",
    "bad-shape": "loading state_dict",
    "checkpoint-missing": "FileNotFoundError",
    "half": "not implemented for",
    "nan": "loss nan",
    "nan-stops": "loss nan|Loss is nan",
    "address-in-use": "EADDRINUSE|address already in use",
    "exit": "exitcode  *: 3|code = 3",
    "killed": "SIGKILL|code = -9|exitcode: -9",
    "segfault": "SIGSEGV|code = -11|exitcode: -11",
    "batch": "Check batch related",
    "stage": "ValidationError",
    "config-missing": "Expected a string path",
    "fp16": "fp16|bf16",
    "sparse": "Sparse|sparse",
    "loss-scale": "minimum",
    "checkpoint-world": "DP world size",
}
"""What the root line of each fault holds: a variant from which it was cut has no root to find."""

Timed = tuple[float, str]


@dataclass(frozen=True)
class Variant:
    """Some files, and what is wrong in them."""

    name: str
    fault: str
    files: dict[str, bytes]
    has_root: bool

    def holds(self, text: bytes) -> bool:
        """Tell whether a file holds a text."""
        return any(text in _plain(data) for data in self.files.values())

    def names(self, rank: int) -> bool:
        """Return whether a rank's number stands anywhere, so that it can be named."""
        mark = re.compile(
            rf"(?m)\[rank{rank}\]|^\s+rank\s+: {rank} |\brank {rank}\b|\bRank {rank}\b|^{rank}: "
        )
        return any(
            f"rank{rank}." in name or mark.search(_plain(data).decode())
            for name, data in self.files.items()
        )

    def write(self, folder: Path) -> Path:
        """Write the files and return their folder."""
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder


def _plain(data: bytes) -> bytes:
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def variants(run: dict[str, Any], seed: int) -> Iterator[Variant]:
    """Return a run's variants; the same for the same seed."""
    chance = random.Random(seed)
    units = _units(run)
    names = list(units)
    extra = {} if run["launcher"] == "torchrun" else run["files"]

    def made(kind: str, files: dict[str, Sequence[str]], *, zipped: bool = False) -> Variant:
        texts = {name: "\n".join(lines) + "\n" * bool(lines) for name, lines in files.items()}
        mark = MARKS.get(run["fault"], "")
        has_root = any(re.search(mark, text) for text in texts.values()) if mark else True
        data = {name: text.encode() for name, text in texts.items()}
        if zipped:
            data = {f"{name}.gz": gzip.compress(value) for name, value in data.items()}
        label = f"{run['launcher']}{' engine' * run['engine']} {run['fault']}: {kind}"
        return Variant(label, run["fault"], data, has_root)

    separate: dict[str, Sequence[str]] = {
        f"{name}.log": [line for _, line in lines] for name, lines in units.items()
    }
    separate |= {name: text.splitlines() for name, text in extra.items()}
    yield made("separate", separate, zipped=chance.random() < 0.5)
    if run["launcher"] == "torchrun" and run["files"]:
        yield made("per rank", {name: text.splitlines() for name, text in run["files"].items()}
                   | {f"console-{name}": [line for _, line in units[name]]
                      for name in names})  # fmt: skip
        bare = {name: [(t, re.sub(r"^\[default\d+\]:", "", line)) for t, line in lines]
                for name, lines in units.items()}  # fmt: skip
        yield made("not teed", {"job.out": _merged(bare)})
    if extra:  # the launcher's console, then each rank's log, by concatenation
        everything = [line for lines in separate.values() for line in lines]
        yield made("concatenated", {"job.out": everything})
        for kind, part in _cut(everything, chance):
            yield made(kind, {"job.out": part})
        return
    for kind, files in forms(units, chance):
        yield made(kind, files)


def forms(
    units: dict[str, list[Timed]], chance: random.Random
) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
    """Return what each process printed as one log and as several, and what each form is."""
    names = list(units)
    merged = _merged(units)
    yield "merged", {"job.out": merged}
    for kind, part in _cut(merged, chance):
        yield kind, {"job.out": part}
    numbered = {
        name: [(t, f"{number}: {line}") for t, line in units[name]]
        for number, name in enumerate(names)
    }
    if len(names) > 1:
        yield "srun -l", {"slurm-4711.out": _merged(numbered)}
        yield "srun -l, mixed", {"slurm-4711.out": _mixed(numbered, chance)}
        named = {name: [(t, f"gpu-{number}: {line}") for t, line in units[name]]
                 for number, name in enumerate(names)}  # fmt: skip
        yield "pdsh, mixed", {"job.out": _mixed(named, chance)}
        yield "mixed", {"job.out": _mixed(units, chance)}
        skewed = {name: _stamped(lines, chance.uniform(-MAX_SKEW, MAX_SKEW), f"gpu-{number}")
                  for number, (name, lines) in enumerate(units.items())}  # fmt: skip
        yield "skewed clocks", {f"{name}.log": [line for _, line in lines]
                                for name, lines in skewed.items()}  # fmt: skip
        yield "skewed and sorted", {"syslog": _merged(skewed)}


def _units(run: dict[str, Any]) -> dict[str, list[Timed]]:
    """Return the lines of each process that printed."""
    launched = {"plain": 3, "torchrun": 2, "deepspeed": 1}[run["launcher"]]
    kind = "rank" if run["launcher"] == "plain" else "node"
    units: dict[str, list[Timed]] = {f"{kind}{number}": [] for number in range(launched)}
    for when, name, line in run["lines"]:
        units[name].append((when, line))
    return units


def _merged(units: dict[str, list[Timed]]) -> list[str]:
    lines = [timed for lines in units.values() for timed in lines]
    return [line for _, line in sorted(lines, key=lambda timed: timed[0])]


def _mixed(units: dict[str, list[Timed]], chance: random.Random) -> list[str]:
    """Mix lines that were written within two seconds at random; each process keeps its order."""
    jittered = []
    for lines in units.values():
        last = 0.0
        for when, line in lines:
            last = max(last, when + chance.uniform(0, 2))
            jittered.append((last, line))
    return [line for _, line in sorted(jittered, key=lambda timed: timed[0])]


def _stamped(lines: list[Timed], skew: float, host: str) -> list[Timed]:
    found = []
    for when, line in lines:
        stamp = datetime.fromtimestamp(when + skew, UTC).isoformat(timespec="milliseconds")
        found.append((when + skew, f"{stamp} {host} train[4711]: {line}"))
    return found


def _cut(lines: list[str], chance: random.Random) -> Iterator[tuple[str, list[str]]]:
    part = chance.uniform(0.05, 0.5)
    yield "head cut", lines[int(len(lines) * part) :]
    yield "tail cut", lines[: int(len(lines) * (1 - part))]
