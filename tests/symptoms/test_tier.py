"""The verdict tier is what the shipped rules and the dashboard *Fleet* read, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from deploy import tier
from dshealthd.core.collector import MetricKind
from dshealthd.core.exposition import parse_selectors
from generate import files
from generate.reference import all_metrics
from tests.symptoms import expression


def test_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` passes on what is checked in, and names a file that differs or is missing."""
    assert files.main("deploy.tier", tier.documents, ["--check"]) == 0
    monkeypatch.setattr(tier, "AGENT", tmp_path / "verdict.tier")
    (tmp_path / "verdict.tier").write_text("dshealthd_old\n", encoding="utf-8")
    monkeypatch.setattr(tier, "REMOTE_WRITE", tmp_path / "remote_write.yml")
    assert files.main("deploy.tier", tier.documents, ["--check"]) == 1
    named = capsys.readouterr().err
    assert "verdict.tier" in named
    assert "remote_write.yml" in named
    assert files.main("deploy.tier", tier.documents, []) == 0
    assert files.main("deploy.tier", tier.documents, ["--check"]) == 0


def test_rules_and_fleet_need_nothing_else() -> None:
    """Every name of an agent's series in them is a family of the tier."""
    families = {
        selector.family for selector in parse_selectors(tier.AGENT.read_text(encoding="utf-8"))
    }
    for expr in tier.expressions():
        for selector in expression.selectors(expr):
            if selector.metric.startswith("dshealthd_"):
                family = re.sub(r"_(bucket|count|sum)$", "", selector.metric)
                assert {selector.metric, family} & families, expr


def test_a_label_of_the_target_and_a_variable_choose_nothing() -> None:
    """What a node cannot know, it does not leave out; a family that some rule reads whole is in the
    tier whole.
    """
    read = [
        'dshealthd_gpu_clock_hertz{domain="sm",leaf!=""} > 1',
        'max_over_time(dshealthd_job_step{training_job=~"$training",node="a"}[5m:1m] offset 1h)',
        'dshealthd_probe_rounds_total{kind="pair"} or dshealthd_probe_rounds_total',
        "rate(dshealthd_probe_duration_seconds_bucket[1m]) and up",
    ]
    assert [*map(str, tier.tier(read))] == [
        "dshealthd_finding",
        "dshealthd_finding_value",
        'dshealthd_gpu_clock_hertz{domain="sm"}',
        "dshealthd_job_step",
        "dshealthd_probe_duration_seconds",
        "dshealthd_probe_rounds_total",
    ]
    with pytest.raises(KeyError):
        tier.tier(["dshealthd_of_nobody"])


def test_what_is_passed_on_is_the_tier() -> None:
    """The list for remote write keeps each family by all its names, what Prometheus adds to a
    scrape, and nothing else.
    """
    document = yaml.safe_load(tier.REMOTE_WRITE.read_text(encoding="utf-8"))
    ((keep,),) = (one["write_relabel_configs"] for one in document["remote_write"])
    names = set(keep["regex"].split("|"))
    families = {
        selector.family for selector in parse_selectors(tier.AGENT.read_text(encoding="utf-8"))
    }
    metrics = all_metrics()
    plain = {name for name in families if metrics[name].kind is not MetricKind.HISTOGRAM}
    assert names >= {*plain, *tier.OF_SCRAPES}
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in names - plain} == {
        *families - plain,
        *tier.OF_SCRAPES,
    }
    assert not re.fullmatch(keep["regex"], "dshealthd_gpu_memory_used_bytes")
