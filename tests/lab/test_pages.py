"""From fault to page: every fault of the catalogue leads to exactly the page or ticket that names
its node and part, and to its end.

One lab for all: the faults are injected in waves, each on a node of its own, while those of the
wave before are being resolved. What came is judged afterwards, fault by fault.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.lab.catalogue import FAULTS, WITHOUT_PROBES
from tests.lab.node import Node
from tests.lab.paging import QUIET_COLLECTORS, Paging
from tests.lab.receiver import Alert, judged

WAVES = (
    ("gpu-lost", "ecc", "xid-79", "row-remap", "path-hang"),
    ("infiniband-down", "thermal", "time-wait", "disk-full"),
    # The node that dies had no fault in the wave before: of an alert that ends while that of its
    # node's death inhibits it, Alertmanager never says that it is over.
    # That a link is down is told once it is known, a minute after Prometheus began, that it should
    # be up.
    # NVML hangs on another node than the Xid: where a GPU fell off the bus, that is the page.
    ("nvml-hang", "gpu-missing", "open-files", "nvlink-down", "node-dead"),
)
NODES = max(map(len, WAVES))
COMES, GOES = 240.0, 600.0
"""Seconds in which all pages of a wave come, and in which the last of all are over; a minute and
one and a half where nothing else runs.

Sockets in TIME_WAIT alone stay for 60 s.
"""
QUIET = 6.0
"""Seconds that each wave lasts beyond its last page.

A round of all rules, in which another page would come.
"""

# The time that the lab takes counts for the first of the tests.
pytestmark = pytest.mark.timeout(1500)


@dataclass
class Case:
    """What became of one fault."""

    node: Node
    begin: float
    over: float = 0.0
    told: list[Alert] = field(default_factory=list)


@dataclass
class Story:
    """What became of all."""

    cases: dict[str, Case]
    others: list[Alert]
    """What came and was not expected of any fault."""
    left: list[Alert]
    """What still fired at the end."""
    healthy: list[Alert]
    """What was told before the first fault."""
    prometheus: str


def wave(lab: Paging, names: tuple[str, ...], cases: dict[str, Case]) -> None:
    """Inject the faults of a wave at once, wait until all their pages have come and a little
    longer, and undo them.
    """
    with contextlib.ExitStack() as stack:
        for name, node in zip(names, lab.lab.nodes, strict=False):
            cases[name] = Case(node, time.monotonic())
            stack.enter_context(FAULTS[name].inject(lab, node))

        def come(name: str) -> bool:
            case = cases[name]
            told = lab.receiver.told(since=case.begin)
            return any(FAULTS[name].names(alert, case.node) for alert in told)

        lab.receiver.wait(lambda: all(map(come, names)), COMES)
        time.sleep(QUIET)
    for name in names:
        cases[name].over = time.monotonic()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Run the lab through all waves."""
    with contextlib.ExitStack() as stack:
        directory = tmp_path_factory.mktemp("pages")
        made = Paging(directory, NODES, gpus=4, collectors=QUIET_COLLECTORS, training=True)
        lab = stack.enter_context(made)
        lab.until_watched()
        time.sleep(QUIET)
        healthy = lab.receiver.told()
        cases: dict[str, Case] = {}
        for names in WAVES:
            wave(lab, names, cases)
        lab.receiver.wait(lambda: not lab.receiver.firing(), GOES)
        others: list[Alert] = []
        for alert in lab.receiver.told():
            owners = (case for name, case in cases.items() if FAULTS[name].names(alert, case.node))
            owner = next(owners, None)
            (others if owner is None else owner.told).append(alert)
        yield Story(cases, others, lab.receiver.firing(), healthy, lab.pending())


def test_every_fault_is_in_a_wave() -> None:
    """The waves hold what the catalogue has for nodes that do not probe each other, each fault
    once.
    """
    assert sorted(name for names in WAVES for name in names) == sorted(WITHOUT_PROBES)


def test_a_healthy_lab_pages_nobody(story: Story) -> None:
    """Before the first fault only the Watchdog speaks."""
    assert [str(alert) for alert in story.healthy] == []


@pytest.mark.parametrize("name", WITHOUT_PROBES)
def test_page(name: str, story: Story) -> None:
    """The fault leads to its one page, with node and part, first step and runbook, which ends with
    it.
    """
    case = story.cases[name]
    assert case.told, f"{list(map(str, story.others))}\n{story.prometheus}"
    alert = judged(name, case.told, case.begin, case.over)
    assert case.node.name in alert.annotations["description"]


def test_nothing_else_came(story: Story) -> None:
    """No other page and no ticket came for any of the faults, and none is left."""
    assert list(map(str, story.others)) == []
    assert list(map(str, story.left)) == [], story.prometheus
