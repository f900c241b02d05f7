"""The rules for Prometheus: that promtool accepts them, that they do what their tests say, and that
none lacks tests, runbook or row.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from dshealthd.core.collector import Metric, MetricKind
from dshealthd.findings import gpus
from dshealthd.jobs.hangs.classes import Culprit
from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.entry import PARTS, RULESET, Alert, FleetRule
from generate import alert_rules, reference
from tests import yaml_files
from tests.symptoms.expression import selectors
from tests.symptoms.promtool import ROOT, RULES, Expectation, promtool, rule_groups, scenes

METRICS = reference.all_metrics()
PART = ROOT / "deploy/prometheus/dshealthd.yml"
PRODUCT = ROOT / "dshealthd"
ALERTMANAGER = ROOT / "deploy/alertmanager/dshealthd.yml"
SCENES = list(scenes())
NAMED = re.compile(r"(?<![\w./-])(dshealthd(?:_[a-z0-9_]+|(?::[a-z0-9_]+)+))(?![\w*/.-]*[*/])")
"""Names of metrics in a runbook, but not files or patterns such as `dshealthd_gpu_*`."""
QUERY = re.compile(r"printf `([^`]*)`")
ALERTS: dict[str, Alert | FleetRule] = {
    alert.name: alert for symptom in all_symptoms().values() for alert in symptom.alerts
} | {
    finding.name: finding.rule
    for symptom in all_symptoms().values()
    for finding in symptom.findings
    if finding.rule
}
"""What several nodes decide."""
RECORDED = {rule["record"] for _, rule in rule_groups() if "record" in rule}
OF_TARGETS = frozenset(
    {"cluster", "elastic", "exporter", "job", "instance", "node", "leaf", "training_job"}
)
"""Labels that a scrape adds; `training_job` is what becomes of the label `job` of a training job.
"""
OF_TARGET = frozenset({"up", "process_start_time_seconds"})
"""Metrics that targets of any kind have."""
OF_PROMETHEUS = frozenset(
    {
        "up",
        "ALERTS",
        "ALERTS_FOR_STATE",
        "THRESHOLDS",  # how many there are, in the generated file
        "kube_node_spec_taint",  # of kube-state-metrics, where there is one
        "kube_node_status_capacity",
        "prometheus_rule_evaluation_failures_total",
        "prometheus_rule_group_last_duration_seconds",
        "prometheus_rule_group_interval_seconds",
        "prometheus_notifications_errors_total",
        "prometheus_notifications_dropped_total",
        "cortex_prometheus_rule_evaluation_failures_total",  # of Mimir's ruler
        "cortex_prometheus_rule_group_last_duration_seconds",
        "cortex_prometheus_notifications_errors_total",
        "cortex_prometheus_notifications_dropped_total",
        "vmalert_recording_rules_errors_total",
        "vmalert_alerting_rules_errors_total",
        "vmalert_alerts_send_errors_total",
        "vmalert_iteration_total",
    }
)
ROWS = range(1, 44)


def test_generated_file_is_up_to_date() -> None:
    """alerts.yml is what the symptoms say."""
    assert alert_rules.main([str(ROOT / "deploy/prometheus"), "--check"]) == 0


def test_check_notices_a_stale_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` fails for a file that is missing or differs, and writes nothing.

    Without it the file is written. A directory without thresholds is an error.
    """
    assert alert_rules.main([str(tmp_path)]) == 1
    assert str(tmp_path / "thresholds.yml") in capsys.readouterr().err
    shutil.copy(ROOT / "deploy/prometheus/thresholds.yml", tmp_path)
    assert alert_rules.main([str(tmp_path), "--check"]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["thresholds.yml"]
    assert alert_rules.main([str(tmp_path)]) == 0
    assert alert_rules.main([str(tmp_path), "--check"]) == 0
    assert alert_rules.main([str(tmp_path), "--check", "--runbooks", "https://wiki/runbooks"]) == 1
    assert "run ./dev generate" in capsys.readouterr().err


@pytest.mark.parametrize(("where", "expected"), [
    ("https://wiki/runbooks/", "https://wiki/runbooks/gpu-lost.md#dshealthdgpulost"),
    ("https://docs/r/SLUG.html", "https://docs/r/gpu-lost.html#dshealthdgpulost"),
    (
        "https://AGENT/runbooks/SLUG",
        "https://{{ $labels.instance }}/runbooks/gpu-lost#dshealthdgpulost",
    ),
])  # fmt: skip
def test_runbooks_elsewhere(tmp_path: Path, where: str, expected: str) -> None:
    """Alerts link to a copy of the files, to pages of any address, or to agents with TLS."""
    shutil.copy(ROOT / "deploy/prometheus/thresholds.yml", tmp_path)
    assert alert_rules.main([str(tmp_path), "--runbooks", where]) == 0
    assert f"runbook_url: {expected}\n" in (tmp_path / "alerts.yml").read_text("utf-8")


def test_promtool_accepts_them() -> None:
    """Rules and configuration are valid, and free of what promtool's lint finds."""
    promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)
    promtool("check", "config", "--lint=all", PART)


