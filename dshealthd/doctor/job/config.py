"""The DeepSpeed configuration is a file that DeepSpeed can read, and each key one that it knows."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job.batch import UNREADABLE
from dshealthd.doctor.job.sources import deepspeed_config
from dshealthd.doctor.job.sources.deepspeed_config import TOP
from dshealthd.doctor.remedies import find_key, paste, unreadable
from dshealthd.findings.finding import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.inspection import Inspection
    from dshealthd.doctor.job.sources.source import Source

LIKENESS = 0.75
"""Share of letters in common with a known key from which that key is suggested."""
MISSPELT = 0.88
"""Likeness from which a key is taken for a misspelt one: `zero_optimisation` has 0.94."""
_COMMENTS = ("_", "//", "#", "$", "comment")
"""Beginnings of keys that people use for comments, as JSON has none; DeepSpeed has no such key."""
_DEPRECATED = re.compile(r"Config parameter (\S+) is deprecated(?: use (.+?) instead)?\b")


def _file(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    if config.value is None:
        yield unreadable(config, limit=f"{deepspeed_config.MAX_BYTES >> 10} KiB")
        return
    found = list(_form(context, config.name, config.value))
    yield from found
    if not found:
        kind = "JSON"
        if config.value["document"] is None:
            kind = "Hjson, which Hugging Face's Trainer and Accelerate cannot read"
        yield ok(f"{config.name} is well-formed {kind}", component=config.name)


def _form(context: JobContext, name: str, parsed: deepspeed_config.Parsed) -> Iterator[Result]:
    inspection = context.inspection
    is_read = parsed["document"] is not None or (inspection and inspection.document is not None)
    if not is_read:
        if inspection is not None and inspection.syntax:
            yield critical(
                f"{name} is neither JSON nor Hjson: {inspection.syntax}",
                remedy=paste("python3", "-m", "json.tool", name),
                source=f"DeepSpeed {inspection.version}",
                component=name,
            )
        else:
            yield unknown(
                f"{name} is not JSON ({parsed['syntax']}), and only DeepSpeed can tell whether it"
                f" is Hjson: {context.why_not_inspected}",
                remedy=paste("python3", "-m", "json.tool", name),
                component=name,
            )
    elif context.document is None:
        yield critical(f"{name} is not an object: it must begin with {{", component=name)
    for key in parsed["duplicates"]:
        yield critical(
            f"{name} has key {key!r} twice in one block; DeepSpeed aborts at startup",
            remedy=find_key(name, key),
            source="deepspeed/runtime/config_utils.py, dict_raise_error_on_duplicate_keys",
            component=name,
        )


FILE = check_of(
    lambda job: job.config,
    "no DeepSpeed configuration is given (--deepspeed-config)",
    "config-key",
    "config-file",
    "DeepSpeed configuration can be read",
    _file,
)


def _inspected(context: JobContext) -> Inspection | Result:
    """Return what DeepSpeed says about the configuration, or an unknown result without that."""
    if context.document is None:
        return unknown(UNREADABLE)
    if context.inspection is None or context.inspection.problem:
        return unknown(f"keys are not checked: {context.why_not_inspected}")
    return context.inspection


def _keys(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    inspection, source, name = _inspected(context), context.inspector, config.name
    if isinstance(inspection, Result):
        yield from _misspelt(name, context.document or {})
        yield inspection
        return
    found = False
    for error in inspection.errors:
        if error["kind"] == "unknown":
            found = True
            block, _, key = error["path"].rpartition(".")
            near, _ = _nearest(key, inspection.models.get(error.get("model", ""), ()))
            yield critical(
                (
                    f"{name}: {block} has no key {key!r}, so DeepSpeed aborts at "
                    f"startup{_advice(near)}"
                ),
                remedy=find_key(name, key),
                source=source,
                component=f"{name}: {error['path']}",
            )
    if inspection.unread is None:
        yield unknown(
            f"{name}: keys without effect cannot be found while DeepSpeed refuses other keys",
            source=source,
        )
        return
    for path in inspection.unread:
        block, _, key = path.rpartition(".")
        if not _is_comment(key):
            found = True
            yield _unread(name, path, inspection.looked_up.get(block, ()), source)
    if not found:
        keys = plural(len(context.document or ()), "top-level key")
        yield ok(f"{name}: no key without effect among {keys}", source=source)


def _misspelt(name: str, block: Mapping[str, Any], place: str = TOP) -> Iterator[Result]:
    """Yield keys that DeepSpeed, which was not queried, reads under another name or elsewhere."""
    known = deepspeed_config.keys()
    for key, value in block.items():
        if isinstance(value, dict) and key in known:
            yield from _misspelt(name, value, key)
        if key in known[place]:
            continue
        near, is_misspelt = _nearest(key, known[place])
        others = [other for other, keys in known.items() if key in keys and other != place]
        if is_misspelt or (others and place == TOP):
            advice = _advice(near) if is_misspelt else f"; it belongs in {others[0]}"
            yield critical(
                f"{name}: {place} has no key {key!r} that DeepSpeed reads{advice}",
                remedy=find_key(name, key),
                source=deepspeed_config.RELEASE,
                component=f"{name}: {key}",
            )


def _is_comment(key: str) -> bool:
    return key.lower().startswith(_COMMENTS)


def _unread(name: str, path: str, known: Iterable[str], source: str) -> Result:
    key = path.rpartition(".")[2]
    near, is_misspelt = _nearest(key, known)
    # A misspelt key leaves the job without the setting it wants. A key unlike any of DeepSpeed's
    # may be meant for the script that reads the same file.
    return Result(
        State.CRITICAL if is_misspelt else State.WARNING,
        f"{name}: nothing reads {path!r}, so it has no effect{_advice(near)}",
        remedy=find_key(name, key),
        source=source,
        component=f"{name}: {path}",
    )


def _advice(near: str) -> str:
    return f"; did you mean {near!r}?" if near else ""


def _nearest(key: str, known: Iterable[str]) -> tuple[str, bool]:
    """Return the known key that resembles a key, and whether the key certainly means that one.

    Empty if none resembles it, or if the key is a comment.
    """
    close = difflib.get_close_matches(key[:100], list(known), n=1, cutoff=LIKENESS)
    if not close or _is_comment(key):
        return "", False
    return close[0], difflib.SequenceMatcher(None, key[:100], close[0]).ratio() >= MISSPELT


KEYS = check_of(
    lambda job: job.config,
    UNREADABLE,
    "config-key",
    "config-keys",
    "Every key of the configuration is read",
    _keys,
)


def _deprecated(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    name, inspection, source = config.name, _inspected(context), context.inspector
    if isinstance(inspection, Result):
        yield inspection
        return
    found = False
    for error in inspection.errors:
        if error["kind"] == "removed":
            found = True
            yield critical(
                f"{name}: DeepSpeed aborts on {error['path']!r}: {error['text']}",
                remedy=find_key(name, error["path"].rpartition(".")[2]),
                source=source,
                component=f"{name}: {error['path']}",
            )
    for line in inspection.warnings:
        found = True
        match = _DEPRECATED.match(line)
        key = match[1] if match else ""
        yield warning(
            f"{name}: {key!r} is deprecated{f', use {match[2]!r}' if match[2] else ''}"
            if match
            else f"{name}: DeepSpeed warns: {line.partition(chr(10))[0][:300]}",
            remedy=find_key(name, key) if key else "",
            source=source,
            component=f"{name}: {key}" if key else name,
        )
    if inspection.settings is None and not found:
        yield unknown(
            f"{name}: DeepSpeed refuses the configuration before reading all of it", source=source
        )
    elif not found:
        yield ok(f"{name}: DeepSpeed gives no warning", source=source)


DEPRECATED = check_of(
    lambda job: job.config,
    UNREADABLE,
    "config-key",
    "config-deprecated",
    "No key of the configuration is deprecated",
    _deprecated,
)
