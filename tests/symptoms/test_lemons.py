"""Lemon nodes: 30 days of 64 nodes, and how often the comparison names a healthy one."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dshealthd.findings.past import DAY
from dshealthd.findings.record import BUSY, INCIDENTS, NodeRecord
from tests.findings.test_record import fault
from tests.symptoms.promtool import RULES, asking, got, pruned, rule_groups

BEGIN = 1_800_000_000.0
DAYS = 30
RATE = 0.004
"""Incidents of a healthy node in a day: those published of 2,048 nodes in 54 days."""
HOURS = 24 * DAYS
ROUND = "6h"
"""How often the rules are evaluated: incidents count for weeks."""
FAULTS = (
    {"what": "GpuLost", "part": "GPU 3", "reason": "Xid 79"},
    {"what": "GpuResetNeeded", "part": "GPU 1", "reason": "Xid 119"},
    {"what": "PcieDegraded", "part": "GPU 6", "reason": "has errors"},
    {"what": "NvlinkDown", "part": "GPU 0", "reason": "a link is down"},
)
OTHERS = (
    {"what": "FabricPortDown", "part": "mlx5_0/1", "reason": "down"},
    {"what": "GpuThrottled", "part": "GPU 2", "reason": "too hot"},
    {"what": "HostErrors", "part": "the host", "reason": "finds CPUs or processes stuck"},
)
"""What counts for no node: a lossy fabric, heat and a slow file server, on all nodes."""


class Life(NamedTuple):
    """A node of the fleet."""

    name: str
    rate: float
    """Incidents of its hardware in a day of use."""
    use: float
    """Share of the time for which its GPUs compute."""


def fleet(lemons: int) -> list[Life]:
    """Return 64 nodes, of which ten are used ten times as much as the others."""
    nodes = [Life(f"n{number}", RATE, 0.09) for number in range(64 - lemons - 10)]
    nodes += [Life(f"used{number}", 10 * RATE, 0.9) for number in range(10)]
    return nodes + [Life(f"lemon{number}", 60 * RATE, 0.09) for number in range(lemons)]


def lived(life: Life, dice: random.Random) -> Iterator[tuple[float, float]]:
    """Yield, for each hour of a node's 30 days, the figures of its record."""
    made, wall = NodeRecord(None), BEGIN
    made._driver = "570"
    for hour in range(HOURS):
        wall = BEGIN + 3600 * hour
        watched, busy = made._days.get(int(wall // DAY), (0.0, 0.0))
        made._days[int(wall // DAY)] = watched, busy + 3600 * life.use
        for kinds, rate in ((FAULTS, life.rate), (OTHERS, 0.2)):
            if dice.random() < rate / 24:
                kind = dice.choice(kinds)
                for again in range(dice.randrange(1, 4)):  # a fault is rarely alone
                    made.add(fault(wall - 3000 + 900 * again, 60.0, **kind))
        figures = {sample.metric: sample.value for sample in made.samples((), wall)}
        yield figures[INCIDENTS], figures[BUSY]


def named(
    fleets: dict[str, list[Life]], seed: int, directory: Path
) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Play fleets, by the name of their cluster, through the shipped rules; return cluster and name
    of each node that is named at some time, and of each whose hardware has failed three times.
    """
    series, thrice = [], set()
    for cluster, nodes in fleets.items():
        dice = random.Random(f"{seed} {cluster}")
        for life in nodes:
            labels = (
                f'cluster="{cluster}", job="dshealthd", instance="{life.name}:1", '
                f'node="{life.name}"'
            )
            rows = list(zip(*lived(life, dice), strict=True))
            if max(rows[0]) > 2:
                thrice.add((cluster, life.name))
            for metric, row in zip((INCIDENTS, BUSY), rows, strict=True):
                values = " ".join(f"{value:.0f}" for value in row)
                series.append({"series": f"{metric.name}{{{labels}}}", "values": values})
            of = f'dshealthd_node_class_info{{model="H100", {labels}}}'
            series.append({"series": of, "values": f"1x{HOURS - 1}"})
    expression = (
        'group by (cluster, node) (max_over_time(ALERTS{alertname="DshealthdLemonNode", '
        f'alertstate="firing"}}[{DAYS}d]))'
    )
    scene = {
        "evaluation_interval": ROUND,
        "tests": [asking(expression, f"{HOURS - 1}h", series, interval="1h")],
    }
    source = directory / "lemons.yml"
    source.write_text(json.dumps(scene), encoding="utf-8")
    (directory / "pruned").mkdir()
    copy = pruned(source, directory / "pruned")
    for rules in RULES:
        file = directory / "pruned" / rules.name
        text = file.read_text("utf-8")
        every = re.sub(r'"interval": "\w+"', f'"interval": "{ROUND}"', text)
        file.write_text(every, encoding="utf-8")
    return set(re.findall(r'cluster="(\w+)", node="(\w+)"', got(copy))), thrice


@pytest.mark.timeout(600)
def test_a_fleet_s_life(tmp_path: Path) -> None:
    """30 days of 64 nodes: two lemons are both named, and no other node; of a fleet without any,
    none is, although the hardware of nodes that are used ten times as much fails as often.
    """
    found, thrice = named({"sour": fleet(2), "healthy": fleet(0)}, 1, tmp_path)
    assert found == {("sour", "lemon0"), ("sour", "lemon1")}
    assert [name for cluster, name in thrice if cluster == "healthy"]


def by_chance(nodes: int, expected: float, times: int) -> float:
    """Return how many nodes would be named in a year by chance, exactly: those that come to `times`
    incidents in 30 days.
    """
    fewer = sum(
        math.exp(-expected) * expected**each / math.factorial(each) for each in range(times - 1)
    )
    return nodes * expected * 365 / DAYS * (1 - fewer)


def recorded(nodes: int, expected: float, times: int) -> float:
    """Return what the shipped rule makes of it, in Python."""
    rules = {rule["record"]: rule["expr"] for _, rule in rule_groups() if "record" in rule}
    text = rules["dshealthd:node:hardware_incidents:by_chance_in_a_year"]
    text = text.partition("and dshealthd")[0]
    text = re.sub(
        r"count by \(cluster\) \(.*\)\n\s*\* on \(cluster\) group_right \(\)", "N *", text
    )
    text = text.replace("dshealthd:node:expected_hardware_incidents", "E")
    text = text.replace("dshealthd:node:hardware_incidents", "K")
    known = {"N": nodes, "E": expected, "K": times, "ln": math.log}
    value: float = eval(f"({text})", {"exp": math.exp, "sqrt": math.sqrt, **known})
    return value


@pytest.mark.parametrize(
    ("nodes", "least"), [(4, 3), (64, 3), (98, 3), (99, 4), (1_024, 4), (2_500, 4), (2_600, 5)]
)
def test_the_least_number_of_times(nodes: int, least: int) -> None:
    """With the published rate, one fewer would name more than one healthy node a year, unless it is
    two, of which none is named; the recorded bound is that of Poisson, or barely above.
    """
    expected = DAYS * RATE
    assert recorded(nodes, expected, least) < 1
    assert recorded(nodes, expected, least - 1) >= 1 or least == 3
    for times in (least - 1, least):
        exact = by_chance(nodes, expected, times)
        assert exact <= recorded(nodes, expected, times) < 1.1 * exact


def test_healthy_years_name_less_than_one_node_a_year() -> None:
    """1,000 years of 64 nodes by dice: what the derivation says is what happens, each look of the
    sliding window counted.
    """
    dice, expected, years = random.Random(7), DAYS * RATE, 1_000
    named_at = [recorded(64, expected, times) < 1 for times in range(2, 12)]
    told = 0
    for _ in range(64):
        at, times = 0.0, list[float]()
        while at < 365 * years:
            at += dice.expovariate(RATE)
            times = [before for before in times if before > at - DAYS] + [at]
            told += len(times) > 2 and named_at[len(times) - 2]
    assert told / years == pytest.approx(by_chance(64, expected, 3), rel=0.15)
    assert told / years < 1
