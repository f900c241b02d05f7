"""A collective across nodes, run by their agents: `--probe`.

The agents' own policy decides: where GPUs are busy no collective runs, and that is unknown, not ok.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import ORDER, Outcome, Result
from dshealthd.doctor.examination import Examined
from dshealthd.plural import plural
from dshealthd.probe.node import WARMING_UP
from dshealthd.probe.observation import Kind
from dshealthd.probe.observation import Outcome as Came
from dshealthd.probe.pairs import LEAD, Ask, member_client, one
from dshealthd.probe.peers.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dshealthd.config import Config
    from dshealthd.doctor.processes import Ended

STEPS = ((8, 5), (1 << 20, 5), (16 << 20, 2))
"""Bytes and repetitions: latency, and enough to use every link, in less than a second of GPU time."""
WARM_UP = 20.0
"""Seconds for agents whose probe interpreter has yet to import torch."""
DEADLINE = LEAD + WARM_UP + 4.0
NAME, TITLE = "collective", "A collective across the nodes works"
_PAIR = 2
_SLUGS: Mapping[str, str] = {
    Came.OK: "nccl-all-reduce-failed",
    Came.CORRUPTED: "nccl-all-reduce-failed",
    Came.FAILED: "nccl-all-reduce-failed",
    Came.HUNG: "nccl-timeout",
    Came.UNREACHABLE: "rendezvous-unreachable",
    Came.REFUSED: "rendezvous-unreachable",
}
_WHY = "probes-missing"
"""The symptom of a collective that could not be run."""


def run(loaded: Config, me: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Have the agents of these nodes run collectives, and return the rounds. Blocks.

    They are called as the member `me`.
    """
    return asyncio.run(_rounds(loaded, me, names))


async def _rounds(loaded: Config, me: str, names: Sequence[str]) -> list[dict[str, Any]]:
    client = member_client(loaded, me)
    # This node's own agent takes no calls of its own name, so another one leads.
    ordered = sorted(names, key=lambda name: name == me)
    try:
        return list(
            await asyncio.gather(*(_round(client, group) for group in groups(ordered, MAX_MEMBERS)))
        )
    finally:
        await client.close()


def groups(names: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Return the nodes of a collective in as few groups as possible, all of about the same size."""
    count = -(-len(names) // most)
    return [tuple(names[number::count]) for number in range(count)]


async def _round(client: Any, members: tuple[str, ...]) -> dict[str, Any]:
    """Have one group's collective, again while torch is being imported somewhere."""
    kind = Kind.PAIR if len(members) == _PAIR else Kind.GROUP
    end = time.monotonic() + WARM_UP
    while True:
        entry = await one(client, members, Ask(kind, STEPS))
        if entry["reason"] != WARMING_UP or time.monotonic() > end:
            return entry
        await asyncio.sleep(1.0)


def judged(ended: Ended, hosts: Sequence[str], left_out: Sequence[str]) -> Examined:
    """Return the check of what came of the collectives; `left_out` are hosts that had no part."""
    if ended.problem:
        text = f"the collective {ended.problem}" if ended.hung else ended.problem
        return _examined(_WHY, [Result(Outcome.UNKNOWN, text)], ended.seconds)
    results = [_result(entry) for entry in ended.value]
    slugs = {entry["outcome"] for entry in ended.value if entry["outcome"] != Came.OK}
    slug = next((_SLUGS[one] for one in _SLUGS if one in slugs), _WHY)
    if left_out:
        results.append(without(left_out, len(hosts)))
    if all(result.outcome is Outcome.OK for result in results):
        slug = _SLUGS[Came.OK]
    return _examined(slug, results, ended.seconds)


def without(names: Sequence[str], count: int) -> Result:
    """Return what the check of the collective says of nodes whose agents could not be asked."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")  # noqa: PLR2004 - as many as a line takes
    return Result(
        Outcome.UNKNOWN,
        f"{len(names)} of {plural(count, 'node')} had no part in a collective, as no agent "
        f"with probes answers there: {shown}",
        remedy="dshealthd probe --help  # and docs/probes.md: a key and members for every agent",
    )


def not_run(why: str) -> Examined:
    """Return the doctor's check where no collective can be run at all."""
    remedy = "dshealthd doctor --hosts … --probe --config.file /etc/dshealthd/dshealthd.toml"
    return _examined(_WHY, [Result(Outcome.UNKNOWN, f"no collective was run: {why}", remedy)], 0.0)


def _examined(slug: str, results: Iterable[Result], seconds: float) -> Examined:
    ordered = sorted(results, key=lambda result: -ORDER.index(result.outcome))
    return Examined(slug, NAME, TITLE, tuple(ordered), seconds)


def _result(entry: Mapping[str, Any]) -> Result:
    members, outcome = entry["members"], entry["outcome"]
    count = len(members)
    late = ", ".join(entry["late"])
    why = entry["reason"] or "no reason given"
    pairs = "dshealthd probe --kind pair  # with the same --config.file: names the pair"
    if outcome == Came.OK and entry["kind"] != Kind.LIGHT:
        best = max(entry["timings"], key=lambda timing: timing["size"], default=None)
        speed = f", {best['busbw'] / 1e9:.2f} GB/s at {best['size']} bytes" if best else ""
        text = f"an all-reduce over {count} nodes ({entry['backend']}) is right{speed}"
        return Result(Outcome.OK, text)
    if outcome in {Came.OK, Came.DECLINED, Came.INCONCLUSIVE, Came.UNAUTHORIZED}:
        text = f"no collective was run over {count} nodes: {why}" + (f" ({late})" if late else "")
        if outcome == Came.OK:
            text += "; their agents reach each other"
        return Result(Outcome.UNKNOWN, text, "dshealthd status  # on these nodes", component=late)
    return Result(
        Outcome.CRITICAL,
        f"an all-reduce over {count} nodes: {outcome} at {entry['stage']}, {why}"
        + (f"; late: {late}" if late else ""),
        remedy=pairs,
        component=late,
    )
