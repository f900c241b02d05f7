"""What DeepSpeed refuses, or does without, though it knows each key: one table of settings that
contradict each other, and DeepSpeed's own words where it was queried.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.doctor.check import Result, check_of, critical, unknown, warning
from dshealthd.doctor.job.batch import ACCUMULATION, MICRO, TRAIN
from dshealthd.doctor.job.config import UNREADABLE
from dshealthd.doctor.job.sources.deepspeed_config import RELEASE, STAGES, Settings
from dshealthd.doctor.remedies import at_key, find_key, paste
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
    from dshealthd.doctor.job.sources.source import Source

_CPU = ("adagrad", "adam", "adamw", "lion", "muon")
"""Optimizers that DeepSpeed has for the CPU (0.19.8, engine.py, `_configure_basic_optimizer`)."""
_NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Parameters without a default of DeepSpeed's schedulers."""
_CONFIG, _ENGINE = "deepspeed/runtime/config.py", "deepspeed/runtime/engine.py"
_OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
_SCHEDULES = "deepspeed/runtime/lr_schedules.py"


class Contradiction(NamedTuple):
    """Settings that DeepSpeed refuses together, or of which one has no effect."""

    path: str
    """The setting that the result names."""
    found: Callable[[Settings], object]
    """What the text says of the settings; nothing where they are well."""
    text: str
    source: str
    make: Callable[..., Result] = critical
    in_config: bool = False
    """Whether DeepSpeed's configuration itself refuses it, in words of its own."""


def _fixed(of: Settings) -> str:
    fixed = [key for key in (TRAIN, MICRO, ACCUMULATION) if of(key) is not None]
    chosen = of("elasticity.enabled") is True and not of("elasticity.ignore_non_elastic_batch_info")
    return ", ".join(fixed) if chosen else ""


def _nowhere(part: str, of: Settings) -> bool:
    return of.device(part) == "nvme" and not of(f"zero_optimization.{part}.nvme_path")


def _least(part: str, cpu: int, of: Settings) -> str:
    """Return the least stage that offloads a part to its device, if the stage is lower."""
    device = of.device(part)
    least = max(STAGES) if device == "nvme" else cpu if device == "cpu" else 0
    return f"{least} or higher, but the stage is {of.stage}" if of.stage < least else ""


def _above(low: str, high: str, of: Settings) -> str:
    least, most = (of(f"scheduler.params.{name}") for name in (low, high))
    both = isinstance(least, int | float) and isinstance(most, int | float)
    return f"{least} is above {high} {most}" if both and least > most else ""


def _missing(of: Settings) -> str:
    kind = str(of("scheduler.type"))
    needed = _NEEDED.get(kind, ())
    missing = [name for name in needed if of.stated(f"scheduler.params.{name}") is None]
    return f"{kind} has no {' and no '.join(missing)}" if missing else ""


def _unlike(of: Settings, path: str, *values: str) -> object:
    found = of(path)
    return found if found is not None and str(found).lower() not in values else ""


def _half(of: Settings, *kinds: str) -> str:
    """Return which half precision is enabled, of these or any."""
    names = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    enabled = [kind for key, kind in names.items() if of(f"{key}.enabled") is True]
    return next((kind for kind in enabled if kind in (kinds or enabled)), "")


