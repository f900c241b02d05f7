"""The shipped Alertmanager configuration is valid, and tells whom it says it tells.

Asked of amtool.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dshealthd.findings.judge import FINDING
from dshealthd.symptoms import all_symptoms
from dshealthd.symptoms.entry import RULESET
from tests import yaml_files
from tests.findings.player import seconds
from tests.lab.servers import ALERTMANAGER, PART, routes
from tests.symptoms.promtool import RULES
from tests.symptoms.test_time_to_page import rounds

FILE = ALERTMANAGER / PART
MATCHER = re.compile(r'^(\w+)(=~|!~|!=|=)"([^"]*)"$')
FOUND = {finding.name for symptom in all_symptoms().values() for finding in symptom.findings}
"""Alerts that report what nodes find."""
COMMON = tuple(f"{name}={value}" for name, value in RULESET.items())


def amtool(*arguments: str) -> str:
    """Return what amtool prints; its complaint is in the error."""
    done = subprocess.run(
        ["amtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_is_valid() -> None:
    """`amtool check-config` finds nothing wrong, and no file that may be missing where it runs."""
    said = amtool("check-config", str(FILE))
    assert "SUCCESS" in said
    assert "0 templates" in said


OURS = (
    ("severity=critical symptom=gpu-lost node=node-17 gpu=3", "page"),
    ("severity=warning symptom=time-wait node=node-17", "ticket"),
    ("severity=warning symptom=loss-nan audience=owner training_job=slurm-7", "job-owner"),
    ("severity=info symptom=nccl-environment audience=owner", "none"),
    ("severity=critical symptom=training-hang training_job=slurm-7", "page"),
    ("severity=info symptom=node-drift", "none"),
    ("severity=warning symptom=maintenance node=node-17", "none"),
    ("severity=none symptom=watchdog", "watchdog"),
    ("severity=critical symptom=watchdog", "watchdog"),
    ("severity=warning symptom=watchdog", "watchdog"),
    ("severity=disaster symptom=gpu-lost", "ticket"),
)
"""Labels of ours beside the common one, and the receiver by its name without `dshealthd-`."""
SITE = """
global: {resolve_timeout: 5m}
templates: [/etc/alertmanager/templates/*.tmpl]
route:
  receiver: ops
  group_by: [alertname]
  routes:
    - {receiver: page, matchers: [severity="critical"], continue: true}
    - {receiver: database, matchers: [team="database"]}
    - {receiver: nobody, matchers: [alertname=~"Watchdog|InfoInhibitor"]}
inhibit_rules:
  - source_matchers: [alertname="InfoInhibitor"]
    target_matchers: [severity="info"]
    equal: [namespace]
receivers:
  - {name: ops, email_configs: [{to: ops@example.com, from: a@example.com, smarthost: mail:25}]}
  - {name: page, webhook_configs: [{url: http://127.0.0.1:9/}]}
  - {name: database, webhook_configs: [{url: http://127.0.0.1:9/}]}
  - {name: nobody}
"""
"""The alertmanager.yml of a site that has one, with names as many choose them."""


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a site's file into which ours has been merged as its head says."""
    site, ours = yaml.safe_load(SITE), yaml_files.load(FILE)
    top = ours.pop("route")
    site["route"]["routes"] = top["routes"] + site["route"]["routes"]
    ours["receivers"] = [one for one in ours["receivers"] if one["name"] != top["receiver"]]
    for name, entries in ours.items():
        site[name] += entries
    file = tmp_path_factory.mktemp("merged") / "alertmanager.yml"
    file.write_text(yaml.safe_dump(site), encoding="utf-8")
    return file


def receivers(file: Path, *labels: str) -> set[str]:
    """Return who is told of an alert."""
    said = amtool("config", "routes", "test", f"--config.file={file}", *labels)
    return set(said.strip().split(","))


@pytest.mark.parametrize(("labels", "receiver"), OURS)
def test_who_is_told(labels: str, receiver: str, merged: Path) -> None:
    """Severity decides who is told, the Watchdog has a receiver of its own, and an alert of no
    known severity is not lost; in a site's file as in ours, and nobody of the site is told.
    """
    for file in (FILE, merged):
        assert receivers(file, *COMMON, *labels.split()) == {f"dshealthd-{receiver}"}


@pytest.mark.parametrize("labels", [OURS[0][0], OURS[2][0], OURS[-1][0]])
def test_other_teams_alerts_go_where_they_went(labels: str, merged: Path, tmp_path: Path) -> None:
    """An alert that looks like ours but has not the common label takes the site's routes as before
    the merge, and none of ours; so does one about an agent, with its target's labels.
    """
    before = tmp_path / "alertmanager.yml"
    before.write_text(SITE, encoding="utf-8")
    for foreign in ((), ("exporter=dshealthd", "job=dshealthd", "service=dshealthd")):
        words = ("alertname=SomebodyElses", *foreign, *labels.split())
        assert receivers(merged, *words) == receivers(before, *words)
        assert receivers(FILE, *words) == {"others"}


def test_every_symptom_that_is_named_has_an_alert() -> None:
    """Routes and inhibition speak of symptoms that alerts have.

    One that is renamed, or whose alerts went to another, would be silently left out.
    """
    named = re.findall(r'symptom(?:=|!=|=~|!~)"([^"]*)"', FILE.read_text(encoding="utf-8"))
    assert len(named) > 10
    alerting = {slug for slug, symptom in all_symptoms().items() if symptom.entries}
    assert {slug for text in named for slug in text.split("|")} - alerting == set()


def test_rules_about_findings_name_labels_that_findings_have() -> None:
    """An inhibition rule whose sources or targets are all findings requires no other label of them.

    One that did would never apply.
    """
    config = yaml_files.load(FILE)
    having = {"cluster", "node", "leaf", "instance", *FINDING.dimensions}
    checked = 0
    for rule in config["inhibit_rules"]:
        for side in ("source_matchers", "target_matchers"):
            matchers = [found for text in rule[side] for found in MATCHER.findall(text)]
            assert len(matchers) == len(rule[side])
            selected = set(_selected(matchers))
            assert selected, rule[side]
            if not selected <= FOUND:
                continue
            checked += 1
            needed = {name for name, operator, value in matchers if (operator, value) == ("!=", "")}
            assert needed <= having, rule
            assert set(rule["equal"]) <= having, rule
    assert checked > 3


def test_inhibition_rules_require_our_label() -> None:
    """Each rule requires the label that all our alerts have of its source and of its target, so
    that no alert of another team holds back ours, or is held back, however alike it is otherwise.
    """
    common = {f'{name}="{value}"' for name, value in RULESET.items()}
    rules = yaml_files.load(FILE)["inhibit_rules"]
    assert len(rules) > 10
    for rule in rules:
        for side in ("source_matchers", "target_matchers"):
            assert common <= set(rule[side]), rule


def _selected(matchers: list[tuple[str, str, str]]) -> list[str]:
    """Return the names of the alerts that matchers select by what is fixed in the rules."""
    alerts = yaml_files.load(RULES[-1])["groups"]
    return [
        rule["alert"]
        for group in alerts
        for rule in group["rules"]
        if all(
            (re.fullmatch(value, fixed[name]) is not None) == (operator in {"=", "=~"})
            for fixed in [rule["labels"] | {"alertname": rule["alert"]}]
            for name, operator, value in matchers
            if name in fixed
        )
    ]


def test_every_severity_has_its_receiver() -> None:
    """No alert has a severity beside those that routes speak of, and the Watchdog's."""
    found = {alert.severity for symptom in all_symptoms().values() for alert in symptom.alerts}
    assert found == {"critical", "warning", "none"}
    assert {
        symptom.slug
        for symptom in all_symptoms().values()
        for alert in symptom.alerts
        if alert.severity == "none"
    } == {"watchdog"}


def test_pages_are_few() -> None:
    """At most thirty alerts wake somebody, and none of them is one that only the job's owner can
    mend.
    """
    pages = [
        alert
        for symptom in all_symptoms().values()
        for alert in symptom.entries
        if alert.severity == "critical"
    ]
    assert len(pages) <= 30
    assert [page.name for page in pages if page.audience != "operator"] == []


def test_groups_wait_longer_than_resends() -> None:
    """No group is flushed more often than Prometheus sends again what is over, every minute.

    A group that is told of each of two such alerts by itself tells of both again and again.
    """
    config = yaml_files.load(FILE)
    (ours,) = config["route"]["routes"]
    wait = {
        route["receiver"]: route.get("group_interval", ours["group_interval"])
        for route in ours["routes"]
    }
    del wait["dshealthd-watchdog"]
    assert {ours["group_interval"], *wait.values()} == {"2m", "10m"}


def test_no_secret_stands_in_the_file() -> None:
    """What is secret comes from files: no key of the configuration holds one."""
    secrets = re.compile(r"(api_url|routing_key|service_key|password|secret|credentials|token)$")

    def keys(node: object) -> list[str]:
        if isinstance(node, dict):
            return [str(key) for key in node] + [
                found for value in node.values() for found in keys(value)
            ]
        return [found for value in node for found in keys(value)] if isinstance(node, list) else []

    found = keys(yaml_files.load(FILE))
    opsgenie = "api_url"  # an address that is no secret, as Slack's would be
    assert [key for key in found if secrets.search(key)] == [opsgenie]
    assert {key for key in found if key.endswith("_file")} == {
        "routing_key_file",
        "api_key_file",
        "api_url_file",
        "credentials_file",
        "auth_password_file",
    }


def test_every_receiver_is_either_routed_to_or_an_example() -> None:
    """The receivers beside the routed ones are examples whose names say what they replace."""
    config = yaml_files.load(FILE)
    routed = {route["receiver"] for route in routes(config)}
    others = {receiver["name"] for receiver in config["receivers"]} - routed
    ours = {f"dshealthd-{name}" for name in ("page", "ticket", "job-owner", "watchdog", "none")}
    assert routed == {"others"} | ours
    assert others == {
        f"dshealthd-{kind}-{name}"
        for kind, names in (("page", "pagerduty slack opsgenie ntfy"), ("ticket", "slack mail"))
        for name in names.split()
    }


def test_pages_of_nodes_wait_for_that_of_many() -> None:
    """What happens to many nodes at once fires in two rounds of the rules; the page of the first
    of them waits until the last one and that of all together have come, and no longer.
    """
    rules = [group for file in RULES for group in yaml_files.load(file)["groups"]]
    nodes = [
        group for group in rules if re.fullmatch("dshealthd-(node|gpu|nic|path)", group["name"])
    ]
    assert len(nodes) == 4
    (waiting,) = (
        route
        for route in routes(yaml_files.load(FILE))
        if route["receiver"] == "dshealthd-page" and "leaf" in route.get("group_by", ())
    )
    later = max(
        rounds("DshealthdManyNodes", rule["record"])
        for group in rules
        for rule in group["rules"]
        if "record" in rule and "ALERTS{" in rule["expr"]
    )
    last = max(seconds(each["interval"]) for each in nodes)
    assert seconds(waiting["group_wait"]) == last + later
