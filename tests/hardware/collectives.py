"""Items that use GPUs: the probe's collectives, on idle GPUs only."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dshealthd.probe.cli.report import EXIT
from dshealthd.probe.observation import Outcome
from tests.hardware import programs
from tests.hardware.checks import configured
from tests.hardware.item import Item, not_run, ran

WITHIN, BETWEEN = "a collective within the node", "a collective between the nodes"
LOCAL = 480.0
"""Seconds for the local probe: more than all its own deadlines together."""
PAIR = 180.0
"""Seconds for a round between two agents, which may have to try four times."""
NOTHING_PROVEN = frozenset(
    {
        Outcome.DECLINED,
        Outcome.INCONCLUSIVE,
        Outcome.UNREACHABLE,
        Outcome.REFUSED,
        Outcome.UNAUTHORIZED,
    }
)
"""Outcomes of rounds that were not run: they say nothing of GPUs or of NCCL."""


def within(file: Path | None, python: str, objection: str) -> Item:
    """Run an all-reduce among this node's GPUs, unless there is an objection."""
    words = ["probe", "--kind", "local", "--json", "--probe.python", python, *configured(file)]
    return _run(WITHIN, words, objection, LOCAL)


def between(file: Path | None, nodes: Sequence[str], gpus: int, objection: str) -> Item:
    """Have both nodes' agents run an all-reduce; each decides by itself whether its GPUs are
    idle.
    """
    with tempfile.TemporaryDirectory(prefix="dshealthd-hardware-") as directory:
        hostfile = Path(directory, "hostfile")
        hostfile.write_text("".join(f"{name} slots={gpus}\n" for name in nodes), encoding="utf-8")
        words = ["probe", "--kind", "pair", "--json", "--hostfile", str(hostfile)]
        return _run(BETWEEN, [*words, *configured(file)], objection, PAIR)


def _run(title: str, words: Sequence[str], objection: str, seconds: float) -> Item:
    command = shlex.join(["dshealthd", *words])
    if objection:
        return not_run(title, command, objection)
    return judge(title, command, programs.run([sys.executable, "-m", "dshealthd", *words], seconds))


def judge(title: str, command: str, answer: programs.Ran) -> Item:
    """Return what came of `dshealthd probe --json`."""
    if answer.problem:
        return ran(title, command, "", answer.problem)
    try:
        document = json.loads(answer.output)
        rounds = document.get("rounds", [document])
        why = "; ".join(one["reason"] for one in rounds if one["reason"])
        outcome, timings = Outcome(document["outcome"]), _timings(rounds)
        backends = {one["backend"] for one in rounds}
    except (ValueError, KeyError, TypeError, AttributeError):
        if answer.status not in EXIT.values():  # bad usage, which names what is missing
            return not_run(title, command, answer.failure)
        return ran(title, command, answer.failure, "it printed no result")
    if why in {"no_torch", "no_python"}:
        return not_run(title, command, f"{why}: --python names the training environment's")
    if outcome in NOTHING_PROVEN:
        return not_run(title, command, f"{outcome}: {why or 'no reason given'}")
    if outcome is not Outcome.OK:
        detail = "; ".join(one["detail"] for one in document.get("failures", [])[:1])
        return ran(title, command, f"{timings} {why} {detail}".strip(), str(outcome))
    if backends != {"nccl"}:
        used = ", ".join(sorted(backends - {""})) or "an echo"
        return not_run(title, command, f"no GPU was used, but {used}; is this torch one with CUDA?")
    return ran(title, command, f"{timings}; compare with all_reduce_perf of nccl-tests")


def _timings(rounds: Sequence[dict[str, Any]]) -> str:
    """Return the bandwidth of the largest all-reduce of each round, and how long the smallest
    took.
    """
    texts = []
    for one in rounds:
        reduced = sorted(
            (timing for timing in one["timings"] if timing["op"] == "all_reduce"),
            key=lambda timing: int(timing["size"]),
        )
        if reduced:
            large, small = reduced[-1], reduced[0]
            texts.append(
                f"all-reduce of {large['size']} bytes at {large['busbw'] / 1e9:.2f} GB/s bus "
                f"bandwidth, of {small['size']} bytes in {small['seconds'] * 1e6:.0f} µs"
            )
    return "; ".join(texts)
