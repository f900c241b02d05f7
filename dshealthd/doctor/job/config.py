"""The DeepSpeed configuration is a file that DeepSpeed can read, and each key one that it knows."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.core.text import plural, printable
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job.sources import deepspeed_config
from dshealthd.doctor.job.sources.remedies import find_key, paste, rename_key, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.inspection import Inspection
    from dshealthd.doctor.job.sources.source import Source


def applies(context: JobContext) -> bool:
    """Whether a configuration file is given."""
    return context.config is not None


def run(context: JobContext) -> Iterator[Result]:
    """Yield what is wrong with the syntax of the configuration file."""
    config = context.config
    if config is None:
        yield Result(Outcome.UNKNOWN, "no DeepSpeed configuration is given (--deepspeed-config)")
        return
    if config.value is None:
        text = f"{config.name}: {config.problem}" if config.hung else config.problem
        yield Result(
            Outcome.UNKNOWN if config.hung else Outcome.CRITICAL,
            printable(text),
            component=config.name,
            remedy=show(config.name),
            limit=f"{deepspeed_config.MAX_BYTES >> 10} KiB, {deepspeed_config.MAX_DEPTH} levels",
        )
        return
    found = list(_form(context, config.name, config.value))
    yield from found
    if not found:
        kind = "JSON"
        if config.value["document"] is None:
            kind = "Hjson, which Hugging Face's Trainer and Accelerate cannot read"
        yield Result(Outcome.OK, f"{config.name} is well-formed {kind}", component=config.name)


def _form(context: JobContext, name: str, parsed: deepspeed_config.Parsed) -> Iterator[Result]:
    inspection = context.inspection
    if parsed["document"] is None:
        if inspection is not None and inspection.document is None and inspection.syntax:
            yield Result(
                Outcome.CRITICAL,
                printable(f"{name} is neither JSON nor Hjson: {inspection.syntax}"),
                remedy=paste("python3", "-m", "json.tool", name),
                source=f"DeepSpeed {inspection.version}",
                component=name,
            )
        elif inspection is None or inspection.document is None:
            yield Result(
                Outcome.UNKNOWN,
                f"{name} is not JSON ({parsed['syntax']}), and only DeepSpeed can tell whether it"
                f" is Hjson: {printable(context.why_not_inspected)}",
                remedy=paste("python3", "-m", "json.tool", name),
                component=name,
            )
    if context.document is None and (parsed["document"] is not None or _is_read(inspection)):
        yield Result(
            Outcome.CRITICAL, f"{name} is not an object: it must begin with {{", component=name
        )
    for key in parsed["duplicates"]:
        yield Result(
            Outcome.CRITICAL,
            printable(f"{name} has key {key!r} twice in one block; DeepSpeed aborts at startup"),
            remedy=find_key(name, key),
            source="deepspeed/runtime/config_utils.py, dict_raise_error_on_duplicate_keys",
            component=name,
        )
    for word in dict.fromkeys(parsed["constants"]):
        yield Result(
            Outcome.CRITICAL,
            f"{name} has the number {word}, which neither JSON nor Hjson allows",
            remedy=paste("grep", "-nw", "-e", word.removeprefix("-"), "--", name),
            component=name,
        )


def _is_read(inspection: object) -> bool:
    return getattr(inspection, "document", None) is not None


FILE: Check[JobContext] = Check(
    "config-key", "config-file", "DeepSpeed configuration can be read", run
)


LIKENESS = 0.75
"""Share of letters in common with a known key from which that key is suggested."""

LETTERS_PER_SLIP = 6
"""A key is taken for misspelt if at most one letter in so many differs: `zero_optimisation`."""

_COMMENTS = ("_", "//", "#", "$", "comment")
"""Beginnings of keys that people use for comments, as JSON has none; DeepSpeed has no such key."""

GUIDES = {
    "communication_backend": "use init_distributed(timeout=...) or DEEPSPEED_TIMEOUT in minutes",
    "communication": "use communication_data_type or zero_quantized_gradients",
    "timeout": "use init_distributed(timeout=...) or DEEPSPEED_TIMEOUT in minutes",
    "checkpointing": "use checkpoint or activation_checkpointing",
    "logging": "use log_level",
}
"""Keys that troubleshooting guides recommend but no release reads; see the runbook."""


def keys_apply(context: JobContext) -> bool:
    """Whether a configuration is given."""
    return context.config is not None


class _Inspected(NamedTuple):
    """A configuration that DeepSpeed has inspected."""

    config: Source[Parsed]
    document: dict[str, Any]
    inspection: Inspection
    source: str
    """Which DeepSpeed inspected it, for people."""


def _inspected(context: JobContext) -> _Inspected | Result:
    """Return a job's configuration and its inspection, or an unknown result if one is missing."""
    inspection = context.inspection
    if context.config is None or context.document is None:
        return Result(Outcome.UNKNOWN, "there is no readable configuration")
    if inspection is None or inspection.problem:
        return Result(Outcome.UNKNOWN, f"keys are not checked: {context.why_not_inspected}")
    source = f"DeepSpeed {inspection.version} of {context.python}"
    return _Inspected(context.config, context.document, inspection, source)


