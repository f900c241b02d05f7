"""The manifests: built by kustomize, valid for each Kubernetes, and holding what is here."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.kubernetes import chart, rules
from deploy.training import directory
from dshealthd import __version__
from dshealthd.config import config
from dshealthd.config.config import Config
from dshealthd.evidence.options import EvidenceOptions
from dshealthd.jobs.launches import OUTPUT
from dshealthd.probe.options import ProbeOptions
from generate import files as generated
from tests import yaml_files
from tests.symptoms.promtool import promtool

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
COMPONENTS = (*chart.WHOLE, *sorted(chart.FLAGS, key=lambda name: name == "kernel-log"))
"""In the order of the README: what others change first, what replaces all rights last."""
VERSIONS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
CUSTOM = frozenset(("PodMonitor", "PrometheusRule"))
"""Of the Prometheus operator, of which there is no schema among Kubernetes' own."""
ADMISSION = frozenset(("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"))
"""Of no namespace, and in this version from Kubernetes 1.36 on."""
OVERLAYS = ((), *((name,) for name in COMPONENTS), COMPONENTS)
LARGEST = 262_144
"""Bytes of an annotation, into which `kubectl apply` writes the whole object."""

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def built(components: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Return the objects of an overlay that takes these components."""
    return tuple(chart.built(components).values())


def only(components: tuple[str, ...], kind: str, name: str = "dshealthd") -> Any:
    """Return the one object of a kind and name."""
    (found,) = (
        entry
        for entry in built(components)
        if entry["kind"] == kind and entry["metadata"]["name"] == name
    )
    return found


def pod(components: tuple[str, ...]) -> Any:
    """Return the spec of the DaemonSet's pods."""
    return only(components, "DaemonSet")["spec"]["template"]["spec"]


def agent(components: tuple[str, ...]) -> Any:
    """Return the agent's container, the first, which other objects and parts know it by."""
    container, *others = pod(components)["containers"]
    assert container["name"] == "dshealthd"
    assert [other["name"] for other in others] in ([], ["launches"])
    return container


@functools.cache
def validate(text: str, version: str) -> None:
    """Validate an object; most of an overlay are those of the others."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize("components", OVERLAYS, ids="+".join)
def test_valid(components: tuple[str, ...]) -> None:
    """Every object is one that Kubernetes 1.29 to 1.35 knows, without a field that they do not."""
    for entry in built(components):
        text = json.dumps(entry)
        assert len(text) < LARGEST, entry["metadata"]["name"]
        if entry["kind"] not in {"Namespace", *ADMISSION}:
            assert entry["metadata"]["namespace"] == "dshealthd", entry["metadata"]
        for version in VERSIONS[-2:] if entry["kind"] in ADMISSION else VERSIONS:
            if entry["kind"] not in CUSTOM:
                validate(text, version)


def test_policy_gives_the_agents_image_alone() -> None:
    """What is added to a user's pod is the image of the DaemonSet, and the archive that is in it;
    without the DaemonSet, and for a pod that is refused nothing else, nothing is added.
    """
    policy = only(("follow",), "MutatingAdmissionPolicy", "dshealthd-follow")["spec"]
    binding = only(("follow",), "MutatingAdmissionPolicyBinding", "dshealthd-follow")["spec"]
    assert policy["paramKind"] == {"apiVersion": "apps/v1", "kind": "DaemonSet"}
    assert binding["paramRef"] == {
        "name": "dshealthd",
        "namespace": "dshealthd",
        "parameterNotFoundAction": "Allow",
    }
    assert policy["failurePolicy"] == "Ignore"
    applied = policy["mutations"][0]["applyConfiguration"]["expression"]
    assert "reference: string(params.spec.template.spec.containers[0].image)" in applied
    assert f"/opt/dshealthd/usr/lib/dshealthd/training/{directory.ARCHIVE}" in applied
    assert not {"hostPath", "env"} & set(re.findall(r"\w+", str(policy["mutations"])))
    assert pod(("follow",))["containers"][0]["name"] == "dshealthd"
    values = yaml.safe_load((KUBERNETES / "chart/values.yaml").read_text())
    assert values["follow"] == {
        "enabled": False,
        "sites": policy["variables"][0]["expression"],
    }


def test_an_overlay_may_have_another_namespace(tmp_path: Path) -> None:
    """Nothing is left that names the one of the base: the policy would find no DaemonSet there, and
    silently do nothing.
    """
    places = [KUBERNETES / "base", *(KUBERNETES / "components" / name for name in COMPONENTS)]
    base, *components = (os.path.relpath(place, tmp_path.resolve()) for place in places)
    overlay = {"namespace": "gpu-health", "resources": [base], "components": components}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    command = ["kubectl", "kustomize", str(tmp_path.resolve())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    named = set(re.findall(r"^ *namespace: (\S+)$", done.stdout, re.MULTILINE))
    assert named == {"gpu-health"}


def test_components_are_all_known() -> None:
    """The chart has a value for each component, and no other."""
    assert set(COMPONENTS) == {path.name for path in (KUBERNETES / "components").iterdir()}


def test_needs_nothing_that_a_bare_cluster_lacks() -> None:
    """The base has no object of an operator; it runs on all nodes that its image is built for."""
    assert not CUSTOM & {entry["kind"] for entry in built(())}
    ((wanted,),) = (
        term["matchExpressions"]
        for term in pod(())["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
    )
    assert (wanted["key"], wanted["values"]) == ("kubernetes.io/arch", ["amd64", "arm64"])
    assert agent(())["image"] == f"ghcr.io/dshealthd/dshealthd:{__version__}"


def test_the_runtime_for_gpus_is_wanted_only_where_gpus_are() -> None:
    """Pods that name a runtime class start only on nodes that have it."""
    labels = {name: pod((name,))["nodeSelector"] for name in COMPONENTS}
    assert {name for name in COMPONENTS if pod((name,)).get("runtimeClassName")} == {"gpu-runtime"}
    assert labels.pop("gpu-runtime") == {
        "kubernetes.io/os": "linux",
        "nvidia.com/gpu.present": "true",
    }
    assert all(label == {"kubernetes.io/os": "linux"} for label in labels.values())


@pytest.mark.parametrize("components", OVERLAYS, ids="+".join)
def test_asks_nothing_of_the_api(components: tuple[str, ...]) -> None:
    """No role, no binding, no token."""
    kinds = {entry["kind"] for entry in built(components)}
    assert not {kind for kind in kinds if "Role" in kind}
    assert pod(components)["automountServiceAccountToken"] is False


def test_rights_of_the_base() -> None:
    """The base has the host's network and reads its files, and no capability."""
    security = agent(())["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not security.get("privileged")
    assert security["readOnlyRootFilesystem"]
    assert "hostPID" not in pod(())
    writable = {mount["name"] for mount in agent(())["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"state", "tmp"}


def test_may_take_as_much_memory_as_the_service() -> None:
    """The kernel kills all of a container that exceeds its limit, and evidence of a hang is bounded
    by what the systemd service may take.
    """
    unit = (ROOT / "systemd/dshealthd.service").read_text(encoding="utf-8")
    limit = re.search(r"^MemoryMax=(\d+G)$", unit, re.MULTILINE)
    assert limit is not None
    assert agent(())["resources"]["limits"] == {"memory": f"{limit[1]}i"}


def test_the_journal_needs_no_right() -> None:
    """The kernel's records come from the host's files, which the base mounts: only a text
    differs.
    """
    assert pod(("kernel-journal",)) == pod(())
    mounts = {mount["name"]: mount["mountPath"] for mount in agent(())["volumeMounts"]}
    assert config.load(KUBERNETES / "base/config/base.toml").path.rootfs == Path(mounts["root"])


def test_rights_of_the_components() -> None:
    """Each component adds what its file names, and no more."""
    contexts = {name: agent((name,))["securityContext"] for name in COMPONENTS}
    added = {
        name: context.get("capabilities", {}).get("add", []) for name, context in contexts.items()
    }
    trainings = ["DAC_READ_SEARCH", "KILL", "SETGID", "SETUID", "SYS_PTRACE"]
    on_top = {"follow", "evidence", "launches"}
    assert {name for name, given in added.items() if given} == {"trainings", *on_top}
    assert added["trainings"] == added["follow"] == added["launches"] == trainings
    assert added["evidence"] == [*trainings, "SYS_ADMIN"]
    host = {name for name in COMPONENTS if pod((name,)).get("hostPID")}
    assert host == {"trainings", *on_top}
    assert {name for name in COMPONENTS if contexts[name].get("privileged")} == {"kernel-log"}


def test_launches_are_counted_beside_the_agent() -> None:
    """By a container of the agent's image with the rights of the unit and no others, whatever the
    agent has; the agent reads one directory of it, where it looks for the file by default.
    """
    assert {name for name in COMPONENTS if len(pod((name,))["containers"]) > 1} == {"launches"}
    unit = (ROOT / "systemd/dshealthd-launches.service").read_text(encoding="utf-8")
    lines = re.findall("^CapabilityBoundingSet=(.*)", unit, re.MULTILINE)
    rights = sorted(name.removeprefix("CAP_") for line in lines for name in line.split())
    for components in (("launches",), COMPONENTS):
        first, second = pod(components)["containers"]
        assert second["image"] == first["image"]
        assert second["securityContext"] == {
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "capabilities": {"drop": ["ALL"], "add": rights},
        }
        (mount,) = second["volumeMounts"]
        assert {**mount, "readOnly": True} in first["volumeMounts"]
        assert second["args"] == ["launches", f"--output={OUTPUT}"]
        assert Path(OUTPUT).parent == Path(mount["mountPath"])
        (volume,) = (one for one in pod(components)["volumes"] if one["name"] == mount["name"])
        assert volume["emptyDir"]["medium"] == "Memory"


def configured(components: tuple[str, ...], directory: Path, host: str = "10.1.2.3") -> Config:
    """Return the configuration that the init container of a node with this address joins."""
    source = next(v for v in pod(components)["volumes"] if v["name"] == "config-parts")
    parts = only(components, "ConfigMap", source["configMap"]["name"])["data"]
    (directory / "config").mkdir()
    for name, text in parts.items():
        (directory / "config" / name).write_text(text, encoding="utf-8")
    (init,) = pod(components)["initContainers"]
    script = init["args"][0].replace("/config/", f"{directory}/config/")
    script = script.replace("/etc/dshealthd", str(directory)).replace(
        "exec dshealthd", ": dshealthd"
    )
    environment = {"HOST_IP": host, "PATH": os.environ["PATH"]}
    subprocess.run(["/bin/sh", "-ec", script], check=True, env=environment)
    return config.load(directory / "dshealthd.toml")


@pytest.mark.parametrize("components", OVERLAYS, ids="+".join)
def test_configuration(components: tuple[str, ...], tmp_path: Path) -> None:
    """The parts, joined as the init container joins them, are a configuration without mistakes."""
    loaded = configured(components, tmp_path)
    kernel_log = loaded.collectors["kernel_log"]
    sources = {"kernel-journal", "kernel-log"} & set(components)
    assert kernel_log.enabled is bool(sources)
    # its own option
    assert kernel_log.journal is (sources == {"kernel-journal"})  # type: ignore[attr-defined]
    assert loaded.section(EvidenceOptions).enabled is bool(
        {"trainings", "follow", "evidence", "launches"} & set(components)
    )
    if "probes" in components:
        assert loaded.section(ProbeOptions).peer.listen_address == "10.1.2.3:10062"


def test_configuration_of_a_node_with_an_ipv6_address(tmp_path: Path) -> None:
    """Before a port it is in brackets; without them the init container would refuse it."""
    loaded = configured(("probes",), tmp_path, "fd00::5")
    assert loaded.section(ProbeOptions).peer.listen_address == "[fd00::5]:10062"


def test_every_mount_has_its_volume() -> None:
    """With all components at once, and the web's certificate beside its configuration."""
    volumes = {volume["name"]: volume for volume in pod(COMPONENTS)["volumes"]}
    mounts = {mount["name"] for mount in agent(COMPONENTS)["volumeMounts"]}
    assert mounts <= volumes.keys()
    names = {
        entry["metadata"]["name"] for entry in built(COMPONENTS) if entry["kind"] == "ConfigMap"
    }
    web = next(
        s["configMap"]["name"] for s in volumes["web"]["projected"]["sources"] if "configMap" in s
    )
    assert web in names


def test_members_are_the_agents() -> None:
    """The headless service selects the DaemonSet's pods and is the name that the members have."""
    service = only(("probes",), "Service", "dshealthd-peers")
    labels = only(("probes",), "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None"
    part = (KUBERNETES / "components" / "probes" / "probes.toml").read_text(encoding="utf-8")
    # Of the pod's own namespace, whatever its name is.
    assert f'dns = "{service["metadata"]["name"]}"' in part
    assert only(("probes",), "DaemonSet")["spec"]["template"]["spec"]["dnsPolicy"] == (
        "ClusterFirstWithHostNet"
    )


def test_probes_ask_over_the_agents_own_scheme() -> None:
    """The kubelet and Prometheus speak HTTPS where the agent does, and else HTTP."""
    for components, scheme in ((chart.WHOLE, None), ((*chart.WHOLE, "tls"), "HTTPS")):
        container = agent(components)
        for probe in ("livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"].get("scheme") == scheme
        (endpoint,) = only(components, "PodMonitor")["spec"]["podMetricsEndpoints"]
        assert endpoint.get("scheme") == (scheme and scheme.lower())


def test_agents_are_known_as_elsewhere() -> None:
    """A PodMonitor gives the agents the label by which the rules know them, as the scrape job
    does.
    """
    part = yaml_files.load(rules.SOURCE / "dshealthd.yml")
    label = part["scrape_configs"][-1]["relabel_configs"][0]
    for components in (chart.WHOLE, (*chart.WHOLE, "probes")):
        (endpoint,) = only(components, "PodMonitor")["spec"]["podMetricsEndpoints"]
        made = {entry.get("targetLabel"): entry for entry in endpoint["relabelings"]}
        # A finding goes on under its name when its pod is replaced.
        assert made.pop(None) == {"action": "labeldrop", "regex": "pod|container"}
        assert made[label["target_label"]]["replacement"] == label["replacement"]
        # Pages name nodes as Kubernetes does, and the rules know which address is whose.
        assert made["node"]["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]
    assert made["member"]["sourceLabels"] == ["__meta_kubernetes_pod_host_ip"]


FILLED_IN = {
    "fieldRef": {"apiVersion"},
    "resourceFieldRef": {"divisor"},
    "relabelings": {"action"},
}
"""Fields that the API server fills in below what server-side apply compares as a whole: structures
of the API that are `atomic`, and lists of a custom resource. What we leave out there differs from
what the server has, and a second owner of the same manifest conflicts with the first.
"""


def parts_of(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each map within an object, by the key that it, or its list, stands at."""
    if isinstance(value, dict):
        yield key, value
        for name, entry in value.items():
            yield from parts_of(entry, name)
    elif isinstance(value, list):
        for entry in value:
            yield from parts_of(entry, key)


@pytest.mark.parametrize("components", OVERLAYS, ids="+".join)
def test_second_owner_does_not_conflict(components: tuple[str, ...]) -> None:
    """What the API server would fill in is written where it compares maps as a whole."""
    for entry in chart.built(components).values():
        for key, part in parts_of(entry):
            assert FILLED_IN.get(key, set()) <= part.keys(), (entry["kind"], key)


def test_mistake_is_shown_by_describe() -> None:
    """A container that ends shows the end of its log as its message."""
    pod = only((), "DaemonSet")["spec"]["template"]["spec"]
    assert {
        container["terminationMessagePolicy"]
        for container in (*pod["initContainers"], *pod["containers"])
    } == {"FallbackToLogsOnError"}


def test_rules_are_ours(tmp_path: Path) -> None:
    """Each PrometheusRule holds one rule file, which promtool accepts as kustomize wrote it."""
    assert generated.main("deploy.kubernetes.rules", rules.documents, ["--check"]) == 0
    for name in rules.FILES:
        made = only(chart.WHOLE, "PrometheusRule", f"dshealthd-{name.removesuffix('.yml')}")["spec"]
        source = yaml_files.load(rules.SOURCE / name)
        assert made == source
        (tmp_path / name).write_text(yaml.safe_dump(made), encoding="utf-8")
    if shutil.which("promtool"):
        promtool("check", "rules", *(tmp_path / name for name in rules.FILES))


def test_dashboards_are_ours() -> None:
    """Each dashboard is in a ConfigMap that Grafana's sidecar looks for."""
    directory = ROOT / "grafana" / "dashboards"
    found: dict[str, str] = {}
    for entry in built(chart.WHOLE):
        if entry["kind"] == "ConfigMap" and "dashboard" in entry["metadata"]["name"]:
            assert entry["metadata"]["labels"]["grafana_dashboard"] == "1"
            found |= entry["data"]
    assert found == {
        path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.json")
    }
