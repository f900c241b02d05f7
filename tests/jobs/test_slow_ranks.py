"""Slow ranks from single steps to the alert: the agent's own figures, the shipped rules, and the
simulation of `bench/slow_ranks.py`, which must see the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bench import slow_ranks
from dshealthd.collectors.training import work
from dshealthd.jobs.heartbeats.sender import Sender
from dshealthd.jobs.own_work import SCALES, Course
from dshealthd.training.message import Message, Totals
from tests import yaml_files
from tests.symptoms.promtool import RULES, run

_OF_RANKS = re.compile("dshealthd-(ranks|work|work-.*|slow-ranks|slowest-ranks)")
"""The groups that compare ranks."""
RANKS = 64
SCRAPE = 5.0
ALERT = 'ALERTS{alertname="DshealthdRankSlow", alertstate="firing"}'


def scraped(
    works: slow_ranks.Array, minutes: float, per_node: int, late: int = 0
) -> dict[str, list[float | None]]:
    """Return each series of all nodes by scrape, of a job whose ranks work so long in each step,
    and hang after the last.
    """
    step, ranks = slow_ranks.STEP, works.shape[1]
    senders = {
        rank: SimpleNamespace(course=Course(), message=None, looked=0.0) for rank in range(ranks)
    }
    sums = np.cumsum(works, axis=0)
    waits = np.cumsum(slow_ranks.steps(works)[:, None] - works, axis=0)
    count = int(minutes * 60 / SCRAPE)
    series: dict[str, list[float | None]] = {}
    made = 0
    for scrape in range(count):
        now = scrape * SCRAPE
        while made < len(works) and (made + 1) * step <= now:
            for rank, sender in senders.items():
                own, wait = float(sums[made, rank]), float(waits[made, rank])
                totals = Totals(made + 1, made + 1, own, wait)
                sender.message = Message(step=made + 1, sent=now, mean_seconds=step, totals=totals)
                if made >= late or rank < ranks - per_node:
                    sender.course.add(sender.message, (made + 1) * step)
            made += 1
        for node in range(ranks // per_node):
            here = range(node * per_node, (node + 1) * per_node)
            for rank in here:
                senders[rank].looked = now
            of_node = cast("dict[int, Sender]", {rank: senders[rank] for rank in here})
            for sample in work(of_node, "run-1", ""):
                labels = dict(zip(sample.metric.dimensions, sample.labels, strict=True))
                labels |= {"job": "dshealthd", "instance": f"n{node}:1", "node": f"n{node}"}
                text = ", ".join(f'{key}="{value}"' for key, value in labels.items())
                values = series.setdefault(f"{sample.metric.name}{{{text}}}", [None] * count)
                values[scrape] = sample.value
    return series


def rules(path: Path) -> list[str]:
    """Return files with the rules as shipped, of which only those that concern slow ranks."""
    files = []
    for source in RULES:
        content = yaml_files.load(source)
        for group in content["groups"]:
            group["rules"] = [
                rule
                for rule in group["rules"]
                if _OF_RANKS.fullmatch(group["name"])
                or rule.get("alert") == "DshealthdRankSlow"
                or "straggler" in rule.get("record", "")
            ]
        files.append(path / source.name)
        files[-1].write_text(json.dumps(content), encoding="utf-8")
    return list(map(str, files))


def played(
    path: Path,
    works: slow_ranks.Array,
    tests: list[dict[str, Any]],
    minutes: float | None = None,
    per_node: int = slow_ranks.PER_NODE,
    late: int = 0,
) -> str:
    """Play a job to the rules as shipped, until its last step or for so long, and return what
    promtool prints.
    """
    minutes = len(works) * slow_ranks.STEP / 60 if minutes is None else minutes
    series = [
        {"series": name, "values": " ".join("_" if v is None else f"{v:.9g}" for v in values)}
        for name, values in scraped(works, minutes, per_node, late).items()
    ]
    test = {"interval": "5s", "input_series": series, "promql_expr_test": tests}
    groups = [group["name"] for source in RULES for group in yaml_files.load(source)["groups"]]
    scene = {
        "rule_files": rules(path),
        "group_eval_order": groups,
        "evaluation_interval": "10s",
        "tests": [test],
    }
    file = path / "scene.yml"
    file.write_text(json.dumps(scene), encoding="utf-8")
    return run("test", "rules", file)[1]


def uneven(model: str, minutes: float, ranks: int = RANKS) -> slow_ranks.Array:
    """Return the own work of a job of this model, by step and rank."""
    steps = int(minutes * 60 / slow_ranks.STEP)
    return np.maximum(slow_ranks.MODELS[model](np.random.default_rng(7), steps, ranks), 0.05)


@pytest.mark.parametrize("model", ["drift", "lengths, 25 %"])
def test_uneven_jobs_have_no_slow_rank(tmp_path: Path, model: str) -> None:
    """Ranks that are slowest in turn, or for a while, are nobody's fault."""
    works = uneven(model, 10)
    assert slow_ranks.named(works) == []
    expected = {"expr": f"count_over_time({ALERT}[10m])", "eval_time": "10m", "exp_samples": []}
    assert "SUCCESS" in played(tmp_path, works, [expected])