def _keys(context: JobContext) -> Iterator[Result]:
    """Yield keys of the configuration that nothing reads, and keys on which DeepSpeed aborts."""
    inspected = _inspected(context)
    if isinstance(inspected, Result):
        yield inspected
        return
    config, document, inspection, source = inspected
    found = 0
    for error in inspection.errors:
        if error["kind"] == "unknown":
            found += 1
            yield _refused(config, error, inspection, source)
    if inspection.unread is None:
        yield Result(
            Outcome.UNKNOWN,
            f"{config.name}: keys without effect cannot be found while DeepSpeed refuses other"
            " keys",
            source=source,
        )
        return
    for path in inspection.unread:
        if not _is_comment(path.rpartition(".")[2]):
            found += 1
            yield _unread(config, path, inspection, source)
    if not found:
        keys = plural(len(document), "top-level key")
        yield Result(
            Outcome.OK, f"{config.name}: no key without effect among {keys}", source=source
        )


def _is_comment(key: str) -> bool:
    return key.lower().startswith(_COMMENTS)


def _refused(
    config: Source[Parsed], error: Mapping[str, str], inspection: Inspection, source: str
) -> Result:
    block, _, key = error["path"].rpartition(".")
    near, is_misspelt = _nearest(key, inspection.models.get(error.get("model", ""), ()))
    return Result(
        Outcome.CRITICAL,
        printable(
            f"{config.name}: {block} has no key {key!r}, so DeepSpeed aborts at startup"
            f"{f'; did you mean {near!r}?' if near else ''}"
        ),
        remedy=_mend(config, key, near if is_misspelt else ""),
        source=source,
        component=printable(f"{config.name}: {error['path']}"),
    )


def _unread(config: Source[Parsed], path: str, inspection: Inspection, source: str) -> Result:
    block, _, key = path.rpartition(".")
    near, is_misspelt = _nearest(key, inspection.looked_up.get(block, ()))
    if not block and key in GUIDES:
        near, is_misspelt, advice = "", False, f"; {GUIDES[key]}"
    else:
        advice = f"; did you mean {near!r}?" if near else ""
    # A misspelt key leaves the job without the setting it wants. A key unlike any of DeepSpeed's
    # may be meant for the script that reads the same file.
    return Result(
        Outcome.CRITICAL if is_misspelt else Outcome.WARNING,
        printable(f"{config.name}: nothing reads {path!r}, so it has no effect{advice}"),
        remedy=_mend(config, key, near if is_misspelt else ""),
        source=source,
        component=printable(f"{config.name}: {path}"),
    )


def _mend(config: Source[Parsed], key: str, right: str) -> str:
    return rename_key(config, key, right) if right else find_key(config.name, key)


def _nearest(key: str, known: Iterable[str]) -> tuple[str, bool]:
    """Return the known key that resembles a key, and whether the key certainly means that one.

    Empty if none resembles it, or if the key is a comment.
    """
    close = difflib.get_close_matches(key[:100], list(known), n=1, cutoff=LIKENESS)
    if not close or _is_comment(key):
        return "", False
    return close[0], _slips(key[:100], close[0]) <= len(key) // LETTERS_PER_SLIP


def _slips(left: str, right: str) -> int:
    """Return how many letters must be added, removed or replaced, or neighbors swapped.

    Capitals, `_` and `-` do not count. (Optimal string alignment distance.)
    """
    left, right = (text.lower().replace("_", "").replace("-", "") for text in (left, right))
    rows = [list(range(len(right) + 1))]
    for at, letter in enumerate(left, 1):
        above, row = rows[-1], [at]
        for other, wanted in enumerate(right, 1):
            best = min(row[-1] + 1, above[other] + 1, above[other - 1] + (letter != wanted))
            if at > 1 < other and left[at - 2 : at] == right[other - 2 : other][::-1]:
                best = min(best, rows[-2][other - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


KEYS: Check[JobContext] = Check(
    "config-key", "config-keys", "Every key of the configuration is read", _keys
)


_DEPRECATED = re.compile(r"Config parameter (\S+) is deprecated(?: use (.+?) instead)?\b")


def _deprecated(context: JobContext) -> Iterator[Result]:
    """Yield keys that the installed DeepSpeed deprecates or has removed."""
    inspected = _inspected(context)
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


DEPRECATED: Check[JobContext] = Check(
    "config-key", "config-deprecated", "No key of the configuration is deprecated", _deprecated
)
