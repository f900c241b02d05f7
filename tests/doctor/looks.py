"""One look of chosen collectors at this machine, for checks that are run in the test itself."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import Any

from dshealthd.config.config import Config, load
from dshealthd.core.host import Host
from dshealthd.doctor.check import Check, Result
from dshealthd.doctor.node import CHECKS
from dshealthd.doctor.node_context import NodeContext
from dshealthd.doctor.snapshot_check import SnapshotCheck
from dshealthd.doctor.status_document import collect


def look(
    *collectors: str, host: Host | None = None, several: bool = False, config: Config | None = None
) -> NodeContext:
    """Return the context of the node as these collectors see it; without any, nothing is read."""
    loaded = config or load(None)
    options = {
        name: dataclasses.replace(one, enabled=name in collectors)
        for name, one in loaded.collectors.items()
    }
    path = loaded.path
    if host is not None:
        path = dataclasses.replace(path, **dataclasses.asdict(host))
    loaded = dataclasses.replace(loaded, collectors=options, path=path)
    document = collect(loaded) if collectors else {}
    return NodeContext(loaded, document, several=several)


def named(name: str) -> SnapshotCheck:
    """Return a check that shows findings, by its name."""
    (found,) = (one for one in CHECKS if one.name == name)
    assert isinstance(found, SnapshotCheck)
    return found


def results(check: Check[Any], context: NodeContext) -> list[Result]:
    """Return what a check yields."""
    return list(check.run(context))


def outcomes(check: Check[Any], context: NodeContext) -> list[str]:
    """Return how bad each of its results is."""
    return [result.outcome.value for result in check.run(context)]


def apply(result: Result) -> str:
    """Run a remedy as it is printed, without sudo, in a shell; return what it prints."""
    assert result.remedy
    command = result.remedy.replace("sudo ", "")
    return subprocess.run(
        ["sh", "-euc", command], check=True, capture_output=True, timeout=60, text=True
    ).stdout
