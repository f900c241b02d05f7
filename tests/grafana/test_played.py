"""What queries of the dashboards return for series over time, played by promtool."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.grafana.documents import queries, substituted, variables
from tests.symptoms.promtool import asking, promtool

TARGET = 'cluster="a",exporter="dshealthd",instance="a:1",node="a"'
OTHER = 'cluster="b",exporter="dshealthd",instance="b:1",node="b"'
RULES = {'ALERTS{alertname="DshealthdWatchdog",alertstate="firing"}': "1x40"}


def play(
    directory: Path,
    panel: tuple[str, str],
    series: dict[str, str],
    expected: dict[str, float],
    *,
    ref: str = "A",
    at: str = "40m",
    **chosen: str,
) -> None:
    """Require that a query of a panel returns these series, of samples a minute apart."""
    asked = {query[:3]: query.expr for query in queries()}[f"dshealthd-{panel[0]}", panel[1], ref]
    rows = [{"series": name, "values": text} for name, text in series.items()]
    case = asking(substituted(asked, variables(__range="20m", **chosen)), at, rows, expected)
    file = directory / "test.yml"
    file.write_text(yaml.safe_dump({"tests": [case]}), encoding="utf-8")
    promtool("test", "rules", file)


def test_the_first_event_of_a_device_is_counted(tmp_path: Path) -> None:
    """A count of the kernel log begins with its first event, of which `increase` knows nothing;
    what a log had before it was read is not of the time shown.
    """
    events = f'dshealthd_kernel_events_total{{{TARGET},event="io_error",device="%s"}}'
    read = f'dshealthd_collector_up{{{TARGET},collector="kernel_log"}}'
    first, older = (f'{{event="io_error",device="{name}"}}' for name in ("sda", "sdb"))
    series = {events % "sda": "_x30 1x10", events % "sdb": "3x35 5x5", read: "1x40"}
    ask = ("node", "Kernel log")
    play(tmp_path, ask, series, {first: 1, older: 2}, ref="B", node="a")
    series = {events % "sda": "_x25 4x15", read: "_x25 1x15"}
    play(tmp_path, ask, series, {first: 0}, ref="B", node="a")


def test_the_first_failed_round_is_counted(tmp_path: Path) -> None:
    """A node with a single round that hung has one in the matrix, and is among the worst."""
    rounds = f'dshealthd_probe_rounds_total{{{TARGET},kind="pair",outcome="%s"}}'
    series = {rounds % "hung": "_x30 1x10", f"dshealthd_probe_up{{{TARGET}}}": "1x40"}
    expected = {'{cluster="a",node="a",outcome="hung"}': 1.0}
    play(tmp_path, ("fleet", "Rounds by outcome"), series, expected)


def test_a_link_error_from_before_the_agent_answered_is_none(tmp_path: Path) -> None:
    """The errors of a node that was not read at the beginning of the time shown may be older; those
    of one that was are new.
    """
    errors = 'dshealthd_nvlink_errors_total{%s,gpu="0",uuid="u",link="7",type="replay"}'
    read = 'dshealthd_collector_up{%s,collector="nvlink"}'
    series = {
        errors % TARGET: "_x25 9x15",
        read % TARGET: "_x25 1x15",
        errors % OTHER: "_x25 2x15",
        read % OTHER: "1x40",
    }
    expected = {'{cluster="b",node="b",gpu="0",link="7",type="replay"}': 2.0}
    play(tmp_path, ("probes", "NVLinks with most errors"), series, expected)


def test_suspects_are_unknown_without_rules(tmp_path: Path) -> None:
    """Rules say whom the probes suspect: without them nobody is known to be well."""
    probing = {f"dshealthd_probe_up{{{TARGET}}}": "1x40"}
    play(tmp_path, ("fleet", "Suspects"), probing, {})
    play(tmp_path, ("fleet", "Suspects"), probing | RULES, {"{}": 0})
    play(tmp_path, ("fleet", "Suspects"), RULES, {})


def test_clusters_have_member_lists_of_their_own(tmp_path: Path) -> None:
    """Two clusters are two lists, and no node of them declines another's rounds."""
    lists = {f"dshealthd_members_hash{{{target}}}": f"{hash}x40" for target, hash in (
        (TARGET, 11), (OTHER, 22),
    )}  # fmt: skip
    play(tmp_path, ("probes", "Member lists"), lists, {"{}": 1})
    second = TARGET.replace('"a', '"c').replace('cluster="c"', 'cluster="a"')
    lists[f"dshealthd_members_hash{{{second}}}"] = "33x40"
    play(tmp_path, ("probes", "Member lists"), lists, {"{}": 2})


def test_a_job_that_resumes_from_a_checkpoint_is_not_fast(tmp_path: Path) -> None:
    """Its steps go back, which is no reset of a counter."""
    step = f'dshealthd_job_step{{{TARGET},training_job="run-1",rank="0"}}'
    job = '{cluster="a",training_job="run-1"}'
    ask = ("jobs", "Steps per minute")
    series = {step: "9000+6x30 8000+6x9"}
    play(tmp_path, ask, series, {job: 6}, at="30m", __rate_interval="4m")
    play(tmp_path, ask, series, {job: 0}, at="32m", __rate_interval="4m")
    play(tmp_path, ask, series, {job: 6}, at="39m", __rate_interval="4m")


def test_an_agent_in_two_scrape_jobs_is_one_node(tmp_path: Path) -> None:
    """The number of nodes is not that of targets."""
    up = {f'up{{{TARGET},job="{job}"}}': "1x40" for job in ("verdicts", "details")}
    play(tmp_path, ("fleet", "Nodes"), up, {"{}": 1})
    play(tmp_path, ("fleet", "Not answering"), up, {"{}": 0})
