"""A collective across nodes, run by their agents: `--probe`.

The agents' own policy decides: if GPUs are busy, no collective runs, and the result is unknown, not
ok.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, critical, ok, unknown
from dshealthd.doctor.examination import Examined
from dshealthd.findings.finding import ORDER, State
from dshealthd.probe.cli.pairs import LEAD, Ask, member_client, one
from dshealthd.probe.node import WARMING_UP
from dshealthd.probe.observation import Kind
from dshealthd.probe.observation import Outcome as Came
from dshealthd.probe.peers.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dshealthd.config.config import Config
    from dshealthd.doctor.processes import Ended

STEPS = ((8, 5), (1 << 20, 5), (16 << 20, 2))
"""Bytes and repetitions: measures latency and loads every link within a second of GPU time."""
WARM_UP = 20.0
"""Seconds for agents whose probe interpreter still has to import torch."""
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
"""The symptom if a collective could not be run."""


def run(loaded: Config, me: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Have the agents of these nodes run collectives, and return the rounds. Blocks.

    The agents are called as the member `me`.
    """
    return asyncio.run(_rounds(loaded, me, names))


async def _rounds(loaded: Config, me: str, names: Sequence[str]) -> list[dict[str, Any]]:
    client = member_client(loaded, me)
    # This node's own agent refuses calls from its own name, so another one leads.
    ordered = sorted(names, key=lambda name: name == me)
    try:
        return list(
            await asyncio.gather(*(_round(client, group) for group in groups(ordered, MAX_MEMBERS)))
        )
    finally:
        await client.close()


def groups(names: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Split the nodes of a collective into as few groups as possible, of about the same size."""
    count = -(-len(names) // most)
    return [tuple(names[number::count]) for number in range(count)]


async def _round(client: Any, members: tuple[str, ...]) -> dict[str, Any]:
    """Run one group's collective; retry while a member still imports torch."""
    kind = Kind.PAIR if len(members) == _PAIR else Kind.GROUP
    end = time.monotonic() + WARM_UP
    while True:
        entry = await one(client, members, Ask(kind, STEPS))
        if entry["reason"] != WARMING_UP or time.monotonic() > end:
            return entry
        await asyncio.sleep(1.0)


def judged(ended: Ended, hosts: Sequence[str], left_out: Sequence[str]) -> Examined:
    """Return the check of the collectives' outcome; `left_out` are hosts that took no part."""
    if ended.problem:
        text = f"the collective {ended.problem}" if ended.hung else ended.problem
        return _examined(_WHY, [unknown(text)], ended.seconds)
    results = [_result(entry) for entry in ended.value]
    slugs = {entry["outcome"] for entry in ended.value if entry["outcome"] != Came.OK}
    slug = next((_SLUGS[one] for one in _SLUGS if one in slugs), _WHY)
    if left_out:
        results.append(without(left_out, len(hosts)))
    if all(result.outcome is State.OK for result in results):
        slug = _SLUGS[Came.OK]
    return _examined(slug, results, ended.seconds)


def without(names: Sequence[str], count: int) -> Result:
    """Return the collective check's result for nodes whose agents do not answer."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")  # noqa: PLR2004 - as many as fit in a line
    return unknown(
        f"{len(names)} of {plural(count, 'node')} took no part in a collective because no agent "
        f"with probes answers there: {shown}",
        remedy="dshealthd probe --help  # and docs/probes.md: a key and members for every agent",
    )


def not_run(why: str) -> Examined:
    """Return the check if no collective can be run at all."""
    remedy = "dshealthd doctor --hosts … --probe --config.file /etc/dshealthd/dshealthd.toml"
    return _examined(_WHY, [unknown(f"no collective was run: {why}", remedy)], 0.0)


def _examined(slug: str, results: Iterable[Result], seconds: float) -> Examined:
    ordered = sorted(results, key=lambda result: -ORDER.index(result.outcome))
    return Examined(slug, NAME, TITLE, tuple(ordered), seconds)


def _result(entry: Mapping[str, Any]) -> Result:
    members, outcome = entry["members"], entry["outcome"]
    count = len(members)
    late = ", ".join(entry["late"])
    why = entry["reason"] or "no reason given"
    pairs = "dshealthd probe --kind pair  # with the same --config.file, to find the bad pair"
    if outcome == Came.OK and entry["kind"] != Kind.LIGHT:
        best = max(entry["timings"], key=lambda timing: timing["size"], default=None)
        speed = f", {best['busbw'] / 1e9:.2f} GB/s at {best['size']} bytes" if best else ""
        text = f"an all-reduce over {count} nodes ({entry['backend']}) is correct{speed}"
        return ok(text)
    if outcome in {Came.OK, Came.DECLINED, Came.INCONCLUSIVE, Came.UNAUTHORIZED}:
        text = f"no collective was run over {count} nodes: {why}" + (f" ({late})" if late else "")
        if outcome == Came.OK:
            text += "; their agents reach each other"
        return unknown(text, "dshealthd status  # on these nodes", component=late)
    return critical(
        f"an all-reduce over {count} nodes: {outcome} at stage {entry['stage']}, {why}"
        + (f"; late: {late}" if late else ""),
        remedy=pairs,
        component=late,
    )
