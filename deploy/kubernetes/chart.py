"""The Helm chart, made from the Kustomize base and its components: `./dev chart`.

`kubectl kustomize` builds the objects with each component alone. What a component adds, takes away
or changes stands in the chart's templates under a condition on the value of its name. So the
chart's objects are written nowhere else; `chart/` holds what Kustomize does not know: the values,
and the templates of files that are taken word for word.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from deploy.kubernetes import rules
from dshealthd import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    Views = dict[str | None, Any]
    Place = tuple[str | int, ...]

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
SOURCE = HERE / "chart"
DASHBOARDS = PROJECT / "grafana" / "dashboards"
FLAGS = {
    "gpu-runtime": "gpuRuntime",
    "kernel-journal": "kernelJournal",
    "kernel-log": "kernelLog",
    "probes": "probes",
    "trainings": "trainings",
    "follow": "follow",
    "launches": "launches",
    "evidence": "evidence",
    "tls": "tls",
}
"""The value that switches each component on. A component follows those that it includes, and where
two set the same value, the later one counts.
"""
WHOLE = ("prometheus-operator", "dashboards")
"""Components that only add objects, which others change: they are in all that is compared."""
MISSING = object()
HASHED = re.compile(r"(dshealthd(?:-web)?)-[bcdfghkmt2456789]{10}")
"""A ConfigMap's name with the hash of its content, by which Kustomize rolls pods out."""
IDENTITIES = ("name", "targetLabel", "port", "key", "operator")
MOUNTS = ("spec", "template", "spec", "containers", 0, "volumeMounts")
PLACES: dict[tuple[str, str], dict[Place, str]] = {
    ("DaemonSet", "dshealthd"): {
        ("spec", "updateStrategy"): "updateStrategy",
        ("spec", "template", "spec", "imagePullSecrets"): "imagePullSecrets",
        ("spec", "template", "spec", "priorityClassName"): "priorityClassName",
        ("spec", "template", "spec", "tolerations"): "tolerations",
        ("spec", "template", "spec", "affinity"): "affinity",
        ("spec", "template", "spec", "nodeSelector", "*"): "nodeSelector",
        ("spec", "template", "spec", "containers", 0, "resources"): "resources",
        (*MOUNTS, 3, "mountPropagation"): "mountPropagation",
    },
    ("PodMonitor", "dshealthd"): {("metadata", "labels", "*"): "prometheusOperator.labels"},
    ("ConfigMap", "dshealthd"): {("data", "*"): "config"},
    ("MutatingAdmissionPolicy", "dshealthd-follow"): {
        ("spec", "variables", 0, "expression"): "follow.sites",
    },
}
"""Which value of the chart stands at a place in an object; at `*`, its entries beside those
there."""
IMAGE = (
    r'\1image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"'
)
PULLED = r"\1imagePullPolicy: {{ .Values.image.pullPolicy }}"
CONFIG = ("ConfigMap", "dshealthd")
CONFIG_NAME = 'dshealthd-{{ include "dshealthd.config" . | sha256sum | trunc 10 }}'
"""As Kustomize has it, a new configuration has a new name: pods of the new template cannot come up
on the old one, whoever else has changed that.
"""
CONFIG_VOLUME = re.compile(r"(configMap:\n *name: )dshealthd(?=\n)")
NAMED = '{{{{- define "dshealthd.config" }}}}\n{}{{{{- end }}}}\n'
DATA = 'data:\n{{- include "dshealthd.config" . }}\n'


