"""What DeepSpeed refuses, or does without, though it knows each key: by the table of rules, and in
DeepSpeed's own words where it was queried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import Result, check_of, critical, unknown, warning
from dshealthd.doctor.job.config import UNREADABLE
from dshealthd.doctor.job.rules import JobRule, Values, broken
from dshealthd.doctor.job.rules_of_deepspeed import OF_DEEPSPEED
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.remedies import at_key, find_key, paste

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
    from dshealthd.doctor.job.sources.source import Source


def _half(document: Mapping[str, Any]) -> str:
    """Return which half precision is enabled."""
    of = ManifestFields(document)
    names = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    return next((kind for key, kind in names.items() if of.stated(f"{key}.enabled") is True), "")


def _settings(document: Mapping[str, Any]) -> Values:
    """Return the values of a configuration's settings, by their dotted path."""

    def values(key: str) -> Sequence[str]:
        found: list[Any] = [document]
        for step in key.split("."):
            inside = (one.get(step) for one in found if isinstance(one, dict))
            found = [one for some in inside for one in (some if isinstance(some, list) else [some])]
        return [_text(one) for one in found if one is not None]

    return values


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def refused(name: str, document: Mapping[str, Any]) -> Iterator[tuple[JobRule, Result]]:
    """Yield the rules that a configuration breaks, with their results."""
    values = _settings(document)
    for rule in OF_DEEPSPEED:
        if text := broken(rule, values):
            shown = rule.subject.removesuffix(".nvme_path")
            yield rule, at_key(name, rule.subject, text, rule.make, source=rule.source, shown=shown)


def of_accelerate(name: str, launcher: LauncherCommand) -> Iterator[Result]:
    """Yield what a configuration of Accelerate states of ZeRO in vain."""
    options = launcher.options
    if (stage := launcher.number("zero-stage")) is None:
        return
    zero = {
        part: {"device": options.get(f"{part.replace('_', '-')}-device", "none"), "nvme_path": "?"}
        for part in ("offload_param", "offload_optimizer")
    }
    for _, result in refused(name, {"zero_optimization": {"stage": stage, **zero}}):
        yield result


def _conflicts(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    name, inspection, source = config.name, context.inspection, context.inspector
    document = context.document
    if document is None:
        yield unknown(UNREADABLE)
        return
    is_known = inspection is not None and not inspection.problem
    settings = (inspection.settings if inspection and is_known else None) or {}
    found = list(refused(name, _understood(document, settings)))
    yield from (result for _, result in found)
    inner = context.launcher.find("torchrun") if context.launcher else None
    said, half = (
        inner.options.get("mixed-precision", "") if inner else "",
        _half(document),
    )
    if {said, half} == {"fp16", "bf16"}:
        text = f"{half} is enabled, but Accelerate is told {said} (mixed_precision), and refuses it"
        source = "accelerate/utils/dataclasses.py, set_mixed_precision"
        yield at_key(name, f"{half}.enabled", text, source=source)
    for path, value in _strings(document):
        text = f"{path} is the string {value!r}, which Python takes for true; write {value.lower()}"
        yield at_key(name, path, f"{text} without quotes", warning)
    if inspection is None or not is_known:
        yield unknown(f"{name} was not checked by DeepSpeed: {context.why_not_inspected}")
        return
    told = {rule.subject.partition(".")[0] for rule, _ in found}
    refusals = [one for one in inspection.errors if one["kind"] in {"refused", "value"}]
    for error in refusals:
        path, text = error["path"], error["text"]
        if path.partition(".")[0] not in told:
            yield critical(
                f"{name}: DeepSpeed refuses {path or 'it'}: {text}",
                # without a path, only DeepSpeed's message can name the place
                find_key(name, path) if path else paste("cat", "--", name),
                source=source,
                component=f"{name}: {path}" if path else name,
            )
    if not settings and not refusals:
        yield unknown(f"{name}: refused keys hide the rest")


def _understood(document: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with what DeepSpeed made of it, such as of keys that are older."""
    zero = document.get("zero_optimization")
    if not settings or not isinstance(zero, dict):
        return document
    parts = {
        part: {**(zero.get(part) or {}), "device": settings[part]}
        for part in ("offload_param", "offload_optimizer")
        if isinstance(zero.get(part) or {}, dict)
    }
    return {**document, "zero_optimization": {**zero, "stage": settings["stage"], **parts}}


def _strings(block: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each truth value that is written as a string."""
    for key, value in block.items():
        path = f"{above}{key}"
        if isinstance(value, dict):
            yield from _strings(value, f"{path}.")
        elif isinstance(value, str) and value.lower() in {"true", "false"}:
            yield path, value


CHECK = check_of(
    lambda job: job.config,
    UNREADABLE,
    "config-key",
    "config-conflicts",
    "The configuration does not contradict itself",
    _conflicts,
)
