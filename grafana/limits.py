"""The limits of findings and the thresholds of the alert rules, so that colors change there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dshealthd.findings import limits as findings

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = Path(__file__).parent.parent / "deploy" / "prometheus" / "thresholds.yml"
PREFIX = "dshealthd:threshold:"
_VECTOR = re.compile(r"vector\((?P<number>[^()]+)\)")


class Limits:
    """Thresholds by name."""

    def __init__(self, values: Mapping[str, float], source: str) -> None:
        """Hold values that come from the file `source`."""
        self._values, self._source = values, source

    def __getitem__(self, name: str) -> float:
        """Return a threshold; KeyError names the file that lacks it."""
        if name not in self._values:
            message = f"{self._source} has no rule {PREFIX}{name}"
            raise KeyError(message)
        return self._values[name]

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all thresholds of the alert rules."""
        return frozenset(self._values)


def read(file: Path = FILE) -> Limits:
    """Return the shipped limits of findings and the thresholds of a rule file.

    Raises ValueError, which names the rule, if one is not a plain `vector(NUMBER)`.
    """
    values: dict[str, float] = {}
    for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            match = _VECTOR.fullmatch(str(rule["expr"]).strip())
            if not rule["record"].startswith(PREFIX) or match is None:
                message = f"{file}: {rule['record']} is not a threshold of the form vector(NUMBER)"
                raise ValueError(message)
            values[rule["record"].removeprefix(PREFIX)] = float(match["number"])
    values |= findings.all_limits()
    return Limits(values, str(file))
