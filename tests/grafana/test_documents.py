"""The checked-in dashboards are those that the code makes, Grafana's model accepts them, and they
follow the rules of dashboard-linter.

The rules are those of https://github.com/grafana/dashboard-linter, but for one: dashboards are
editable, so that a panel's query can be tried. `node` is in the place of `instance`, as the alert
rules have it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dshealthd.collectors import gpu
from dshealthd.symptoms import all_symptoms
from generate.alert_rules import RUNBOOKS
from grafana import gpus, limits
from grafana.__main__ import main
from tests import yaml_files
from tests.grafana.documents import FILES, documents, panels, queries, substituted, variables
from tests.grafana.vocabulary import TARGET_LABELS, labels_of, records
from tests.symptoms.expression import selectors

RULE_LABELS = {
    *("alertname", "alertstate", "severity", "symptom", "kind", "part", "peer", "reason"),
    *("model", "software", "environment", "backend", "op", "size"),
    *("training_job", "rank", "role", "class", "gpu", "domain", "clique"),
}
"""Of alerts, and of what the shipped rules record."""


def test_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` passes on what is checked in, and names a file that differs, one that is missing
    and one that nothing makes.
    """
    assert main(["--check"]) == 0
    for file in FILES[1:]:
        (tmp_path / file.name).write_text(
            file.read_text(encoding="utf-8").replace("Which", "Who"), encoding="utf-8"
        )
    (tmp_path / "dshealthd-old.json").write_text("{}", encoding="utf-8")
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    assert main([str(tmp_path), "--check"]) == 1
    named = capsys.readouterr().err
    assert FILES[0].name in named
    assert "dshealthd-old.json" in named
    assert "other.json" not in named
    assert main([str(tmp_path)]) == 0
    assert {
        file.name: file.read_text(encoding="utf-8") for file in tmp_path.glob("dshealthd-*")
    } == {file.name: file.read_text(encoding="utf-8") for file in FILES}


def test_thresholds_and_runbooks_are_the_users(tmp_path: Path) -> None:
    """Another file of thresholds changes colors, and another place of the runbooks the links."""
    text = limits.FILE.read_text(encoding="utf-8")
    changed = re.sub(
        r"(record: dshealthd:threshold:fleet_score_ratio\n\s+expr: )vector\(\S+\)",
        r"\1vector(0.715)",
        text,
    )
    assert changed != text
    (tmp_path / "thresholds.yml").write_text(changed, encoding="utf-8")
    flags = ["--thresholds", str(tmp_path / "thresholds.yml")]
    flags += ["--runbooks", "https://wiki.example/runbooks/"]
    assert main([str(tmp_path / "new"), *flags]) == 0
    node = (tmp_path / "new" / "dshealthd-node.json").read_text(encoding="utf-8")
    assert '"value": 0.715' in node
    assert "https://wiki.example/runbooks/${__data.fields.symptom}.md" in node
    assert RUNBOOKS not in node


def test_a_threshold_that_is_missing_or_computed_is_named(tmp_path: Path) -> None:
    """What a dashboard needs and the file lacks is a KeyError with both names, a threshold that is
    no number a ValueError.
    """
    file = tmp_path / "thresholds.yml"
    file.write_text(
        "groups: [{name: a, rules: [{record: 'dshealthd:threshold:x', expr: vector(3e8)}]}]",
        encoding="utf-8",
    )
    assert limits.read(file)["x"] == 3e8
    with pytest.raises(KeyError, match=r"thresholds\.yml has no rule dshealthd:threshold:y"):
        limits.read(file)["y"]
    file.write_text(
        "groups: [{name: a, rules: [{record: 'dshealthd:threshold:x', expr: scalar(up)}]}]",
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match="dshealthd:threshold:x is not a threshold"):
        limits.read(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_round_trip(file: Path) -> None:
    """Grafana's model, loaded from a file and written back, is the file.

    No key is misspelt, none has a value of a wrong kind.

    Left out is the place of links and annotations, which the SDK always writes and never reads.
    """
    register_default_plugins()
    document = json.loads(file.read_text(encoding="utf-8"))
    again = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: bare(entry)
                for key, entry in value.items()
                if (key, entry) != ("placement", "inControlsMenu")
            }
        return [bare(entry) for entry in value] if isinstance(value, list) else value

    assert bare(again) == document


