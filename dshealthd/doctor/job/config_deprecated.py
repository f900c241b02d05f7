"""No key of the DeepSpeed configuration is deprecated or removed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job_sources.inspected_config import inspected_config
from dshealthd.doctor.job_sources.remedies import find_key
from dshealthd.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext

_DEPRECATED = re.compile(r"Config parameter (\S+) is deprecated(?: use (.+?) instead)?\b")


def applies(context: JobContext) -> bool:
    """Whether a configuration is given."""
    return context.config is not None


def run(context: JobContext) -> Iterator[Result]:
    """Yield keys that the installed DeepSpeed deprecates or has removed."""
    inspected = inspected_config(context)
    if isinstance(inspected, Result):
        yield inspected
        return
    name, inspection, source = inspected.config.name, inspected.inspection, inspected.source
    found = False
    for error in inspection.errors:
        if error["kind"] == "removed":
            found = True
            yield Result(
                Outcome.CRITICAL,
                printable(f"{name}: DeepSpeed aborts on {error['path']!r}: {error['text']}"),
                remedy=find_key(name, error["path"].rpartition(".")[2]),
                source=source,
                component=f"{name}: {error['path']}",
            )
    for line in inspection.warnings:
        found = True
        match = _DEPRECATED.match(line)
        key = match[1] if match else ""
        yield Result(
            Outcome.WARNING,
            printable(
                f"{name}: {key!r} is deprecated{f', use {match[2]!r}' if match[2] else ''}"
                if match
                else f"{name}: DeepSpeed warns: {line.partition(chr(10))[0][:300]}"
            ),
            remedy=find_key(name, key) if key else "",
            source=source,
            component=printable(f"{name}: {key}") if key else name,
        )
    if inspection.settings is None and not found:
        yield Result(
            Outcome.UNKNOWN,
            f"{name}: DeepSpeed refuses the configuration before reading all of it",
            source=source,
        )
    elif not found:
        yield Result(Outcome.OK, f"{name}: DeepSpeed gives no warning", source=source)


CHECK: Check[JobContext] = Check(
    "config-key", "config-deprecated", "No key of the configuration is deprecated", run
)
