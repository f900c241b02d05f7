"""Real trainings to which things happen, and what the shipped rules say: `python -m bench.jobs`.

    python -m bench.jobs [--modes zero3,fsdp2,…] [--courses middle,…] [--times 5] [--at-once 4]
                         [--keep FOLDER] [--site]
    python -m bench.jobs --table FOLDER

Four ranks over gloo, two on each of two nodes, train small models on this machine; each node has an
agent that receives their heartbeats, and a Prometheus with the shipped rules scrapes both. In each
course of a training a few things happen to rank 2 (`courses.py`): it is slow in the middle or from
its first step, by sleep or by a CPU quota; it is stopped, killed, starved of data or
desynchronized; all ranks write a checkpoint or evaluate; or the training is just healthy for ten
minutes. A result is right if the alert that belongs to it names that rank, its node and the class
in time, and nothing else names another rank; of healthy trainings and pauses, if nothing fires at
all.

With `--site` no training has a line of ours: a site's switch follows them (docs/whole-site.md).

`--times` is how often the slow ranks of ZeRO 3, FSDP 2 and the 2 x 2 pipeline are made; all else is
made once. `--at-once` is the number of trainings at a time. Ranks mostly sleep; the share of the
time in which one of them was ready to run and had no CPU is told, and the machine is overloaded
beyond 5 %, unless that rank has a quota. In the table: right of all, seconds in the median (and the
most). Needs root, for namespaces. Modes whose packages are not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench.jobs.courses import COURSES, FAULTS, applies, run
from bench.jobs.servers import watch
from bench.processes import table
from deploy.training import directory as switch

MODES = {
    "zero3-no-prefetch": ("deepspeed",),
    "zero3": ("deepspeed",),
    "fsdp2": (),
    "pipeline-2x2": ("deepspeed",),
    "ddp": (),
    "zero1": ("deepspeed",),
    "zero2": ("deepspeed",),
    "zero3-offload": ("deepspeed",),
    "pipeline-4x1": ("deepspeed",),
    "trainer": ("transformers", "accelerate"),
    "trainer-zero2": ("transformers", "accelerate", "deepspeed"),
    "trainer-zero3": ("transformers", "accelerate", "deepspeed"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
}
"""Each mode, and the packages that it takes besides torch."""
REPEATED = ("zero3-no-prefetch", "zero3", "fsdp2", "pipeline-2x2")
SLOW_COURSES = ("start-1.3", "start-2", "middle")
OVERLOADED = 0.05
"""Share of the time that a rank may lack a CPU."""
STARTS = 2
"""Most trainings that start at the same time, which takes far more CPU time than their steps."""


def planned(modes: Sequence[str], courses: Sequence[str], times: int) -> Iterator[tuple[str, str]]:
    """Yield the trainings, each with its mode and course: all once, and then the repetitions."""
    for turn in range(times):
        for course in courses:
            for mode in modes:
                again = mode in REPEATED and course in SLOW_COURSES
                if applies(mode, course) and (turn == 0 or again):
                    yield mode, course


def line(result: dict[str, Any]) -> str:
    """Return a result in one line."""
    if "failure" in result:
        return f"{result['mode']}, {result['fault']}: {result['failure']}"
    seconds = "-" if result["seconds"] is None else f"{result['seconds']:.0f} s"
    wrong = ", ".join((*result["innocent"], *result["others"]))
    return (
        f"{result['mode']}, {result['fault']}: {'right' if result['right'] else 'WRONG'}, "
        f"{seconds}, "
        f"steps not followed: {result.get('behind')}; "
        f"wrongly said: {wrong or 'nothing'}; no CPU {result['starved']:.1%}"
    )


def cell(results: Sequence[dict[str, Any]]) -> str:
    """Return what the table says about one fault in one mode."""
    if not results:
        return "-"
    right = f"{sum(result['right'] for result in results)} of {len(results)}"
    seconds = [result["seconds"] for result in results if result.get("seconds") is not None]
    if not seconds:
        return right
    median, worst = f"{statistics.median(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{right}, {median} s" + (f" ({worst})" if worst != median else "")


def tabulated(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of all results, with what is wrong in them."""
    modes = [mode for mode in MODES if any(result["mode"] == mode for result in results)]
    faults = [fault for fault in FAULTS if any(result["fault"] == fault for result in results)]
    rows = [
        (
            mode,
            *(
                cell([r for r in results if (r["mode"], r["fault"]) == (mode, fault)])
                for fault in faults
            ),
        )
        for mode in modes
    ]  # fmt: skip
    ratios = [
        f"{fault}: {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        for fault in faults
        if (found := [r["ratio"] for r in results if r["fault"] == fault and r.get("ratio")])
    ]
    wrong = [line(result) for result in results if not result["right"]]
    parts = [
        table(("mode", *faults), rows),
        f"{len(results) - len(wrong)} of {len(results)} right. Factors told: {'; '.join(ratios)}.",
        *wrong,
    ]
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trainings, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--courses", default=",".join(COURSES))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--site", action="store_true", help="follow them by a site's switch")
    parser.add_argument("--keep", type=Path, help="add the results to those in this folder")
    parser.add_argument("--table", type=Path, help="only print the table of this folder")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(tabulated(_kept(options.table)))
        return
    modes, courses = options.modes.split(","), options.courses.split(",")
    if unknown := [*({*modes} - {*MODES}), *({*courses} - {*COURSES})]:
        parser.error(
            f"{', '.join(unknown)}: modes are {', '.join(MODES)}; courses {', '.join(COURSES)}"
        )
    results: list[dict[str, Any]] = []
    lock, starts = threading.Lock(), threading.Semaphore(STARTS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        keep: Path = options.keep or directory / "results"
        keep.mkdir(exist_ok=True)
        before = len(list(keep.glob("*.json")))
        site = ""
        if options.site:
            switch.make(directory / "site")
            site = str(directory / "site" / switch.ARCHIVE)

        def train(number: int, mode: str, course: str) -> None:
            missing = [name for name in MODES[mode] if importlib.util.find_spec(name) is None]
            if missing:
                print(f"{mode}: no {missing[0]}", file=sys.stderr)
                return
            place = directory / str(number)
            place.mkdir()
            name = f"{number}{threading.get_native_id()}"
            found = run(mode, course, place, nodes, server, name, starts, site)
            with lock:
                results.extend(found)
                file = keep / f"{before + number:04}-{mode}-{course}.json"
                file.write_text(json.dumps(found), encoding="utf-8")
                for result in found:
                    print(line(result), file=sys.stderr, flush=True)

        with watch(directory) as (nodes, server), ThreadPoolExecutor(options.at_once) as pool:
            plan = planned(modes, courses, options.times)
            waiting = [
                pool.submit(train, number, mode, course)
                for number, (mode, course) in enumerate(plan)
            ]
            for future in as_completed(waiting):
                future.result()
        print(tabulated(_kept(keep)))
    starved = max((result.get("starved", 0.0) for result in results), default=0.0)
    if starved > OVERLOADED:
        print(f"Overloaded: a rank had no CPU in {starved:.0%} of the time. Lower --at-once.")


def _kept(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder."""
    return [
        result
        for file in sorted(folder.glob("*.json"))
        for result in json.loads(file.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    main()