SITE = """
global: {scrape_interval: 1m, evaluation_interval: 1m}
rule_files: [/etc/prometheus/rules/*.yml]
scrape_configs:
  - {job_name: prometheus, static_configs: [{targets: [localhost:9090]}]}
  - {job_name: gpu-nodes, static_configs: [{targets: [node-1:9100]}]}
"""
"""The prometheus.yml of a site that has one."""


def test_a_site_s_file_and_ours_make_a_valid_one(tmp_path: Path) -> None:
    """Our lists appended to a site's, as the head of ours says, are a configuration that promtool
    accepts, and change nothing global.
    """
    site, ours = yaml.safe_load(SITE), yaml_files.load(PART)
    own = [job for job in ours.pop("scrape_configs") if job["job_name"] == "dshealthd"]
    assert set(ours) == {"rule_files", "alerting"}
    site |= {
        "rule_files": site["rule_files"] + [str(PART.parent / name) for name in ours["rule_files"]],
        "scrape_configs": site["scrape_configs"] + own,
        "alerting": ours["alerting"],
    }
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(site), encoding="utf-8")
    promtool("check", "config", file)


def test_every_alert_has_our_label() -> None:
    """All our alerts, the Watchdog among them, have the label by which Alertmanager knows them."""
    labels = [rule["labels"] for _, rule in rule_groups() if "alert" in rule]
    assert len(labels) >= len(ALERTS)
    assert [found for found in labels if not found.items() >= RULESET.items()] == []


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.stem)
def test_groups_have_intervals_of_their_own(file: Path) -> None:
    """No group depends on the evaluation interval that is global in a Prometheus."""
    intervals = {"1s", "2s", alert_rules.URGENT, "10s", "15s", "30s", "1m", "5m"}
    assert {group.get("interval") for group in yaml_files.load(file)["groups"]} <= intervals


DCGM = ROOT / "deploy/prometheus/dcgm.yml"
GROUPS = [group for file in (*RULES, DCGM) for group in yaml_files.load(file)["groups"]]
RESULT_NAMES = re.compile(r'__name__=~"([^"]*)"')


