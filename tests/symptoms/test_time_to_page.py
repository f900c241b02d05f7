"""How long a verdict of a node takes to the page, by the intervals that are shipped."""

from __future__ import annotations

import re
from pathlib import Path

from dshealthd.config import registry
from dshealthd.core.options import Duration
from dshealthd.jobs.hangs.silence import FLOOR
from dshealthd.jobs.options import HangOptions
from tests import yaml_files

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GROUPS = [
    group
    for name in ("recording.yml", "alerts.yml")
    for group in yaml_files.load(PROMETHEUS / name)["groups"]
]
RULES = {
    rule.get("record") or rule["alert"]: (group, rule)
    for group in GROUPS
    for rule in group["rules"]
}
MOST = 30.0
"""Seconds from the limit of a hang with a known pace to its page."""


def rounds(last: str, first: str, seen: frozenset[str] = frozenset()) -> float:
    """Return the most seconds from what the rule `first` reads to the rule `last`: a round of each
    rule between them on the longest way; below 0 if there is none. Rules may remember each other.
    """
    group, rule = RULES[last]
    own = Duration.parse(group["interval"])
    if last == first:
        return own
    seen |= {last}
    read = (set(re.findall(r"dshealthd:[a-z_:]+", rule["expr"])) & RULES.keys()) - seen
    most = max((rounds(name, first, seen) for name in read), default=-1.0)
    return own + most if most > 0 else -1.0


def scrape() -> float:
    """Return the interval between two scrapes of an agent."""
    (agents,) = (
        job
        for job in yaml_files.load(PROMETHEUS / "dshealthd.yml")["scrape_configs"]
        if job["job_name"] == "dshealthd"
    )
    return Duration.parse(agents["scrape_interval"])


def wait() -> float:
    """Return how long Alertmanager waits with the pages of jobs."""
    (ours,) = yaml_files.load(DEPLOY / "alertmanager/dshealthd.yml")["route"]["routes"]
    (pages,) = (route for route in ours["routes"] if route["receiver"] == "dshealthd-page")
    return Duration.parse(pages["group_wait"])


def test_a_hang_is_a_page_within_half_a_minute() -> None:
    """Of its limit: two checks of the node, a scrape, a round of each rule, and the waits."""
    hold = Duration.parse(RULES["DshealthdJobHang"][1]["for"])
    way = rounds("DshealthdJobHang", "dshealthd:job:hang")
    checks = 2 * HangOptions().interval
    total = checks + scrape() + way + hold + wait()
    print(f"checks {checks}, scrape {scrape()}, rules {way}, for {hold}: {total} at most")
    assert total <= MOST


def test_the_cause_is_there_before_the_page() -> None:
    """A GPU that is lost is the cause of a hang before that can be a page, so that a second one
    never follows under another name; a page of its own covers the job before.
    """
    hold = Duration.parse(RULES["DshealthdJobHang"][1]["for"])
    earliest = FLOOR + HangOptions().interval + hold
    collectors = registry.all_collectors()
    collected = max(collectors[name].Options().interval for name in ("gpu", "kernel_log"))
    known = collected + scrape() + rounds("dshealthd:job:hang_evidence", "dshealthd:gpu:broken")
    assert known <= earliest