MOST_OPEN = 30
"""Panels that a browser queries at once when a dashboard is opened."""


@pytest.mark.parametrize("uid", documents())
def test_few_panels_are_open(uid: str) -> None:
    """What is not looked at first is in closed rows, which are queried only once they are
    opened.
    """
    assert sum(panel["type"] != "row" for panel in documents()[uid]["panels"]) <= MOST_OPEN


@pytest.mark.parametrize("uid", documents())
def test_variables(uid: str) -> None:
    """The data source is a variable, clusters may be several and may be all, and no variable has a
    fixed data source.
    """
    listed = {variable["name"]: variable for variable in documents()[uid]["templating"]["list"]}
    assert list(listed)[:2] == ["datasource", "cluster"]
    assert (listed["datasource"]["type"], listed["datasource"]["query"]) == (
        "datasource",
        "prometheus",
    )
    assert listed["cluster"]["allValue"] == ".*", "series without such a label count too"
    for name, variable in listed.items():
        assert variable.get("label"), name
        if name != "datasource":
            assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert variable["refresh"] == 2, "nodes come and go"
        if name in {"cluster", "gpu"}:
            assert variable["multi"]
            assert variable["includeAll"]


@pytest.mark.parametrize("uid", documents())
def test_identity(uid: str) -> None:
    """A dashboard has a stable uid and the tag by which others link to it.

    Its panels can be opened and their queries tried; what is provisioned is not overwritten by
    that. Panels have ids and titles of their own, and do not overlap.
    """
    document = documents()[uid]
    assert uid.startswith("dshealthd-")
    assert document["editable"] is True
    assert document["tags"] == document["links"][0]["tags"] == ["dshealthd"]
    every = [entry for panel in document["panels"] for entry in (panel, *panel.get("panels", []))]
    assert max(Counter(panel["id"] for panel in every).values()) == 1
    assert max(Counter(panel["title"] for panel in panels(document)).values()) == 1
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & taken, panel["title"]
        assert position["x"] + position["w"] <= 24, panel["title"]
        taken |= cells