def main(arguments: list[str] | None = None) -> int:
    """Write the chart's archive and print where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.kubernetes.chart", description="Make the Helm chart."
    )
    parser.add_argument("--output", type=Path, default=PROJECT / "dist")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"dshealthd-{__version__}.tgz"
    target.write_bytes(archive(contents()))
    print(target)
    return 0


def contents() -> dict[str, bytes]:
    """Return the chart's files by their path below the chart's folder."""
    files = {
        str(path.relative_to(SOURCE)): path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file()
    }
    files["Chart.yaml"] = files["Chart.yaml"].replace(b": 0.0.0", f": {__version__}".encode())
    for name in rules.FILES:
        files[f"rules/{name}"] = (rules.SOURCE / name).read_bytes()
    for path in DASHBOARDS.glob("*.json"):
        files[f"dashboards/{path.name}"] = path.read_bytes()
    files |= {
        f"templates/{name}.yaml": text.encode() for name, text in templates() if text is not None
    }
    files["LICENSE"] = (PROJECT / "LICENSE").read_bytes()
    return files


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return the files as Helm packs them; the same files give the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in sorted(files.items(), key=lambda item: (item[0] != "Chart.yaml", item)):
            entry = tarfile.TarInfo(f"dshealthd/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0)


@functools.cache
def built(components: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """Return the objects of the base with these components, by kind and name without its hash."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        directory = Path(name).resolve()
        overlay = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(HERE / "base", directory)],
            "components": [
                os.path.relpath(HERE / "components" / component, directory)
                for component in components
            ],
        }
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
        done = subprocess.run(  # noqa: S603 - a fixed program
            ["kubectl", "kustomize", str(directory)],  # noqa: S607 - from the PATH, as elsewhere
            check=True,
            capture_output=True,
            text=True,
        )
    objects = yaml.safe_load_all(HASHED.sub(r"\1", done.stdout))
    return {(entry["kind"], entry["metadata"]["name"]): entry for entry in objects}


def templates() -> Iterator[tuple[str, str]]:
    """Yield each template that is made, by its name."""
    bare = built(())
    views: dict[str | None, Any] = {None: built(WHOLE)}
    views |= {flag: built((*WHOLE, component)) for component, flag in FLAGS.items()}
    for key in dict.fromkeys(key for view in views.values() for key in view):
        kind, name = key
        if kind in {"Namespace", "PrometheusRule"} or "dashboard" in name:
            continue  # Helm's own affair, and what is taken word for word
        seen = {flag: view[key] for flag, view in views.items() if key in view}
        lines = list(mapping(seen, 0, (), PLACES.get(key, {})))
        condition = None
        if None not in seen:
            condition = any_of(seen)
        elif key not in bare:
            condition = ".Values.prometheusOperator.enabled"
        text = "\n".join(wrapped(condition, lines)) + "\n"
        text = text.replace("namespace: dshealthd", "namespace: {{ .Release.Namespace }}")
        text = re.sub(r"( *)image: ghcr\.io/.*", f"{IMAGE}\n{PULLED}", text)
        if key == CONFIG:
            data, rest = text.split("kind: ", 1)
            version, data = data.split("data:\n", 1)
            rest = rest.replace("\n  name: dshealthd\n", f"\n  name: {CONFIG_NAME}\n")
            text = f"{NAMED.format(data)}{version}{DATA}kind: {rest}"
        text = CONFIG_VOLUME.sub(rf"\1{CONFIG_NAME}", text)
        yield f"{kind.lower()}-{name}", text


def any_of(flags: Iterable[str | None]) -> str:
    """Return the condition of the Helm chart that one of these parts is enabled."""
    terms = [f".Values.{flag}.enabled" for flag in flags]
    return terms[0] if len(terms) == 1 else f"(or {' '.join(terms)})"


def wrapped(condition: str | None, lines: list[str]) -> list[str]:
    """Return lines of a template under a condition."""
    if condition is None:
        return lines
    if condition.startswith("("):
        condition = condition[1:-1]
    return [f"{{{{- if {condition} }}}}", *lines, "{{- end }}"]