CONTRADICTIONS = (
    Contradiction(
        "bf16", lambda of: {_half(of, "fp16"), _half(of, "bf16")} == {"fp16", "bf16"},
        "fp16 and bf16 are both enabled; DeepSpeed aborts at startup",
        f"{_CONFIG}, _initialize_params", in_config=True),
    Contradiction(
        "elasticity", _fixed,
        "elasticity chooses the batch sizes, so DeepSpeed refuses {} beside it unless"
        f" ignore_non_elastic_batch_info is true; {RELEASE} refuses elasticity itself", _CONFIG),
    Contradiction(
        "zero_optimization.stage", lambda of: of.stage not in STAGES and str(of.stage),
        f"zero_optimization.stage is {{}}, but ZeRO has stages 0 to {max(STAGES)}",
        "deepspeed/runtime/zero/config.py, ZeroStageEnum", in_config=True),
    Contradiction(
        "zero_optimization.offload_optimizer.ratio",
        lambda of: of("zero_optimization.offload_optimizer.ratio", 1) != 1
        and of.stage < max(STAGES),
        "Partial offloading, with a ratio, takes ZeRO stage 3",
        "deepspeed/runtime/zero/config.py, offload_ratio_check", in_config=True),
    *(Contradiction(
        f"zero_optimization.{part}.nvme_path", partial(_nowhere, part),
        f"{part} goes to NVMe but has no nvme_path", _OFFLOAD)
      for part in ("offload_param", "offload_optimizer")),
    *(Contradiction(
        f"zero_optimization.{part}", partial(_least, part, cpu),
        f"{part} needs ZeRO stage {{}}: nothing is offloaded", _OFFLOAD, warning)
      for part, cpu in (("offload_param", 3), ("offload_optimizer", 1))),
    Contradiction(
        "optimizer.type",
        lambda of: of.stage and of.device("offload_optimizer") != "none"
        and _unlike(of, "optimizer.type", *_CPU),
        "the optimizer is offloaded to the CPU, but DeepSpeed has no {} for the CPU",
        f"{_ENGINE}, _configure_basic_optimizer", warning),
    Contradiction(
        "optimizer.params.max_grad_norm",
        lambda of: of.stated("optimizer.params.max_grad_norm") is not None,
        "DeepSpeed aborts at startup because max_grad_norm is not an optimizer parameter; use"
        " gradient_clipping at top level", f"{_ENGINE}, _configure_basic_optimizer"),
    Contradiction(
        "scheduler.type", _missing,
        "{}, which it takes to be created: TypeError at startup", _SCHEDULES),
    *(Contradiction(
        f"scheduler.params.{low}", partial(_above, low, high), f"{low} {{}}", _SCHEDULES, warning)
      for low, high in (
        ("warmup_num_steps", "total_num_steps"), ("warmup_min_lr", "warmup_max_lr"),
        ("cycle_min_lr", "cycle_max_lr"))),
    Contradiction(
        "pipeline.stages",
        lambda of: (natural(str(of("pipeline.stages"))) or 0) > 1 and of.stage > 1 and of.stage,
        "ZeRO stage {} shards gradients, which the pipeline engine refuses: it takes stage 0 or 1",
        "deepspeed/runtime/pipe/engine.py, PipelineEngine.__init__"),
    Contradiction(
        "data_types.grad_accum_dtype",
        lambda of: {of("data_types.grad_accum_dtype"), _half(of)} == {"fp16", "bf16"} and _half(of),
        "gradients of a model in {} cannot be accumulated in the other half precision",
        f"{_ENGINE}, get_data_types"),
    Contradiction(
        "communication_data_type",
        lambda of: _unlike(of, "communication_data_type", "fp16", "bf16", "fp32"),
        "communication_data_type is {}, not fp16, bf16 or fp32",
        f"{_CONFIG}, get_communication_data_type", in_config=True),
    Contradiction(
        "checkpoint.tag_validation",
        lambda of: _unlike(of, "checkpoint.tag_validation", "ignore", "warn", "fail"),
        "tag_validation is {}, not Ignore, Warn or Fail",
        f"{_CONFIG}, get_checkpoint_tag_validation_mode", in_config=True),
    Contradiction(
        "activation_checkpointing.contiguous_memory_optimization",
        lambda of: of("activation_checkpointing.contiguous_memory_optimization") is True
        and of("activation_checkpointing.partition_activations") is not True,
        "contiguous_memory_optimization takes partition_activations true",
        "deepspeed/runtime/activation_checkpointing/checkpointing.py, configure"),
)  # fmt: skip


def refused(name: str, document: Mapping[str, Any]) -> Iterator[tuple[Contradiction, Result]]:
    """Yield the rows of the table that a configuration breaks, with their results."""
    of = Settings(document)
    for row in CONTRADICTIONS:
        if found := row.found(of):
            text = row.text.format(found)
            shown = row.path.removesuffix(".nvme_path")
            yield row, at_key(name, row.path, text, row.make, source=row.source, shown=shown)


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
        _half(Settings(document)),
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
    told = {row.path.partition(".")[0] for row, _ in found if row.in_config}
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
