"""The DeepSpeed configuration is a file that DeepSpeed can read, and each key one that it knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import Result, check_of, critical, unknown, warning
from dshealthd.doctor.job.sources import deepspeed_config
from dshealthd.doctor.job.sources.deepspeed_config import TOP, Parsed
from dshealthd.doctor.job.sources.launcher_command import nearest
from dshealthd.doctor.remedies import at_key, find_key, paste, unreadable

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.source import Source

UNREADABLE = "there is no readable configuration"
_COMMENTS = ("_", "//", "#", "$", "comment")
"""Beginnings of keys that people use for comments, as JSON has none; DeepSpeed has no such key."""
_DEPRECATED = re.compile(r"Config parameter (\S+) is deprecated(?: use (.+?) instead)?\b")


def _file(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    name, parsed, inspection = config.name, config.value, context.inspection
    if parsed is None:
        yield unreadable(config)
        return
    is_read = parsed["document"] is not None or (inspection and inspection.document is not None)
    show = paste("python3", "-m", "json.tool", name)
    if not is_read and inspection is not None and inspection.syntax:
        yield critical(f"{name} is neither JSON nor Hjson: {inspection.syntax}", show)
    elif not is_read:
        yield unknown(
            f"{name} is not JSON ({parsed['syntax']}), and only DeepSpeed can tell whether it is"
            f" Hjson: {context.why_not_inspected}",
            show,
        )
    elif context.document is None:
        yield critical(f"{name} is not an object: it must begin with {{")
    for key in parsed["duplicates"]:
        yield critical(
            f"{name} has key {key!r} twice in one block; DeepSpeed aborts at startup",
            find_key(name, key),
            source="deepspeed/runtime/config_utils.py, dict_raise_error_on_duplicate_keys",
        )


FILE = check_of(
    lambda job: job.config,
    "no DeepSpeed configuration is given (--deepspeed-config)",
    "config-key",
    "config-file",
    "DeepSpeed configuration can be read",
    _file,
)


def _keys(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    name, inspection, source = config.name, context.inspection, context.inspector
    if context.document is None:
        yield unknown(UNREADABLE)
        return
    if inspection is None or inspection.problem:
        yield from _misspelt(name, context.document)
        yield unknown(f"only misspelt keys are found: {context.why_not_inspected}")
        return
    for error in inspection.errors:
        path = error["path"]
        block, _, key = path.rpartition(".")
        if error["kind"] == "unknown":
            near, _ = _nearest(key, inspection.models.get(error.get("model", ""), ()))
            text = f"{block} has no key {key!r}, so DeepSpeed aborts at startup{_advice(near)}"
            yield at_key(name, path, text, source=source)
    for line in inspection.warnings:
        if match := _DEPRECATED.match(line):
            instead = f", use {match[2]!r}" if match[2] else ""
            text = f"{match[1]!r} is deprecated{instead}"
            yield at_key(name, match[1], text, warning, source=source)
        else:
            yield warning(f"{name}: DeepSpeed warns: {line.partition(chr(10))[0][:300]}")
    if inspection.unread is None:
        if not any(error["kind"] == "unknown" for error in inspection.errors):
            yield from _misspelt(name, context.document)
        yield unknown(
            f"{name}: keys without effect cannot be found while DeepSpeed refuses other keys"
        )
    for path in inspection.unread or ():
        block, _, key = path.rpartition(".")
        if key.lower().startswith(_COMMENTS):
            continue
        near, is_misspelt = _nearest(key, inspection.looked_up.get(block, ()))
        # A misspelt key leaves the job without the setting it wants. A key unlike any of
        # DeepSpeed's may be meant for the script that reads the same file.
        make = critical if is_misspelt else warning
        text = f"nothing reads {path!r}, so it has no effect{_advice(near)}"
        yield at_key(name, path, text, make, source=source)


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
            text = f"{place} has no key {key!r} that DeepSpeed reads{advice}"
            yield at_key(name, key, text, source=deepspeed_config.RELEASE)


def _advice(near: str) -> str:
    return f"; did you mean {near!r}?" if near else ""


def _nearest(key: str, known: Iterable[str]) -> tuple[str, bool]:
    """Return what `nearest` does, for a key that is no comment."""
    return ("", False) if key.lower().startswith(_COMMENTS) else nearest(key, known)


KEYS = check_of(
    lambda job: job.config,
    UNREADABLE,
    "config-key",
    "config-keys",
    "Every key of the configuration is read, and none is deprecated",
    _keys,
)
