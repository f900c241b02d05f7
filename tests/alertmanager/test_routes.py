"""The shipped Alertmanager configuration is valid, and tells whom it says it tells.

Asked of amtool.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from dshealthd.symptoms import all_symptoms
from tests.lab.servers import ALERTMANAGER

FILE = ALERTMANAGER / "alertmanager.yml"


def amtool(*arguments: str) -> str:
    """Return what amtool prints; its complaint is in the error."""
    done = subprocess.run(
        ["amtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_is_valid() -> None:
    """`amtool check-config` finds nothing wrong, and finds the templates."""
    said = amtool("check-config", str(FILE))
    assert "SUCCESS" in said
    assert "1 templates" in said


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("severity=critical symptom=gpu-lost node=node-17 gpu=3", "page"),
        ("severity=warning symptom=time-wait node=node-17", "ticket"),
        ("severity=warning symptom=loss-nan audience=owner exported_job=slurm-7", "job-owner"),
        ("severity=info symptom=nccl-environment audience=owner", "nobody"),
        ("severity=critical symptom=training-hang exported_job=slurm-7", "page"),
        ("severity=info symptom=node-drift", "nobody"),
        ("severity=warning symptom=maintenance node=node-17", "nobody"),
        ("severity=none symptom=watchdog", "watchdog"),
        ("severity=critical symptom=watchdog", "watchdog"),
        ("severity=warning symptom=watchdog", "watchdog"),
        ("alertname=SomebodyElses", "ticket"),
        ("severity=disaster symptom=gpu-lost", "ticket"),
    ],
)
def test_who_is_told(labels: str, receiver: str) -> None:
    """Severity decides who is told, the Watchdog has a receiver of its own, and an alert of no
    known severity is not lost.
    """
    amtool(
        "config",
        "routes",
        "test",
        f"--config.file={FILE}",
        f"--verify.receivers={receiver}",
        *labels.split(),
    )


def test_every_symptom_that_is_named_exists() -> None:
    """Routes and inhibition speak of symptoms that there are.

    One that is renamed would be silently left out.
    """
    named = re.findall(r'symptom(?:=|!=|=~|!~)"([^"]*)"', FILE.read_text(encoding="utf-8"))
    assert len(named) > 10
    assert {slug for text in named for slug in text.split("|")} - set(all_symptoms()) == set()


def test_every_severity_has_its_receiver() -> None:
    """No alert has a severity beside those that routes speak of, and the Watchdog's."""
    found = {alert.severity for symptom in all_symptoms().values() for alert in symptom.alerts}
    assert found == {"critical", "warning", "info", "none"}
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
        for alert in symptom.alerts
        if alert.severity == "critical"
    ]
    assert len(pages) <= 30
    assert [alert.name for alert in pages if alert.audience != "operator"] == []


def test_groups_wait_longer_than_resends() -> None:
    """No group is flushed more often than Prometheus sends again what is over, every minute.

    A group that is told of each of two such alerts by itself tells of both again and again.
    """
    config = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    routes = [route for route in config["route"]["routes"] if route["receiver"] != "watchdog"]
    intervals = [route.get("group_interval", "10m") for route in (config["route"], *routes)]
    assert set(intervals) <= {"2m", "10m"}


def test_no_secret_stands_in_the_file() -> None:
    """What is secret comes from files: no key of the configuration holds one."""
    secrets = re.compile(r"(api_url|routing_key|service_key|password|secret|credentials|token)$")

    def keys(node: object) -> list[str]:
        if isinstance(node, dict):
            return [str(key) for key in node] + [
                found for value in node.values() for found in keys(value)
            ]
        return [found for value in node for found in keys(value)] if isinstance(node, list) else []

    found = keys(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    assert [key for key in found if secrets.search(key)] == []
    assert {key for key in found if key.endswith("_file")} == {
        "routing_key_file",
        "api_url_file",
        "auth_password_file",
    }


def test_every_receiver_is_either_routed_to_or_an_example() -> None:
    """The receivers beside the routed ones are examples whose names say what they replace."""
    config = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    routed = {
        config["route"]["receiver"],
        *(route["receiver"] for route in config["route"]["routes"]),
    }
    others = {receiver["name"] for receiver in config["receivers"]} - routed
    assert routed == {"page", "ticket", "job-owner", "watchdog", "nobody"}
    assert others == {"page-pagerduty", "page-slack", "ticket-slack", "ticket-mail"}
