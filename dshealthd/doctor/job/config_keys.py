"""Every key of the DeepSpeed configuration is one that the installed DeepSpeed reads."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job_sources.inspected_config import inspected_config
from dshealthd.doctor.job_sources.remedies import edit, find_key
from dshealthd.plural import plural
from dshealthd.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dshealthd.doctor.job_context import JobContext
    from dshealthd.doctor.job_sources.inspection import Inspection

LIKENESS = 0.75
"""Share of letters that a misspelt key has in common with the right one: `zero_optimisation`."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
"""A key without characters that are special to sed."""
GUIDES = {
    "communication_backend": "use init_distributed(timeout=...) or DEEPSPEED_TIMEOUT in minutes",
    "communication": "use communication_data_type or zero_quantized_gradients",
    "timeout": "use init_distributed(timeout=...) or DEEPSPEED_TIMEOUT in minutes",
    "checkpointing": "use checkpoint or activation_checkpointing",
    "logging": "use log_level",
}
"""Keys that troubleshooting guides recommend but no release reads; see the runbook."""


def applies(context: JobContext) -> bool:
    """Whether a configuration is given."""
    return context.config is not None


def run(context: JobContext) -> Iterator[Result]:
    """Yield keys of the configuration that nothing reads, and keys on which DeepSpeed aborts."""
    config = inspected_config(context)
    if isinstance(config, Result):
        yield config
        return
    name, document, inspection, source = config
    found = 0
    for error in inspection.errors:
        if error["kind"] == "unknown":
            found += 1
            yield _refused(name, error, inspection, source)
    if inspection.unread is None:
        yield Result(
            Outcome.UNKNOWN,
            f"{name}: keys without effect cannot be found while DeepSpeed refuses other keys",
            source=source,
        )
        return
    for path in inspection.unread:
        found += 1
        yield _unread(name, path, inspection, source)
    if not found:
        keys = len(document)
        yield Result(
            Outcome.OK, f"{name}: {keys} of {plural(keys, 'top-level key')} read", source=source
        )


def _refused(name: str, error: Mapping[str, str], inspection: Inspection, source: str) -> Result:
    block, _, key = error["path"].rpartition(".")
    near = _nearest(key, inspection.models.get(error.get("model", ""), ()))
    return Result(
        Outcome.CRITICAL,
        printable(
            f"{name}: {block} has no key {key!r}, so DeepSpeed aborts at startup"
            f"{f'; did you mean {near!r}?' if near else ''}"
        ),
        remedy=_rename(key, near, name),
        source=source,
        component=printable(f"{name}: {error['path']}"),
    )


def _unread(name: str, path: str, inspection: Inspection, source: str) -> Result:
    block, _, key = path.rpartition(".")
    near = _nearest(key, inspection.looked_up.get(block, ()))
    if not block and key in GUIDES:
        near, advice = "", f"; {GUIDES[key]}"
    else:
        advice = f"; did you mean {near!r}?" if near else ""
    # A misspelt key leaves the job without the setting it wants. A key unlike any of DeepSpeed's
    # may be meant for the script that reads the same file.
    outcome = Outcome.CRITICAL if near else Outcome.WARNING
    return Result(
        outcome,
        printable(f"{name}: nothing reads {path!r}, so it has no effect{advice}"),
        remedy=_rename(key, near, name),
        source=source,
        component=printable(f"{name}: {path}"),
    )


def _rename(key: str, near: str, name: str) -> str:
    if not near or not _PLAIN.fullmatch(key):
        return find_key(name, key)
    return edit(name, f's/"{key}"/"{near}"/')


def _nearest(key: str, known: Iterable[str]) -> str:
    """Return the known configuration key most similar to a key; empty if none is close."""
    close = difflib.get_close_matches(key[:100], list(known), n=1, cutoff=LIKENESS)
    return close[0] if close else ""


CHECK: Check[JobContext] = Check(
    "config-key", "config-keys", "Every key of the configuration is read", run
)