def mapping(views: Views, indent: int, path: Place, places: Mapping[Place, str]) -> Iterator[str]:
    """Yield the lines of a map, where views of it differ by what is enabled."""
    space = " " * indent
    ours = [place[-1] for place in places if place[:-1] == path]
    for key in dict.fromkeys([*(key for view in views.values() for key in view), *ours]):
        here = (*path, key)
        if here in places:
            yield f"{{{{- with .Values.{places[here]} }}}}"
            if key != "*":
                yield f"{space}{key}:"
            yield f"{space}{{{{- toYaml . | nindent {indent + 2 * (key != '*')} }}}}"
            yield "{{- end }}"
            continue
        seen = {flag: view.get(key, MISSING) for flag, view in views.items()}
        for condition, alike in alternatives(seen):
            yield from wrapped(condition, list(entry(key, alike, indent, here, places)))


def alternatives(seen: Views) -> Iterator[tuple[str | None, Views]]:
    """Yield the views of one place that can be written together, under their condition.

    Maps and lists are compared further in; other values stand beside each other.
    """
    some = next(view for view in seen.values() if view is not MISSING)
    deep = isinstance(some, (dict, list))
    # What only some parts have: the others change what the first of them has.
    usual = seen.get(None, some)
    others = {
        flag: view
        for flag, view in seen.items()
        if flag is not None
        and ((view is MISSING) != (usual is MISSING) or (not deep and view != usual))
    }
    if usual is not MISSING:
        kept = {flag: view for flag, view in seen.items() if flag not in others}
        yield (f"not {any_of(others)}" if others else None), {None: usual, **kept}
    alike: dict[str, Views] = {}
    for flag, view in others.items():
        if view is not MISSING:
            alike.setdefault("" if deep else repr(view), {None: view})[flag] = view
    variants = [(any_of(flag for flag in views if flag), views) for views in alike.values()]
    for number, (condition, views) in enumerate(variants, start=1):
        later = " ".join(f"(not {other})" for other, _ in variants[number:])
        yield (f"and {condition} {later}" if later else condition), views


def entry(
    key: str, views: Views, indent: int, path: Place, places: Mapping[Place, str]
) -> Iterator[str]:
    """Yield the lines of one key of the chart and its value."""
    space = " " * indent
    value = views[None]
    if isinstance(value, dict) and value:
        yield f"{space}{key}:"
        yield from mapping(views, indent + 2, path, places)
    elif isinstance(value, list) and value:
        yield f"{space}{key}:"
        yield from sequence(views, indent, path, places)
    else:
        yield from scalar({key: value}, indent)


def sequence(views: Views, indent: int, path: Place, places: Mapping[Place, str]) -> Iterator[str]:
    """Yield the lines of a list, whose items are known by their name or value."""
    space = " " * indent
    named = {flag: {identity(item): item for item in view} for flag, view in views.items()}
    for number, name in enumerate(dict.fromkeys(name for view in named.values() for name in view)):
        seen = {flag: view.get(name, MISSING) for flag, view in named.items()}
        for condition, alike in alternatives(seen):
            item = alike[None]
            if isinstance(item, dict):
                first, *rest = mapping(alike, indent + 2, (*path, number), places)
                lines = [f"{space}- {first.strip()}", *rest]
            else:
                lines = scalar([item], indent)
            yield from wrapped(condition, lines)


def identity(item: Any) -> Any:
    """Return what tells an item of a list from its siblings."""
    if not isinstance(item, dict):
        return item
    return next(((key, item[key]) for key in IDENTITIES if key in item), yaml.safe_dump(item))


def scalar(value: Any, indent: int) -> list[str]:
    """Return the lines of a key or an item whose value is compared no further."""
    text = yaml.dump(value, Dumper=Blocks, width=2**31)
    return [" " * indent + line if line else "" for line in text.rstrip("\n").split("\n")]


class Blocks(yaml.SafeDumper):
    """YAML with text of several lines as blocks."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return a text as the chart's YAML has it, as a block where it has lines."""
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


Blocks.add_representer(str, Blocks.represent_str)

if __name__ == "__main__":
    sys.exit(main())