@pytest.mark.parametrize(
    ("model", "factor", "limit"), [("quiet", 1.2, 90), ("lengths, 25 %", 1.5, 240)]
)
def test_slow_from_the_first_step(tmp_path: Path, model: str, factor: float, limit: int) -> None:
    """The slow rank is named, nobody else, and the simulation says so when the rules do."""
    works = uneven(model, 8)
    works[:, 37] *= factor
    found = slow_ranks.named(works)
    assert {rank for _, rank in found} == {37}
    assert found[0][0] <= limit
    node = {"labels": '{node="n4"}', "value": 1}
    text = played(
        tmp_path,
        works,
        [
            {"expr": f"count by (node) ({ALERT})", "eval_time": f"{limit}s", "exp_samples": [node]},
            {
                "expr": f"group by (node) (last_over_time({ALERT}[8m]))",
                "eval_time": "8m",
                "exp_samples": [node],
            },
            {
                "expr": 'max(last_over_time(dshealthd:job:slowest_rank{node="n4"}[3m]))',
                "eval_time": "8m",
                "exp_samples": [{"labels": "{}", "value": 37}],
            },
        ],
    )
    assert "SUCCESS" in text, text[-3000:]


def test_the_node_with_the_slow_rank_is_the_first_to_tell(tmp_path: Path) -> None:
    """What one of two pairs differs by is no measure of what is usual, now or in the next hour."""
    works = uneven("quiet", 3, 4)
    works[:, 1] *= 1.3
    asked = {
        "expr": f"group by (node) ({ALERT})",
        "eval_time": "2m",
        "exp_samples": [{"labels": '{node="n0"}', "value": 1}],
    }
    text = played(tmp_path, works, [asked], per_node=2, late=12)
    assert "SUCCESS" in text, text[-3000:]


def test_pauses(tmp_path: Path) -> None:
    """A rank that pauses for 3 s a minute, 5 % of the job's time, is named, and nobody else."""
    works = uneven("constant, 3 %", 9)
    slow_ranks.pausing(works, 37, 0)
    found = slow_ranks.named(works)
    assert {rank for _, rank in found} == {37}
    asked = {
        "expr": f"group by (node, training_job) (last_over_time({ALERT}[8m]))",
        "eval_time": "8m",
        "exp_samples": [{"labels": '{node="n4", training_job="run-1"}', "value": 1}],
    }
    text = played(tmp_path, works, [asked])
    assert "SUCCESS" in text, text[-3000:]


def test_a_hung_job_has_no_slow_rank(tmp_path: Path) -> None:
    """Figures that stand still accuse nobody: a job that makes no steps has none."""
    works = uneven("drift", 4)
    works[-3:, 37] *= 1.5
    asked: list[dict[str, Any]] = [
        {"expr": f"count_over_time({ALERT}[12m])", "eval_time": "12m", "exp_samples": []},
        {"expr": "dshealthd:job:work_ratio", "eval_time": "6m15s", "exp_samples": []},
        {
            "expr": 'count(dshealthd:job:work_ratio{over="30s"})',
            "eval_time": "4m",
            "exp_samples": [{"labels": "{}", "value": RANKS // slow_ranks.PER_NODE}],
        },
    ]
    text = played(tmp_path, works, asked, minutes=12)
    assert "SUCCESS" in text, text[-3000:]


@pytest.mark.parametrize(
    ("model", "nodes", "per_node"),
    [("mixed", 8, 8), ("drift", 2, 2), ("drift", 1, 4), ("quiet", 1, 2)],
)
def test_the_simulation_sees_what_the_rules_see(
    tmp_path: Path, model: str, nodes: int, per_node: int
) -> None:
    """Ratios and limits of agent and rules are those of the simulation, at each of the times."""
    works = uneven(model, 10, nodes * per_node)
    names = ("dshealthd:job:work_ratio", "dshealthd:job:work_ratio:limit")
    asked = [{"expr": name, "eval_time": "10m", "exp_samples": []} for name in names]
    text = played(tmp_path, works, asked, per_node=per_node)
    pattern = re.compile(r'\{(?:[^{}]*)over="(\w+)"[^{}]*\} ([\d.E+-]+)')
    ratios, limits = (
        [(over, float(value)) for over, value in pattern.findall(part.partition("got:")[2])]
        for part in text.split("expr:")[1:]
    )
    for over in SCALES:
        seen = slow_ranks.looks(works, over, per_node)
        told = sorted(value for name, value in ratios if name == over)
        assert any(
            told == pytest.approx(sorted(ratio.tolist()), rel=0.02) for ratio in seen.ratio[-3:]
        )
        assert any(dict(limits)[over] == pytest.approx(look, rel=0.01) for look in seen.limit[-3:])