@pytest.mark.parametrize("uid", documents())
def test_panels(uid: str) -> None:
    """A panel has a description, the variable data source, a unit, queries of their own names, and
    says so where nothing is known.
    """
    for panel in panels(documents()[uid]):
        assert panel["description"].endswith("."), panel["title"]
        assert len(panel["description"]) > 20
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        assert max(Counter(target["refId"] for target in panel["targets"]).values()) == 1
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] != "table":
            assert defaults["unit"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["instant"] is not target["range"]
            assert target["instant"] is (panel["type"] in {"stat", "table"})
            assert target["format"] == ("table" if panel["type"] == "table" else "time_series")
            if panel["type"] in {"timeseries", "state-timeline"}:
                assert target["legendFormat"] not in {"", "__auto"}
        if panel["type"] in {"stat", "table"} and panel["title"] != "Nodes by severity":
            assert defaults.get("noValue") is not None, f"{uid}: an empty number is not 0"
        if panel["type"] == "stat":
            assert panel["options"]["reduceOptions"]["calcs"] == ["lastNotNull"]


def test_a_node_without_an_answer_is_not_well() -> None:
    """Of a node whose agent is down nothing is known: that it has no GPUs or no faults would be."""
    said = {
        panel["fieldConfig"]["defaults"]["noValue"]
        for panel in panels(documents()["dshealthd-node"])
        if panel["type"] in {"stat", "table"}
    }
    assert said == {"unknown", "none known"}


@pytest.mark.parametrize("uid", documents())
def test_queries(uid: str) -> None:
    """A query parses; rates are taken over Grafana's own interval. Its selectors choose cluster,
    agents and node, whatever the scrape job is called; all names exist. Labels by which it groups
    or joins are those of a metric in it, of its targets, of alerts, or made by the query itself.
    """
    declared, recorded = labels_of(), records()
    for query in (query for query in queries() if query.board == uid):
        expr = substituted(query.expr, variables())
        fixed = r"\b(?:rate|irate)\([^()]*\[(?!\$__rate_interval)"
        assert not re.search(fixed, query.expr), f"{query.place}: rate over a fixed window"
        known = TARGET_LABELS | set(re.findall(r'"(\w+)"', expr))
        for name, matched, _ in selectors(expr):
            known |= declared.get(name, RULE_LABELS)
            assert "cluster" in matched, query.place
            if name in recorded:
                allowed = {"cluster", "node", "peer", "training_job"}
            elif name.startswith("ALERTS"):
                allowed = RULE_LABELS | {"cluster", "node"}
            else:
                assert "exporter" in matched, query.place
                allowed = declared[name] | TARGET_LABELS - {"job"}
            assert matched <= allowed, f"{query.place}: {name} has no label {matched - allowed}"
            if uid == "dshealthd-node":
                assert matched & {"node", "peer"}, f"{query.place}: {name} is of all nodes"
        for group in re.findall(r"\b(?:by|on|ignoring) \(([^()]*)\)", expr):
            names = {name.strip() for name in group.split(",")} - {""}
            assert names <= known, f"{query.place}: {names - known}"
        for group in re.findall(r"\bon \(([^()]+)\)", expr):
            # Two clusters may have the same addresses and names.
            of_nodes = re.search(r"\b(?:instance|node)\b", group)
            assert not of_nodes or "cluster" in group, f"{query.place}: joins on ({group})"


def test_what_is_normal_has_no_color() -> None:
    """A training that is well fills its GPUs' memory and reaches their power limit, ports may have
    no cable, and a temperature is high or not by the GPU's own limit: nothing of that looks like a
    fault. What the driver demands for a GPU has its text.
    """
    boards = {
        uid: {panel["title"]: panel for panel in panels(documents()[uid])} for uid in documents()
    }
    node = boards["dshealthd-node"]
    colored = {
        override["matcher"]["options"]
        for override in node["GPUs"]["fieldConfig"]["overrides"]
        for entry in override["properties"]
        if entry["id"] == "thresholds"
    }
    assert colored == {"Throttles", "ECC", "Remap pending", "Remap failed"}
    for uid, title in (
        ("dshealthd-node", "Memory in use"),
        ("dshealthd-node", "Ports not up"),
        ("dshealthd-probes", "Ports not up"),
    ):
        steps = boards[uid][title]["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        assert len(steps) <= 1, title
    asked = [query.expr for query in queries() if "dshealthd_gpu_throttle_active" in query.expr]
    assert asked
    assert all("sw_power_cap" in expr for expr in asked)
    demanded = [int(number) for number in re.findall(r"\d", gpu.RECOVERY.help)]
    assert list(gpus.ACTIONS) == demanded == list(range(8))


def test_links() -> None:
    """Links lead to dashboards that exist, with the variables that these have, and to runbooks.
    Two clusters may have nodes and jobs of one name: a link leads to those of its own cluster.
    """
    text = {file.stem: file.read_text(encoding="utf-8") for file in FILES}
    boards = documents()
    for source, body in text.items():
        for target in set(re.findall(r'"url": "/d/([\w-]+)/', body)):
            assert target in boards, f"{source} links to {target}"
    assert '"/d/dshealthd-node/' in text["dshealthd-fleet"]
    assert '"/d/dshealthd-node/' in text["dshealthd-probes"]
    assert '"/d/dshealthd-jobs/' in text["dshealthd-fleet"]
    for body in text.values():
        for target, query in re.findall(r'"url": "/d/([\w-]+)/[^?]*\?([^"]*)"', body):
            names = {variable["name"] for variable in boards[target]["templating"]["list"]}
            assert (
                set(re.findall(r"var-(\w+)=", query))
                | set(re.findall(r"\$\{(\w+):queryparam\}", query))
                <= names
            )
            assert re.search(r"var-cluster=\$\{__(?:data\.fields|field\.labels)\.cluster\}", query)
    for board in ("dshealthd-fleet", "dshealthd-jobs", "dshealthd-node"):
        assert f"{RUNBOOKS}/${{__data.fields.symptom}}.md" in text[board]
    assert all_symptoms(), "the runbooks are the symptoms' files"


def test_alerts_of_no_cluster_are_shown_with_each() -> None:
    """Where nothing is scraped any more, or rules fail, the alert has no cluster: with one
    selected, the fleet would look as if nothing fired.
    """
    asked = {query.panel: query for query in queries() if query.board == "dshealthd-fleet"}
    for panel in ("Firing alerts", "Firing alerts by rule", "annotation"):
        expr = substituted(asked[panel].expr, variables(cluster="a"))
        assert set(re.findall(r'ALERTS{cluster=~?"(\w*)"', expr)) == {"a", ""}, panel


def test_what_is_linked_has_its_cluster() -> None:
    """Each line, square or row that leads to a node or a job comes with the label of its cluster;
    tables show it.
    """
    found = 0
    for uid, document in documents().items():
        for panel in panels(document):
            if not re.search(r"__(?:data\.fields|field\.labels)\.cluster", json.dumps(panel)):
                continue
            found += 1
            for target in panel["targets"]:
                if panel["type"] == "table" or "{{node}}" in target["legendFormat"]:
                    assert re.search(r"\bby \([^()]*\bcluster\b", target["expr"]), (
                        uid,
                        panel["title"],
                    )
            if panel["type"] == "table":
                shown = {step["id"]: step["options"] for step in panel["transformations"]}
                assert "cluster" in shown["filterFieldsByName"]["include"]["names"]
                assert shown["organize"]["renameByName"]["cluster"] == "Cluster"
    assert found > 10


@pytest.mark.parametrize("uid", documents())
def test_annotations(uid: str) -> None:
    """Alerts are drawn into graphs, one line a rule; pages are shown unasked, and all of jobs."""
    entries = {entry["name"]: entry for entry in documents()[uid]["annotations"]["list"]}
    shown = {name: entry["enable"] for name, entry in entries.items()}
    of_jobs = uid == "dshealthd-jobs"
    assert shown == ({"Alerts": True} if of_jobs else {"Pages": True, "Tickets": False})
    assert all(
        entry["expr"].startswith("count by (alertname, symptom) (ALERTS{")
        for entry in entries.values()
    )
    assert all(
        ('node="$node"' in entry["expr"]) is (uid == "dshealthd-node") for entry in entries.values()
    )


def test_provisioning() -> None:
    """Grafana's provisioning files parse, name the data source type, and are for files that nobody
    edits in the browser.
    """
    folder = FILES[0].parent.parent / "provisioning"
    source = yaml_files.load(folder / "datasources" / "dshealthd.yml")
    assert source["apiVersion"] == 1
    assert [entry["type"] for entry in source["datasources"]] == ["prometheus"]
    shipped = yaml_files.load(limits.FILE.parent / "dshealthd.yml")
    jobs = {job["job_name"]: job for job in shipped["scrape_configs"]}
    interval = source["datasources"][0]["jsonData"]["timeInterval"]
    assert interval == jobs["dshealthd"]["scrape_interval"]
    (provider,) = yaml.safe_load(
        (folder / "dashboards" / "dshealthd.yml").read_text(encoding="utf-8")
    )["providers"]
    assert provider["allowUiUpdates"] is False
    assert provider["options"]["path"].endswith("/grafana/dashboards")
