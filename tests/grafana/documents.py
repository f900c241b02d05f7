"""The checked-in dashboards as the tests read them.

Their panels, and their queries as Grafana would send them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from grafana.__main__ import DIRECTORY

FILES = sorted(DIRECTORY.glob("*.json"))


class Query(NamedTuple):
    """One query of a panel."""

    board: str
    panel: str
    ref: str
    expr: str
    instant: bool

    @property
    def place(self) -> str:
        """Return where it stands, for messages."""
        return f"{self.board} / {self.panel} / {self.ref}"


def documents() -> dict[str, dict[str, Any]]:
    """Return the dashboards by their uid."""
    found = (json.loads(file.read_text(encoding="utf-8")) for file in FILES)
    return {document["uid"]: document for document in found}


def panels(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every panel of a dashboard that is no row, those of closed rows too."""
    for panel in document["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def queries() -> list[Query]:
    """Return every query of every panel, and those of annotations."""
    found = []
    for uid, document in documents().items():
        for panel in panels(document):
            found += [
                Query(uid, panel["title"], target["refId"], target["expr"], target["instant"])
                for target in panel["targets"]
            ]
        found += [
            Query(uid, "annotation", entry["name"], entry["expr"], False)  # noqa: FBT003 - a field
            for entry in document["annotations"]["list"]
        ]
    return found


def substituted(expr: str, values: Mapping[str, str]) -> str:
    """Return an expression with Grafana's variables and macros replaced. KeyError if one is
    left.
    """
    for name in sorted(values, key=len, reverse=True):
        expr = expr.replace(f"${name}", values[name])
    if left := re.search(r"\$[A-Za-z_{]\w*", expr):  # $1 is a label_replace's own
        raise KeyError(left[0])
    return expr


def variables(**values: str) -> dict[str, str]:
    """Return what Grafana replaces in the first look at a dashboard, with everything chosen.
    `values` are other choices.
    """
    macros = {"__rate_interval": "2m", "__range": "10m", "__interval": "15s"}
    return {
        **macros,
        "cluster": ".*",
        "node": ".+",
        "gpu": ".+",
        "training": ".+",
        **values,
    }