def reads_of_own_group(group: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each rule of a group with what it reads of another rule of the group.

    vmalert, Thanos' and Mimir's rulers write what a rule records while they go on: the rule after
    it sees the round before (docs.victoriametrics.com/victoriametrics/vmalert/#limitations). What a
    rule reads of itself, or as it was by an `offset`, is of an earlier round everywhere.
    """
    names = [rule.get("record") or rule["alert"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
    if len(recorded) < len(names):
        recorded |= {"ALERTS", "ALERTS_FOR_STATE"}
    found = []
    for name, rule in zip(names, group["rules"], strict=True):
        read = {selector.metric for selector in selectors(rule["expr"]) if not selector.past}
        read |= {
            other
            for pattern in RESULT_NAMES.findall(rule["expr"])
            for other in recorded
            if re.fullmatch(pattern, other)
        }
        found += [(name, other) for other in sorted(read & recorded - {name})]
    return found


def test_no_rule_reads_its_own_group() -> None:
    """What a rule reads, another group has recorded, whichever ruler evaluates them."""
    assert [found for group in GROUPS for found in reads_of_own_group(group)] == []


@pytest.mark.parametrize(("expressions", "found"), [
    ({"a": "up", "b": "sum(a)"}, [("b", "a")]),
    ({"a": "up", "b": 'count({__name__=~"a|c"})'}, [("b", "a")]),
    ({"b": "max_over_time(a[5m])", "a": "up"}, [("b", "a")]),
    ({"a": "a + 1 or up", "b": "up"}, []),
    ({"a": "timestamp(up)", "b": "timestamp(up) > a offset 5s"}, []),
    ({"A": 'ALERTS{alertname="B"}', "b": "up"}, [("A", "ALERTS")]),
])  # fmt: skip
def test_reads_of_own_group(expressions: dict[str, str], found: list[tuple[str, str]]) -> None:
    """Selectors, ranges, patterns of names and alerts are seen; a rule may read itself."""
    rules = [
        {"alert" if name.isupper() else "record": name, "expr": expression}
        for name, expression in expressions.items()
    ]
    assert reads_of_own_group({"rules": rules}) == found


# MetricsQL counts the first sample of a series that has just begun as a change, and has no sample
# that is NaN.
NOT_PORTABLE = re.compile(r"\b(changes|delta|idelta)\(|\bNaN\b")
# MetricsQL makes a series of a number times a scalar, which no function takes for a scalar.
MAKES_A_SERIES = re.compile(r"\b\d+ [-+*/] scalar\(")
# MetricsQL drops the name before it matches.
MATCHES_NAMES = re.compile(r"\b(?:on|ignoring) \([^)]*__name__")


def test_rules_are_portable() -> None:
    """No rule counts changes of a series that may have just begun, makes NaN, matches names, or
    has arithmetic where a function takes a scalar.
    """
    for rule in (rule for group in GROUPS for rule in group["rules"]):
        assert not NOT_PORTABLE.search(rule["expr"]), rule
        assert not MAKES_A_SERIES.search(rule["expr"]), rule
        assert not MATCHES_NAMES.search(rule["expr"]), rule


def test_rules_name_no_scrape_job() -> None:
    """A scrape job may have any name: agents are selected by the label that the job gives them."""
    for _, rule in rule_groups():
        description = rule.get("annotations", {}).get("description", "")
        for text in (rule["expr"], *QUERY.findall(description)):
            for name, labels, _ in selectors(text):
                assert "job" not in labels, rule
                assert name not in OF_TARGET or "exporter" in labels, rule


def test_every_alert_is_tested() -> None:
    """Each alert has a scene in which it fires and later clears, and one in which it never fires.

    The Watchdog always does.
    """
    for name in ALERTS:
        found = [[expected for expected in scene if expected.alert == name] for scene in SCENES]
        fires = [any(expected.fires for expected in scene) for scene in found]
        assert any(fires), f"no scene of {name} fires"
        if name != "DshealthdWatchdog":
            assert any(map(_clears, found)), f"no scene of {name} clears"
            quiet = (scene for scene, fired in zip(found, fires, strict=True) if not fired)
            assert any(quiet), f"no scene of {name} stays quiet"


def _clears(scene: list[Expectation]) -> bool:
    last = max((expected.seconds for expected in scene if expected.fires), default=float("inf"))
    return any(expected.seconds > last for expected in scene)


def test_tests_name_alerts_that_exist() -> None:
    """No scene expects something of an alert that there is not, which would hold for ever."""
    findings = {finding.name for symptom in all_symptoms().values() for finding in symptom.findings}
    assert {expected.alert for scene in SCENES for expected in scene} <= ALERTS.keys() | findings


ASKED = re.compile(r'query "([^"]*)"')


def test_no_link_reads_every_agent() -> None:
    """Each alert renders its link each time it is evaluated, and where a thousand nodes are gone
    there are a thousand alerts: an agent to link to is one series.
    """
    texts = {text for _, rule in rule_groups() for text in rule.get("annotations", {}).values()}
    asked = {query for text in texts for query in ASKED.findall(text)}
    assert asked == {"dshealthd:fleet:agent"}


def test_groups_are_as_small_as_mimir_wants() -> None:
    """Mimir's ruler refuses a group of more than 20 rules, unless told otherwise."""
    assert [group["name"] for group in GROUPS if len(group["rules"]) > 20] == []


def test_names_are_unique() -> None:
    """An alert's name belongs to one symptom."""
    names = Counter(
        name
        for symptom in all_symptoms().values()
        for name in {entry.name for entry in symptom.entries}
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_every_row_has_its_symptom() -> None:
    """Each row of the symptom table is there once."""
    assert Counter(
        symptom.row for symptom in all_symptoms().values() if symptom.row is not None
    ) == Counter(ROWS)


def test_means_are_kept() -> None:
    """A symptom that is to be alerted has an alert of its own or another's; one that is not has
    none.
    """
    for slug, symptom in all_symptoms().items():
        assert set(symptom.covered_by) <= all_symptoms().keys()
        covered = any(all_symptoms()[other].entries for other in symptom.covered_by)
        if "alert" in symptom.means:
            assert symptom.entries or covered, slug
        else:
            assert not symptom.entries, slug


def test_problems_of_ranks_have_one_wording() -> None:
    """The page to the phone words the problem of a rank as page, commands and evidence do."""
    (finding,) = (
        found for found in all_symptoms()["training-hang"].findings if found.page == "always"
    )
    assert finding.rule is not None
    for reason in {*Culprit} - {Culprit.TRACED, Culprit.PROMPT}:  # which are no page
        assert reason.words in finding.rule.description


def test_pages_that_stand_for_jobs_name_them() -> None:
    """Each alert for which `dshealthd:job:struck` leaves out the page of a hung job names the jobs
    of its node, and the rules of Prometheus and Alertmanager have the same symptoms.
    """
    alert_rules = {rule["record"]: rule for _, rule in rule_groups() if "record" in rule}
    slugs = "|".join(sorted(PARTS))
    assert f'symptom=~"{slugs}"' in alert_rules["dshealthd:node:struck"]["expr"]
    assert f'symptom=~"{slugs}", severity="critical"' in ALERTMANAGER.read_text(encoding="utf-8")
    found = {
        rule["alert"]: "dshealthd_job_info{" in rule["annotations"]["description"]
        or "$labels.training_job" in rule["annotations"]["description"]
        for _, rule in rule_groups()
        if "alert" in rule
        and rule["labels"]["symptom"] in PARTS
        and rule["labels"]["severity"] == "critical"
        and rule["labels"]["component"] in {"node", "gpu", "nic", "path"}
    }
    assert len(found) > 10
    assert all(found.values()), found


def test_every_metric_exists() -> None:
    """What an alert or a recording rule reads is exported or recorded, under labels that it has.

    What a runbook names is too.
    """
    read = [rule["expr"] for _, rule in rule_groups()]
    texts = [text for _, rule in rule_groups() for text in rule.get("annotations", {}).values()]
    read += [query for text in texts for query in QUERY.findall(text)]
    assert [name for expression in read for name in wrong(expression)] == []
    runbooks = (text for each in all_symptoms().values() for text in each.sections.values())
    named = {name for text in runbooks for name in NAMED.findall(text)}
    assert {name for name in named if not exists(name)} == set()


def test_wrong_names_are_noticed() -> None:
    """The check itself finds a metric that there is not, and a label that a metric does not
    have.
    """
    assert wrong("dshealthd_gpu_upp == 0") == ["dshealthd_gpu_upp does not exist"]
    assert wrong('dshealthd_gpu_up{reason="x"}') == ["dshealthd_gpu_up has no label reason"]
    assert wrong("dshealthd:threshold:nothing") == ["dshealthd:threshold:nothing does not exist"]


def test_thresholds() -> None:
    """Every threshold is a number with a comment that names its source, and some rule or runbook
    reads it.
    """
    file = RULES[0]
    names = re.findall(
        r"record: (\S+)\n +expr: vector\([\d.e+-]+\)", file.read_text(encoding="utf-8")
    )
    assert names == [rule["record"] for place, rule in rule_groups() if place == file.name]
    comments = re.findall(r"      # (.*)\n(?=      - record)", file.read_text(encoding="utf-8"))
    assert [text for text in comments if not re.search(r"\[[RSDO]\]$", text)] == []
    read = {found.metric for _, rule in rule_groups() for found in selectors(rule["expr"])}
    assert [name for name in names if name not in read] == []


def test_a_new_threshold_is_counted(tmp_path: Path) -> None:
    """Whoever adds one to thresholds.yml edits nothing else."""
    text = RULES[0].read_text(encoding="utf-8")
    new = "      - record: dshealthd:threshold:new\n        expr: vector(1)\n"
    (tmp_path / "thresholds.yml").write_text(text + new, encoding="utf-8")
    assert alert_rules.main([str(tmp_path)]) == 0
    count = text.count("record: dshealthd:threshold:") + 1
    assert f" < {count},\n" in (tmp_path / "alerts.yml").read_text(encoding="utf-8")


def test_findings_that_rules_read_exist() -> None:
    """Rules select findings by names that there are; one that is renamed would be silently left
    out.
    """
    names = {
        finding.name.removeprefix("Dshealthd")
        for symptom in all_symptoms().values()
        for finding in symptom.findings
    }
    read = {
        name
        for _, rule in rule_groups()
        for text in re.findall(r'finding=~?"([^"]+)"', rule["expr"])
        for name in text.split("|")
    }
    assert {"GpuLost", "GpuResetNeeded", "NvlinkDown", "GpuRepairDue", "FabricPortDown"} <= read
    assert read <= names
    reasons = [
        text
        for _, rule in rule_groups()
        for text in re.findall(r'reason=~"([^"]+Xid[^"]+)"', rule["expr"])
    ]
    assert reasons
    assert all(re.fullmatch(text, gpus.CONTAINED) for text in reasons)


def wrong(expression: str) -> list[str]:
    """Return what an expression reads that does not exist."""
    found = []
    for name, labels, _ in selectors(expression):
        metric = exported(name)
        if not exists(name):
            found.append(f"{name} does not exist")
        elif metric is not None:
            histogram = {"le"} if metric.kind is MetricKind.HISTOGRAM else set()
            missing = labels - {*metric.labels} - OF_TARGETS - histogram
            found += [f"{name} has no label {label}" for label in sorted(missing)]
    return found


def exported(name: str) -> Metric | None:
    """Return an exported metric; a histogram is so with its suffixes."""
    whole = METRICS.get(re.sub("_(bucket|sum|count)$", "", name))
    histogram = whole is not None and whole.kind is MetricKind.HISTOGRAM
    return whole if histogram else METRICS.get(name)


def exists(name: str) -> bool:
    """Tell whether a metric is exported, recorded or Prometheus' own."""
    return exported(name) is not None or name in RECORDED or name in OF_PROMETHEUS


def test_texts_do_not_repeat_thresholds() -> None:
    """A threshold can be changed in its one file: what an alert says must not name the old
    figure.
    """
    text = RULES[0].read_text(encoding="utf-8")
    values = dict(re.findall(r"record: (\S+)\n +expr: vector\(([\d.e+-]+)\)", text))
    for name, alert in ALERTS.items():
        said = alert.description.partition("First step")[0]
        for threshold in set(re.findall(r"dshealthd:threshold:\w+", alert.expr)):
            value = float(values[threshold])
            written = {
                *([f"{value:g}"] if value >= 3 else []),  # one and two are words of their own
                *([f"{100 * value:g} %", f"{100 * value:g}%"] if value < 1 else []),
                *([f"{value / 60:g} min"] if value >= 60 else []),
                *([f"{value / 3600:g} h"] if value >= 3600 else []),
            }
            found = [
                one for one in written if re.search(rf"(?<![\w.]){re.escape(one)}(?![\w.])", said)
            ]
            assert found == [], f"{name} says {threshold} in words"


def test_every_step_of_an_alert_is_for_a_reason_that_it_has() -> None:
    """A first step whose reason no rule gives would never be told, and the reason would get
    another's.
    """
    alerts = [
        alert for symptom in all_symptoms().values() for alert in symptom.alerts if alert.steps
    ]
    assert len(alerts) > 1
    for alert in alerts:
        reasons = set(re.findall(r'"reason",\s*"([^"]+)"', alert.expr + alert.ticket))
        assert alert.steps.keys() < reasons, alert.name
        # One reason at most is left for the step of all others.
        assert len(reasons - alert.steps.keys()) == 1, alert.name


def test_every_step_of_a_finding_is_for_a_reason_that_it_has() -> None:
    """A first step is chosen by how a reason begins: the product or the rule has such reasons, and
    no other step is in its way.
    """
    code = "".join(file.read_text(encoding="utf-8") for file in PRODUCT.rglob("*.py"))
    for symptom in all_symptoms().values():
        for finding in symptom.findings:
            for case, text in finding.steps.items():
                words = {case, case.replace(" ", "_")}  # a source's reason, as findings word it
                of_code = any(word in code for word in words)
                assert of_code or (finding.rule and f'"{case}"' in finding.rule.case), case
                assert finding.first_step(case) == finding.first_step(f"{case} ...") == text


@pytest.mark.parametrize(("nodes", "severity", "least"), [
    (6, "critical", 3),
    (1_000, "critical", 3),
    (10_000, "critical", 4),
    (100_000, "critical", 8),
    (100, "warning", 3),
    (1_000, "warning", 5),
    (10_000, "warning", 12),
])  # fmt: skip
def test_many_nodes_are_more_than_fail_by_chance_in_a_year(
    nodes: int, severity: str, least: int
) -> None:
    """As many nodes as make a storm get a page within two minutes less than once a year by chance;
    one fewer may, unless these are two.
    """
    recorded = {rule["record"]: rule["expr"] for _, rule in rule_groups() if "record" in rule}
    rule = recorded["dshealthd:node:paged_at_once"]
    (limit,), (floor,) = (re.findall(text, rule) for text in (r"(?m)\) > ([\d.]+)$", r"> (\d) *\)"))
    name = {"critical": "node_pages_per_day", "warning": "node_tickets_per_day"}[severity]
    rate = float(recorded[f"dshealthd:threshold:{name}"].removeprefix("vector(").rstrip(")\n"))
    expected = nodes * rate / 720

    def storm(found: int) -> bool:
        return found > int(floor) and found * (math.log(found / expected) - 1) > float(limit)

    def per_year(found: int) -> float:
        fewer = sum(expected**each / math.factorial(each) for each in range(found))
        return 365 * 720 * (1 - math.exp(-expected) * fewer)

    assert (storm(least), storm(least - 1)) == (True, False)
    assert per_year(least) < 1
    # The bound is one node too high at most.
    assert per_year(least - 1) > 0.05 or least - 1 == int(floor)
