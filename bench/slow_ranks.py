"""Who is named slow in healthy jobs whose work is uneven, and after how long a slow rank is.

    python -m bench.slow_ranks healthy HOURS [MODEL …]   # HOURS of jobs for each model
    python -m bench.slow_ranks slow JOBS [MODEL …]       # JOBS for each size, with a rank of 1.3x
    python -m bench.slow_ranks pauses JOBS [MODEL …]     # … with a rank that pauses 3 s a minute
    python -m bench.slow_ranks few JOBS [MODEL …]        # JOBS for each size of two to four ranks,
                                                         # healthy for an hour, and with one of 1.3x

The agent's figures (`dshealthd.jobs.own_work`) and the rules of the groups dshealthd-work-* in
numpy, over thousands of job hours; `tests/jobs/test_slow_ranks.py` holds both against the agent's
own code and promtool. Steps take STEP seconds; a rank is looked at whenever a window ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dshealthd.jobs.own_work import (
    DOUBT,
    EIGHTHS,
    KNOWN,
    LASTS,
    LOSS,
    LOW,
    PAUSES,
    PRIOR,
    RANKS,
    SCALES,
    WINDOWS,
    Z,
    level,
)

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

STEP = 2.5
"""Seconds of a step; own work of 1 is two thirds of it or less."""
PER_NODE = 8
DELAY = 5.0 / 2 + 10.0 / 2 + 10.0
"""Seconds from the end of a window to the alert: half a scrape, half a round of the rules,
`for`."""
HELD = 10.0
"""Seconds for which the rule must hold, `for`."""
SHARE = 1 / 1.2
"""Own work of the slowest rank in a usual step."""
SIZES = {8: 0.3, 16: 0.25, 64: 0.2, 256: 0.15, 1024: 0.1}
"""Ranks of the jobs, and the share of each size in the hours."""
FEW = ((1, 2), (1, 3), (1, 4), (2, 2), (4, 1))
"""Nodes of small jobs, and ranks of each."""


def _noise(random: np.random.Generator, steps: int, ranks: int, deviation: float) -> Array:
    return deviation * random.standard_normal((steps, ranks))


def _drift(
    random: np.random.Generator, steps: int, ranks: int, deviation: float, seconds: float
) -> Array:
    """Return values that forget themselves within so many seconds, and have this deviation."""
    keep = np.exp(-STEP / seconds)
    values = _noise(random, steps, ranks, deviation)
    values[1:] *= np.sqrt(1 - keep * keep)
    for step in range(1, steps):
        values[step] += keep * values[step - 1]
    return values


def _lengths(random: np.random.Generator, steps: int, ranks: int, deviation: float) -> Array:
    """Return lognormal factors of mean 1, as lengths of sequences have."""
    variance = np.log(1 + deviation**2)
    return np.asarray(np.exp(_noise(random, steps, ranks, np.sqrt(variance)) - variance / 2))


def _rollouts(random: np.random.Generator, steps: int, ranks: int) -> Array:
    """Return five updates after each rollout, which takes most of the time and differs by 30 %."""
    work = 0.5 * (1 + _noise(random, steps, ranks, 0.01))
    work[::5] += 3.5 * np.exp(_noise(random, len(work[::5]), ranks, 0.3))
    return work


def _pauses(random: np.random.Generator, steps: int, ranks: int) -> Array:
    """Return steps of which one in 500 of each rank takes twice as long."""
    return 1 + _noise(random, steps, ranks, 0.02) + (random.random((steps, ranks)) < 1 / 500)


def _sorted(random: np.random.Generator, steps: int, ranks: int) -> Array:
    """Return work that goes up and down by 15 % in 15 minutes, in each rank by itself."""
    seconds = np.arange(steps)[:, None] * STEP
    phase = random.uniform(0, 2 * np.pi, ranks)
    return 1 + 0.15 * np.sin(2 * np.pi * seconds / 900 + phase) + _noise(random, steps, ranks, 0.02)


def _common(random: np.random.Generator, steps: int, ranks: int) -> Array:
    """Return work that all ranks have more or less of, as in a curriculum or with padding."""
    longer = np.repeat(random.uniform(0.5, 2, steps // 400 + 1), 400)[:steps]
    return (longer * _lengths(random, steps, 1, 0.3)[:, 0])[:, None] * (
        1 + _noise(random, steps, ranks, 0.03)
    )


def _later(random: np.random.Generator, steps: int, ranks: int) -> Array:
    """Return work that is even for half of the time, and drifts then."""
    work = 1 + _noise(random, steps, ranks, 0.02)
    work[steps // 2 :] += _drift(random, steps - steps // 2, ranks, 0.06, 300)
    return work


MODELS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "quiet": lambda r, s, n: 1 + _noise(r, 1, n, 0.01) + _noise(r, s, n, 0.02),
    "constant, 3 %": lambda r, s, n: 1 + _noise(r, 1, n, 0.03) + _noise(r, s, n, 0.02),
    "constant, 5 %": lambda r, s, n: 1 + _noise(r, 1, n, 0.05) + _noise(r, s, n, 0.02),
    "lengths, 25 %": lambda r, s, n: _lengths(r, s, n, 0.25),
    "lengths, 40 %": lambda r, s, n: _lengths(r, s, n, 0.4),
    "experts": lambda r, s, n: 1 + _drift(r, s, n, 0.08, 600) + _noise(r, s, n, 0.03),
    "drift": lambda r, s, n: 1 + _drift(r, s, n, 0.05, 120) + _noise(r, s, n, 0.02),
    "mixed": lambda r, s, n: (
        1 + _noise(r, 1, n, 0.02) + _drift(r, s, n, 0.03, 120) + _noise(r, s, n, 0.08)
    ),
    "sorted shards": _sorted,
    "rollouts": _rollouts,
    "pauses": _pauses,
    "longer for all": _common,
    "uneven later": _later,
}
"""Own work of healthy ranks: seconds by step and rank, about 1."""


class Looks(NamedTuple):
    """What the rules see whenever a window ends; arrays by look, and by node where that varies."""

    at: Array
    """Seconds since the first step."""
    rank: Array
    ratio: Array
    limit: Array
    loss: Array


def _median_low(values: Array, axis: int) -> Array:
    middle = (values.shape[axis] - 1) // 2
    return np.asarray(np.partition(values, middle, axis=axis).take(middle, axis=axis))


def _last(values: Array) -> Array:
    """Return the last WINDOWS of each window, as a last axis."""
    return np.lib.stride_tricks.sliding_window_view(values, WINDOWS, axis=0)


def steps(work: Array) -> Array:
    """Return how long steps take: own work of the slowest rank, and as much more in each."""
    slowest = work.max(1)
    return np.asarray(slowest + (1 / SHARE - 1) * np.median(slowest))


def _means(work: Array, size: int) -> Array:
    """Return means over windows of so many steps."""
    return np.asarray(work[: len(work) // size * size].reshape(-1, size, work.shape[1]).mean(1))


def windows(work: Array, over: str, step: float) -> tuple[float, Array]:
    """Return the seconds of a window and ln(own work), by window and rank, as an agent."""
    size = 2 ** level(over, step)
    own = _means(work, size)
    if over == PAUSES:
        parts = _means(work, size >> EIGHTHS)[: len(own) << EIGHTHS]
        parts = parts.reshape(len(own), -1, work.shape[1])
        whole = _means(steps(work)[:, None], size)
        own = whole + own - np.median(parts, axis=1)
    return size * step, np.log(own)


def _between(values: Array) -> Array:
    """Return the variance of values of normal ranks along the last axis."""
    count = values.shape[-1]
    others = np.sort(values, axis=-1)[..., :-1]
    if count == 2:
        return np.asarray((values[..., 1] - values[..., 0]) ** 2)
    return np.asarray(others.var(-1) * (count + 3) / (count - 2))


def figures(own: Array, low: int, per_node: int) -> tuple[Any, Array, Array, Array, Array]:
    """Return rank, slow and usual (logarithms) and variances, by look and node, as an agent."""
    ranks = own.shape[1]
    own = own.reshape(len(own), -1, per_node)
    middle = _median_low(own, 2)
    levels = _last(middle).mean(-1)
    if per_node == 1:
        lower = np.partition(_last(middle), low, axis=-1)[..., low]
        within = _last(middle).var(-1, ddof=1) / WINDOWS
        rank = np.broadcast_to(np.arange(ranks), levels.shape)
        return rank, np.minimum(levels, lower), levels, np.zeros_like(within), within
    excess = _last(own - middle[..., None])
    means = excess.mean(-1)
    lasting = np.minimum(means, 2 * np.partition(excess, low, axis=-1)[..., low])
    within = np.median(excess.var(-1, ddof=1), axis=2) / WINDOWS
    usual = levels + _median_low(means, 2)
    slowest = lasting.argmax(2) + np.arange(own.shape[1]) * per_node
    return slowest, levels + lasting.max(2), usual, _between(means), within


def _lasting(values: Array, looks: int) -> Array:
    """Return each value, but at least the mean of so many looks before it."""
    sums = np.concatenate([[0.0], values.cumsum()])
    at = np.arange(1, len(values) + 1)
    begun = np.maximum(at - looks, 0)
    return np.asarray(np.maximum(values, (sums[at] - sums[begun]) / (at - begun)))


def looks(work: Array, over: str, per_node: int = PER_NODE, step: float = STEP) -> Looks:
    """Return what the rules see of a job in windows over one of the times."""
    ranks = work.shape[1]
    per_node = min(per_node, ranks)
    nodes = ranks // per_node
    seconds, own = windows(work, over, step)
    rank, slow, usual, between, within = figures(own, LOW.get(over, 2), per_node)
    normal = np.log(np.median(np.exp(usual), axis=1))
    apart, random = (np.median(values, axis=1) for values in (between, within))
    if nodes > 2:
        apart = np.maximum(apart, _between(usual))
    elif (nodes, per_node) == (2, 2):
        apart = np.minimum(apart, _between(np.concatenate([slow, usual], axis=1)))
    hour = max(int(3600 / seconds), 1)
    apart, random = _lasting(apart, hour), _lasting(random, hour)
    prior = 0.0 if over == PAUSES else PRIOR
    seen = KNOWN * prior + (ranks - 2) * np.maximum(apart - DOUBT * random, 0)
    t = np.expm1((LASTS + RANKS * np.log(ranks)) / (KNOWN + ranks - 2))
    limit = np.exp(np.sqrt(Z * Z * random + t * seen * ranks / (ranks - 1)))
    ratio = np.exp(slow - normal[:, None])
    if nodes == 2:
        ratio = np.maximum(ratio, np.exp(usual - usual.min(1, keepdims=True)))
    most = np.exp(slow.max(1, keepdims=True))
    lost = np.exp(slow) * (2 - 1 / ratio) - most
    whole = steps(work).mean()
    ends = np.asarray((np.arange(len(ratio)) + WINDOWS) * seconds, dtype=np.float64)
    return Looks(ends, rank, ratio, limit, lost / whole)


def named(work: Array, per_node: int = PER_NODE, step: float = STEP) -> list[tuple[float, int]]:
    """Return when the alert begins, and for which rank, in order of time."""
    found = []
    for over in SCALES:
        seen = looks(work, over, per_node, step)
        above = seen.ratio > seen.limit[:, None]
        nodes = above.shape[1]
        few = above.sum(1, keepdims=True) <= max(0.25 * nodes, 1)
        hits = above & few & (seen.loss > LOSS)
        # Held for 10 s: in the next look as well, where one is due by then.
        held = int(HELD / (seen.at[0] / WINDOWS))
        for look, node in np.argwhere(hits):
            if hits[look : look + held + 1, node].all():
                found.append((float(seen.at[look]) + DELAY, int(seen.rank[look, node])))
    return sorted(found)


def accused(random: np.random.Generator, name: str, jobs: int, nodes: int, per_node: int) -> int:
    """Return how many ranks are accused in so many healthy hours."""
    wrong = 0
    for _ in range(jobs):
        work = np.maximum(MODELS[name](random, int(3600 / STEP), nodes * per_node), 0.05)
        wrong += len({rank for _, rank in named(work, per_node)})
    return wrong


def healthy(hours: float, names: list[str]) -> None:
    """Print how many ranks are accused in so many hours of healthy jobs of each model."""
    for name in names:
        random, begun, text = np.random.default_rng(1), time.monotonic(), []
        total = 0
        for ranks, share in SIZES.items():
            jobs = max(round(hours * share), 1)
            wrong = accused(random, name, jobs, ranks // PER_NODE, PER_NODE)
            total += wrong
            text.append(f"{ranks}: {wrong}/{jobs}")
        taken = time.monotonic() - begun
        print(f"| {name} | {total} | {', '.join(text)} | {taken:.0f} s |", flush=True)


def slower(work: Array, rank: int, begins: int) -> None:
    """Make a rank need 1.3 times as long from a step on."""
    work[begins:, rank] *= 1.3


def pausing(work: Array, rank: int, begins: int) -> None:
    """Make a rank pause for 3 s in every minute from a step on."""
    every = round(57 / STEP)
    work[begins + rank % every :: every, rank] += 3.0 / STEP * np.median(steps(work))


Fault = Callable[[Array, int, int], None]


def detected(
    random: np.random.Generator, name: str, jobs: int, fault: Fault, nodes: int, per_node: int
) -> str:
    """Return when a rank with a fault from the first step, or from the tenth minute, is named."""
    ranks, after, others = nodes * per_node, [], 0
    for job in range(jobs):
        begins, bad = (0 if job % 2 else int(600 / STEP)), (ranks // 2 + job % 4) % ranks
        work = np.maximum(MODELS[name](random, int(1800 / STEP), ranks), 0.05)
        fault(work, bad, begins)
        found = named(work, per_node)
        right = [at - begins * STEP for at, rank in found if rank == bad]
        after.append(min((at for at in right if at > 0), default=np.inf))
        others += any(rank != bad for _, rank in found)
    times = np.array(after)
    within = " | ".join(f"{(times <= limit).mean():.0%}" for limit in (90, 180, 300))
    return f"{np.isfinite(times).mean():.0%} | {np.median(times):.0f} | {within} | {others}"


def faulty(jobs: int, names: list[str], fault: Fault) -> None:
    """Print when a faulty rank is named in jobs of each model."""
    for name in names:
        random = np.random.default_rng(2)
        for ranks in (8, 64):
            found = detected(random, name, jobs, fault, ranks // PER_NODE, PER_NODE)
            print(f"| {name} | {ranks} | {found} |", flush=True)


def few(jobs: int, names: list[str]) -> None:
    """Print who is accused in small jobs, and when a rank that is slow is."""
    for name in names:
        random = np.random.default_rng(3)
        for nodes, per_node in FEW:
            wrong = accused(random, name, jobs, nodes, per_node)
            found = detected(random, name, jobs, slower, nodes, per_node)
            print(f"| {name} | {nodes} x {per_node} | {wrong}/{jobs} | {found} |", flush=True)


if __name__ == "__main__":
    kind, number, *chosen = sys.argv[1:]
    models = chosen or list(MODELS)
    if kind == "healthy":
        healthy(float(number), models)
    elif kind == "few":
        few(int(number), models)
    else:
        faulty(int(number), models, {"slow": slower, "pauses": pausing}[kind])
