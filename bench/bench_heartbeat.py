"""What a heartbeat costs a training.

A step of torch on the CPU with a heartbeat, which an agent reads, and without one.

    python -m bench.bench_heartbeat [--steps 400] [--width 512]

Two trainings of the same model take turns, step by step, in one process; one of them has a
heartbeat. First table: the whole step, and its ratio to the step without. Second: what the
heartbeat itself does in a step, before the forward pass, after it, and after the optimizer: once
behind a step of the training without, which leaves nothing of it in the processor's caches, and
once more at once; of steps that are measured and steps of which only the position is told. Third:
the CPU time that each source of a step's own work
adds to a step, with what torch does to call it, as shipped and if every step is measured; the same
job runs by turns with a heartbeat and without. Last, what an agent spends on the ranks of a node.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

from bench.bench_agent import HEARTBEATS, RANKS, ranks
from bench.processes import agent, table
from dshealthd.training import attach, step_timer
from dshealthd.training.heartbeat import Heartbeat

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that NumPy is not installed
    import torch

WARM_UP = 20
"""Steps that are not counted: they allocate."""
CALLS = 10
"""Collectives in a step, where there are any."""
TURN = 20
"""Steps until the heartbeat is attached or closed."""
SHARES = {"measured": math.inf, "not measured": 0.0}
"""`step_timer.SHARE` for either kind of step."""


class Trial:
    """One of the trainings."""

    def __init__(self, width: int) -> None:
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(64, width)

    def step(self) -> None:
        """Make a step."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def timed(call: Callable[[], None]) -> float:
    """Return the microseconds that a call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def measure(steps: int, width: int) -> None:
    """Print the first two tables."""
    trials = {name: Trial(width) for name in ("no heartbeat", "heartbeat")}
    attached = trials["heartbeat"]
    heartbeats = {"heartbeat": attach(optimizer=attached.optimizer, model=attached.model)}
    whole: dict[str, list[float]] = {name: [] for name in trials}
    for number in range(steps + WARM_UP):
        for name in rotated(list(trials), number):
            duration = timed(trials[name].step)
            if number >= WARM_UP:
                whole[name].append(duration)
    base = statistics.median(whole["no heartbeat"])
    rows = [
        (name, *quartiles(values), statistics.median(values) / base)
        for name, values in whole.items()
    ]
    print(
        f"Whole step, µs, {steps} steps each\n\n"
        + table(("", "median", "lower quartile", "upper quartile", "ratio of medians"), rows)
    )
    lines = []
    for kind, share in SHARES.items():
        cold: dict[str, list[float]] = {name: [] for name in heartbeats}
        warm: dict[str, list[float]] = {name: [] for name in heartbeats}
        for number in range(-WARM_UP, steps):
            for name in rotated(list(heartbeats), number):
                trials["no heartbeat"].step()
                with measuring(share):
                    told = functools.partial(call, heartbeats[name], trials[name].model)
                    for found in (cold, warm):
                        wanted = heartbeats[name].measures == (kind == "measured")
                        seconds = timed(told)
                        if wanted and number >= 0:
                            found[name].append(seconds)
        lines += [
            (f"{kind}, {name}", *quartiles(cold[name]), *quartiles(warm[name]))
            for name in heartbeats
        ]
    head = (
        "",
        "median, caches cold",
        "lower quartile",
        "upper quartile",
        "median, at once again",
        "lower quartile",
        "upper quartile",
    )
    print(f"The heartbeat alone, µs a step\n\n{table(head, lines)}")
    for heartbeat in heartbeats.values():
        heartbeat.close()


def measure_sources(turns: int) -> None:
    """Print the third table."""
    torch.distributed.init_process_group("gloo")
    functional = importlib.import_module("torch.distributed._functional_collectives")
    world = torch.distributed.group.WORLD
    ones = torch.ones(1)

    def awaited() -> None:
        for _ in range(CALLS):
            torch.distributed.all_reduce(ones)

    def functionally() -> None:
        for _ in range(CALLS):
            functional.wait_tensor(functional.all_reduce(ones, "sum", world))

    kinds: dict[str, tuple[bool, bool, Callable[[], None]]] = {
        "the step itself: `attach(optimizer=…)`": (False, False, lambda: None),
        "forward pass: `attach(…, model=…)`": (True, False, lambda: None),
        "the same of DDP, and the wait in its backward pass": (True, True, lambda: None),
        f"`Work.wait`, {CALLS} times": (True, False, awaited),
        f"`wait_tensor` of functional collectives, {CALLS} times": (True, False, functionally),
    }
    head = ("", "without a heartbeat", "more with one", "lower quartile", "upper quartile")
    for title, share in SHARES.items():
        rows = []
        for name, (forward, distributed, collectives) in kinds.items():
            trial = Trial(16)
            if distributed:
                trial.model = torch.nn.parallel.DistributedDataParallel(trial.model)
            attached = functools.partial(
                attach,
                optimizer=trial.optimizer,
                model=trial.model if forward else None,
            )
            with measuring(share):
                rows.append((name, *added(trial, attached, collectives, turns)))
        print(f"CPU time of a step that is {title}, median µs\n\n{table(head, rows)}")
    torch.distributed.destroy_process_group()


def added(
    trial: Trial, attached: Callable[[], Heartbeat], collectives: Callable[[], None], turns: int
) -> tuple[float, ...]:
    """Return the CPU time of a step in µs, and what a heartbeat adds to it, with its quartiles."""
    medians: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * turns):
        heartbeat = attached() if turn % 2 else None
        seconds = []
        for number in range(TURN + WARM_UP):
            began = time.thread_time()
            trial.step()
            collectives()
            if number >= WARM_UP:
                seconds.append(time.thread_time() - began)
        medians[bool(turn % 2)].append(statistics.median(seconds) * 1e6)
        if heartbeat is not None:
            heartbeat.close()
    # Turn by turn, as the speed of a shared machine changes from one second to the next.
    more = [with_it - without for without, with_it in zip(*medians.values(), strict=True)]
    return statistics.median(medians[False]), *quartiles(more)


@contextlib.contextmanager
def measuring(share: float) -> Iterator[None]:
    """Measure as many steps as take this share of a training's time."""
    shipped = step_timer.SHARE
    step_timer.SHARE = share
    try:
        yield
    finally:
        step_timer.SHARE = shipped


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names in another order each time: who comes first finds the caches cold."""
    first = number % len(names)
    return names[first:] + names[:first]


def call(heartbeat: Heartbeat, model: torch.nn.Module) -> None:
    """Do what the hooks do in a step."""
    heartbeat.forward_began(model)
    heartbeat.forward_ended()
    heartbeat.step()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # As ranks have it, so that the agent knows whom it hears.
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )
    with agent("") as running:
        measure(options.steps, options.width)
        measure_sources(options.steps // 4)
        rows = []
        for number, job in ((0, contextlib.nullcontext()), (RANKS, ranks(HEARTBEATS, "0.05"))):
            with job:
                time.sleep(3.0)
                before, started = running.cpu(), time.monotonic()
                time.sleep(15.0)
                rows.append(
                    (number, 1000.0 * (running.cpu() - before) / (time.monotonic() - started))
                )
    print(
        "CPU of the whole agent, ms a second; each rank makes 20 steps a "
        f"second\n\n{table(('ranks', 'agent'), rows)}"
    )


if __name__ == "__main__":
    main()
