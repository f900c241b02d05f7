"""The DeepSpeed configuration is a file that DeepSpeed can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import printable
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job.sources import deepspeed_config
from dshealthd.doctor.job.sources.remedies import find_key, paste, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext


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


CHECK: Check[JobContext] = Check(
    "config-key", "config-file", "DeepSpeed configuration can be read", run
)
