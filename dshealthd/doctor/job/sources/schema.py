"""The types of Kubernetes' objects: which fields each has, and of what kind their values are."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.doctor.job.sources.launcher_command import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.doctor.job.sources.fields import ManifestFields

SOURCE = "kubernetes.io/docs/reference/kubernetes-api; CRDs of the controllers"
_ROOT = {"apiVersion": "text", "kind": "text", "metadata": "ObjectMeta", "status": "any"}
_OF_RIGHTS = "rbac.authorization.k8s.io"
"""The group of objects whose names may have any characters but / and % (path segments)."""
_NUMBERED = {"int": int, "bool": bool}


class Node(NamedTuple):
    """A mapping of an object, whose type is known."""

    type: str
    path: str
    """Where it stands; empty for the object."""
    fields: ManifestFields
    root: str = ""
    """The type of the object, or of the part of it whose types are known."""


@functools.cache
def _types() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the types of objects by kind, and by type its fields, each with the kind of its
    value.
    """
    text = resources.files(__package__).joinpath("kubernetes_fields.toml").read_text("utf-8")
    data = tomllib.loads(text)
    kinds = data.pop("kinds")
    types = {
        name: {field: kind for kind, fields in table.items() for field in fields.split()}
        for name, table in data.items()
    }
    for spec in kinds.values():
        types[f"{spec} object"] = {**_ROOT, "spec": spec}
    return kinds, types


@functools.cache
def _below(root: str) -> frozenset[str]:
    """Return the types of the mappings in one of a type, at any depth."""
    _, types = _types()
    found, new = set[str](), {root} & types.keys()
    while new:
        below = {kind.rpartition(" ")[2] for one in new for kind in types[one].values()}
        found |= (new := (below & types.keys()) - found)
    return frozenset(found)


def nodes(whole: ManifestFields) -> Iterator[Node]:
    """Yield the mappings of an object whose types are known, the object itself first."""
    kinds, _ = _types()
    group, slash, _ = (whole.text("apiVersion") or "batch/v1").rpartition("/")
    spec = kinds.get(f"{group}{slash or '/'}{whole.text('kind')}")
    if group == _OF_RIGHTS:
        return
    if spec:
        yield from _known(Node(f"{spec} object", "", whole, f"{spec} object"))
    else:
        yield Node("object", "", whole)
        yield from _pods(whole, "")


def _pods(whole: ManifestFields, path: str) -> Iterator[Node]:
    """Yield the templates of pods in an object of another kind."""
    for key, one in whole.below():
        at = f"{path}.{key}".lstrip(".")
        if one.each("containers"):
            found = _known(Node("PodSpec", at, one, "PodSpec"))
            if not at.lower().endswith("template.spec"):
                next(found)  # which may have more fields, as that of KServe's predictors
            yield from found
        else:
            if key == "metadata" and {"name", "labels", "annotations"} & one.value.keys():
                yield Node("ObjectMeta", at, one)
            yield from _pods(one, at)


def _known(node: Node) -> Iterator[Node]:
    yield node
    _, types = _types()
    for key, kind in types[node.type].items():
        form, _, name = kind.rpartition(" ")
        if name not in types or key not in node.fields:
            continue
        path = f"{node.path}.{key}".lstrip(".")
        found = {"list": node.fields.each(key), "": [node.fields.at(key)]}.get(form)
        if found is None:  # a mapping of them
            found = [one for _, one in node.fields.at(key).below()]
        for one in found:
            own = f"[{one.text('name')}]" if form == "list" and "name" in one else ""
            yield from _known(Node(name, path + own, one, node.root))


def misfits(node: Node) -> Iterator[str]:
    """Yield the fields of a mapping that its type does not have, but another has or that resemble
    one; and values of another kind.
    """
    _, types = _types()
    fields = types.get(node.type, {})
    for key, value in node.fields.value.items():
        if key not in fields and fields:
            near, is_near = nearest(key, fields)
            # a field of other objects may be one that is newer than the table
            others = sorted(name for name in _below(node.root) if key in types[name])
            if is_near:
                yield f"there is no field {key}: did you mean {near}?"
            elif others:
                yield f"there is no field {key} here: it is one of {' and '.join(others[:3])}"
        elif wrong := _unlike(fields.get(key, "any"), value):
            yield f"{key} is {wrong}"


def _unlike(kind: str, value: Any) -> str:
    """Return what a value is, and must be; empty where it is right, or a template's."""
    form, shown = kind.partition(" ")[0], str(value)[:60]
    if value is None or (isinstance(value, str) and ("{{" in value or "$" in value)):
        return ""
    if "|" in form:
        is_one = value in ("", *form.split("|"))
        return "" if is_one else f"{shown}, none of {form.replace('|', ', ')}"
    if form in _NUMBERED:
        is_right = isinstance(value, _NUMBERED[form]) and (form != "int" or value is not True)
        said = "a whole number" if form == "int" else "true or false"
        quoted = ": without quotes" * isinstance(value, str)
        return "" if is_right else f"{shown!r}, not {said}{quoted}"
    if form == "text":
        return "" if isinstance(value, str) else f"{shown}, not a string: quote it"
    if form in {"words", "list"}:
        if not isinstance(value, list):
            return f"{shown!r}, not a list"
        odd = [one for one in value if form == "words" and not isinstance(one, str)]
        return f"a list with {str(odd[0])[:40]}, which is no string: quote it" if odd else ""
    if form != "any" and not isinstance(value, dict):
        return f"{shown!r}, not a mapping"
    return _odd(value) if form == "texts" else ""


def _odd(value: Mapping[str, Any]) -> str:
    for name, text in value.items():
        if not isinstance(text, str | None):
            return f"a mapping with {name} {text}, which is no string: quote it"
    return ""
