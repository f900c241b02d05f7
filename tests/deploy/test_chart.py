"""The Helm chart, rendered by Helm's own library: what Kustomize builds, object by object."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.kubernetes import chart
from tests.deploy.machine import LONGEST

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

HELM = Path(__file__).parents[2] / "build" / "helm" / "bin" / "python"
SCRIPT = """
import json, sys
import helm_python
chart = helm_python.Chart.load(sys.argv[1])
answers = []
for values in json.load(sys.stdin):
    try:
        answers.append(chart.render(values, name="x", namespace=sys.argv[2]))
    except helm_python.HelmError as error:
        answers.append(str(error))
json.dump(answers, sys.stdout)
"""
VALUES = {**chart.FLAGS, "prometheus-operator": "prometheusOperator", "dashboards": "dashboards"}
ALL = (*chart.WHOLE, *sorted(chart.FLAGS, key=lambda name: name == "kernel-log"))
SETS = [(), ALL, *itertools.combinations(ALL, 1), *itertools.combinations(ALL, 2)]
"""None, all, each, and each pair of the components."""
CONFIG_NAME = re.compile(r"dshealthd-[0-9a-f]{10}")
LARGEST = 1_048_576
"""Bytes of a Secret, in which Helm keeps the chart and what it rendered."""


def rendered(path: Path, *values: dict[str, Any], namespace: str = "dshealthd") -> list[Any]:
    """Return what Helm makes of each set of values: objects by kind and name, or its error."""
    if not HELM.exists() or shutil.which("kubectl") is None:
        pytest.skip("`./dev test-deploy` installs Helm's library; kubectl must be there")
    done = subprocess.run(
        [HELM, "-c", SCRIPT, path, namespace],
        input=json.dumps(values),
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [
        answer
        if isinstance(answer, str)
        else {
            (entry["kind"], entry["metadata"]["name"]): entry
            for name, text in answer.items()
            if not name.endswith("NOTES.txt")
            for entry in yaml.safe_load_all(text)
            if entry is not None
        }
        for answer in json.loads(done.stdout)
    ]


def configuration(objects: dict[tuple[str, str], Any]) -> str:
    """Return the name of the configuration that the pods mount, which is that of the only one."""
    (name,) = (
        name for kind, name in objects if kind == "ConfigMap" and CONFIG_NAME.fullmatch(name)
    )
    volumes = objects["DaemonSet", "dshealthd"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "config-parts", "configMap": {"name": name}} in volumes
    return name


def unhashed(objects: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Return objects with the configuration under the name without its hash."""
    name = configuration(objects)
    text = json.dumps(list(objects.values())).replace(name, "dshealthd")
    return {(entry["kind"], entry["metadata"]["name"]): entry for entry in json.loads(text)}


def enabled(components: tuple[str, ...]) -> dict[str, Any]:
    """Return the values that switch components on."""
    return {VALUES[name]: {"enabled": True} for name in components}


