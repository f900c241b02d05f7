"""Agents that probe each other name each fault for what it is and where it is, accuse nobody else, and take it back when it is over."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

from tests.lab import faults
from tests.lab.probing import KEY, OTHER_KEY, PORT, ROUNDS, Probing, Suspect, bad_rounds, busy, rounds, sabotage, secret, suspects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.agents import Scrape
    from tests.lab import Node

OPERATION = "dshealthd_probe_operation_seconds"
DISAGREES = "dshealthd_probe_peer_disagrees"
SKIPS = "dshealthd_probe_skips_total"
KNOWN = 18
"""Good rounds after which a node knows what is usual."""
CLEAR = 12
"""Epochs after the end of a fault in which every accusation ends: with four nodes each pair meets every third."""


def namespaced(lab: Probing) -> Probing:
    """Skip a test of what only namespaces give."""
    if lab.limits:
        pytest.skip("; ".join(lab.limits))
    return lab


def begun(lab: Probing, least: int = 3) -> Probing:
    """Wait until every node has had some good rounds."""
    lab.await_(lambda s: len(s) == len(lab.nodes) and all(rounds(x, outcome="ok") >= least for x in s.values()), 60 + least, "good rounds")
    return lab


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes without torch: their rounds are echoes between the agents."""
    with Probing(tmp_path_factory.mktemp("light"), 4, full=False) as lab:
        yield begun(namespaced(lab))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes whose rounds are collectives with gloo."""
    with Probing(tmp_path_factory.mktemp("full"), 4) as lab:
        yield begun(namespaced(lab))


def named(
    lab: Probing,
    fault: AbstractContextManager[None],
    guilty: Node | tuple[Node, Node],
    reasons: tuple[str, ...],
    *,
    by: tuple[Node, ...],
    epochs: float,
    clear: float = CLEAR,
    wrong: int = 3,
) -> None:
    """Inject a fault and have `by` name it, nobody name anything else, and all be taken back after its end.

    It is named after at most `wrong` scheduled rounds that did not go well for the one who names it first; confirmations come on top.
    """
    kind, component = ("node", guilty.name) if not isinstance(guilty, tuple) else ("link", "--".join(sorted(node.name for node in guilty)))
    right = {Suspect(kind, component, reason) for reason in reasons}
    accused: set[Suspect] = set()

    def seen(scrapes: dict[str, Scrape]) -> bool:
        for scrape in scrapes.values():
            accused.update(suspects(scrape))
        assert accused <= right, f"{accused - right} are not {right}\n{lab.told(scrapes)}"
        return all(node.name in scrapes and suspects(scrapes[node.name]) for node in by)

    lab.until_epoch(lab.epoch + 1)
    begin = time.time()
    with fault:
        lab.await_(lambda s: seen(s) or (first(s)), epochs, f"{right} by anybody")
        took = time.time() - begin
        needed = min(bad_rounds(node, begin) for node in lab.nodes if node.runs and suspects(node.scrape()))
        assert needed <= wrong, lab.told()
        lab.await_(seen, epochs - took / lab.period, f"{right} by {', '.join(node.name for node in by)}")
        everywhere = time.time() - begin
    end = time.time()
    lab.await_(lambda s: len(s) == len(lab.nodes) and not any(map(suspects, s.values())), clear, "no suspects after the fault")
    print(f"{right}: first after {took:.1f} s and {needed} bad rounds, all after {everywhere:.1f} s, clear after {time.time() - end:.1f} s")


def first(scrapes: dict[str, Scrape]) -> bool:
    """Tell whether anybody is accused."""
    return any(map(suspects, scrapes.values()))