def unordered(value: Any, key: str = "") -> Any:
    """Return an object with those lists sorted whose order Kubernetes does not read."""
    if isinstance(value, dict):
        return {name: unordered(entry, name) for name, entry in value.items()}
    if key in {"ports", "volumeMounts", "volumes"}:
        return sorted(value, key=str)
    return [unordered(entry) for entry in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart, as `./dev chart` packs it."""
    directory = tmp_path_factory.mktemp("chart")
    assert chart.main(["--output", str(directory)]) == 0
    (path,) = directory.iterdir()
    return path


def test_is_what_kustomize_builds(packed: Path) -> None:
    """For each set of components, each object is equal, but for how a new configuration rolls
    out.
    """
    for components, objects in zip(SETS, rendered(packed, *map(enabled, SETS)), strict=True):
        assert isinstance(objects, dict), objects
        objects = unhashed(objects)  # noqa: PLW2901 - as Kustomize's are compared
        wanted = {k: v for k, v in chart.built(components).items() if k[0] != "Namespace"}
        template = objects["DaemonSet", "dshealthd"]["spec"]["template"]
        for container in (*template["spec"]["containers"], *template["spec"]["initContainers"]):
            assert container.pop("imagePullPolicy") == "IfNotPresent"
        assert objects.keys() == wanted.keys(), components
        for key, entry in objects.items():
            if "tls" in components and key == ("PrometheusRule", "dshealthd-alerts"):
                # Kustomize cannot change a part of a text: the README says how to make the rules.
                text = json.dumps(entry).replace('"runbook_url": "https:', '"runbook_url": "http:')
                assert json.loads(text) == wanted[key]
                continue
            assert unordered(entry) == unordered(wanted[key]), (components, key)
            if not entry["apiVersion"].startswith("monitoring"):
                kubernetes_validate.validate(entry, "1.37", strict=True)


def test_takes_the_namespace_of_its_release(packed: Path) -> None:
    """No object, and no name that members are found by, is in a namespace written down; those of no
    namespace have none.
    """
    (objects,) = rendered(packed, enabled(ALL), namespace="elsewhere")
    spaces = {entry["metadata"].get("namespace") for entry in objects.values()}
    assert spaces == {"elsewhere", None}
    assert {
        kind for (kind, _), entry in objects.items() if "namespace" not in entry["metadata"]
    } == {
        "MutatingAdmissionPolicy",
        "MutatingAdmissionPolicyBinding",
    }
    parts = unhashed(objects)["ConfigMap", "dshealthd"]["data"]
    assert 'dns = "dshealthd-peers"' in parts["probes.toml"]
    assert ".dshealthd.svc" not in json.dumps(list(objects.values()))


def test_takes_what_a_site_sets(packed: Path) -> None:
    """Image, labels for the operator, a part of the configuration, nodes and limits."""
    plain, objects = rendered(
        packed,
        {},
        {
            "image": {"repository": "registry.example/d", "tag": "9", "pullPolicy": "Always"},
            "imagePullSecrets": [{"name": "pull"}],
            "prometheusOperator": {"enabled": True, "labels": {"release": "prom"}},
            "config": {"site.toml": "[findings.limits]\ngpus = 8\n"},
            "nodeSelector": {"pool": "a"},
            "tolerations": [],
            "resources": {"limits": {"memory": "1Gi"}},
        },
    )
    daemon = objects["DaemonSet", "dshealthd"]["spec"]["template"]
    pod = daemon["spec"]
    for container in (*pod["containers"], *pod["initContainers"]):
        assert (container["image"], container["imagePullPolicy"]) == (
            "registry.example/d:9",
            "Always",
        )
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "a"}
    assert "tolerations" not in pod
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
    parts = unhashed(objects)["ConfigMap", "dshealthd"]["data"]
    assert parts["site.toml"].endswith("gpus = 8\n")
    assert configuration(plain) != configuration(objects)
    custom = [e for (kind, _), e in objects.items() if kind in {"PodMonitor", "PrometheusRule"}]
    assert len(custom) == 4
    assert all(entry["metadata"]["labels"]["release"] == "prom" for entry in custom)


def test_mount_propagation(packed: Path) -> None:
    """Where `/` of the host is no shared mount, no pod would start with it."""
    usual, private = rendered(packed, {}, {"mountPropagation": "None"})
    for objects, value in ((usual, "HostToContainer"), (private, "None")):
        (container,) = objects["DaemonSet", "dshealthd"]["spec"]["template"]["spec"]["containers"]
        mounts = {
            mount["name"]: mount.get("mountPropagation") for mount in container["volumeMounts"]
        }
        assert mounts.pop("root") == value
        assert set(mounts.values()) == {None}


def test_runbooks_have_the_scheme_of_the_agents(packed: Path) -> None:
    """With TLS, what an alert links to is HTTPS."""
    for components, scheme in ((chart.WHOLE, "http"), ((*chart.WHOLE, "tls"), "https")):
        (objects,) = rendered(packed, enabled(components))
        groups = objects["PrometheusRule", "dshealthd-alerts"]["spec"]["groups"]
        links = {
            rule["annotations"]["runbook_url"].split(":")[0]
            for group in groups
            for rule in group["rules"]
        }
        assert links == {scheme}


@pytest.mark.parametrize(("values", "error"), [
    ({"probes": {"enabled": "true"}}, "/probes/enabled"),
    ({"probe": {"enabled": True}}, "probe"),
    ({"config": {"probes.toml": ""}}, "probes.toml"),
    ({"config": {"site.yaml": ""}}, "site.yaml"),
    ({"mountPropagation": "Bidirectional"}, "mountPropagation"),
    ({"nodeSelector": {"kubernetes.io/os": "windows"}}, "kubernetes.io/os"),
])  # fmt: skip
def test_refuses_wrong_values(packed: Path, values: dict[str, Any], error: str) -> None:
    """The schema names the value that is wrong."""
    (answer,) = rendered(packed, values)
    assert isinstance(answer, str)
    assert error in answer


def test_fits_into_a_secret(packed: Path) -> None:
    """Chart and objects, packed as Helm keeps a release, leave room: base64 of gzip."""
    (objects,) = rendered(packed, enabled(ALL))
    size = packed.stat().st_size + len(
        subprocess.run(
            ["gzip"],
            input=json.dumps(list(objects.values())).encode(),
            check=True,
            capture_output=True,
        ).stdout
    )
    assert size * 4 / 3 < LARGEST / 2


def test_same_bytes(packed: Path, tmp_path: Path) -> None:
    """The same commit gives the same archive."""
    chart.main(["--output", str(tmp_path)])
    assert (tmp_path / packed.name).read_bytes() == packed.read_bytes()
