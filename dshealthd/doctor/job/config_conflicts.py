"""The parts of the DeepSpeed configuration do not contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job.batch import ACCUMULATION, MICRO, TRAIN, UNREADABLE
from dshealthd.doctor.job.sources.deepspeed_config import RELEASE
from dshealthd.doctor.remedies import find_key, paste
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.source import Source

_CPU = ("adagrad", "adam", "adamw", "lion", "muon")
"""Optimizers that DeepSpeed has for the CPU (0.19.8, engine.py, `_configure_basic_optimizer`)."""
_OFFLOADS = {"offload_param": 3, "offload_optimizer": 1}
"""The least ZeRO stage that can offload to the CPU; to NVMe only stage 3 can."""
_STAGES = range(4)


def _conflicts(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    """Yield conflicting settings, whether DeepSpeed's configuration or only its engine refuses
    them.
    """
    name = config.name
    if context.document is None:
        yield unknown(UNREADABLE)
        return
    found = list(_written(name, context.document))
    inspection = context.inspection
    if inspection is None or inspection.problem:
        yield from (*found, *_engine(name, _stated(context.document), RELEASE))
        yield unknown(f"{name} was not checked by DeepSpeed: {context.why_not_inspected}")
        return
    source = context.inspector
    both = any(result.component.endswith("bf16") for result in found)
    found += [
        _refused(name, error, source)
        for error in inspection.errors
        # DeepSpeed also refuses fp16 together with bf16, but its message names no key
        if error["kind"] in {"refused", "value"} and not (both and "bfloat16" in error["text"])
    ]
    if inspection.settings is not None:
        found += _engine(name, inspection.settings, source)
    yield from found
    if not found and inspection.settings is not None:
        stage = inspection.settings["stage"]
        yield ok(f"{name}: DeepSpeed accepts it, with ZeRO stage {stage}", source=source)
    elif not found:
        yield unknown(f"{name}: refused keys hide the rest", source=source)


def _refused(name: str, error: Mapping[str, str], source: str) -> Result:
    path = error["path"]
    return critical(
        f"{name}: DeepSpeed refuses {path or 'it'}: {error['text']}",
        # without a path, only DeepSpeed's message can name the place
        remedy=find_key(name, path.rpartition(".")[2]) if path else paste("cat", "--", name),
        source=source,
        component=f"{name}: {path}" if path else name,
    )


def _written(name: str, document: Mapping[str, Any]) -> Iterator[Result]:
    """Yield conflicts that can be found without DeepSpeed."""

    def at(
        path: str,
        text: str,
        *,
        make: Callable[..., Result] = critical,
        lines: str = "",
        **more: str,
    ) -> Result:
        """Return a result at a key of the configuration."""
        remedy = find_key(name, path.rpartition(".")[2], *filter(None, [lines]))
        return make(f"{name}: {text}", remedy=remedy, component=f"{name}: {path}", **more)

    half = {kind: _block(document, kind) for kind in ("fp16", "bf16", "bfloat16")}
    bf16 = half["bf16"] or half["bfloat16"]
    if half["fp16"].get("enabled") is True and bf16.get("enabled") is True:
        source = "deepspeed/runtime/config.py, _initialize_params"
        text = "fp16 and bf16 are both enabled; DeepSpeed aborts at startup"
        yield at("bf16", text, lines="-A2", source=source)
    elastic = _block(document, "elasticity")
    fixed = [key for key in (TRAIN, MICRO, ACCUMULATION) if document.get(key) is not None]
    is_ignored = elastic.get("ignore_non_elastic_batch_info")
    if elastic.get("enabled") is True and fixed and not is_ignored:
        yield at(
            "elasticity",
            f"elasticity chooses the batch sizes, so DeepSpeed refuses {', '.join(fixed)} beside it"
            f" unless ignore_non_elastic_batch_info is true; {RELEASE} refuses elasticity itself",
            lines="-A9",
            source="deepspeed/runtime/config.py, DeepSpeedConfig.__init__",
        )
    if "max_grad_norm" in _block(_block(document, "optimizer"), "params"):
        yield at(
            "optimizer.params.max_grad_norm",
            "DeepSpeed aborts at startup because max_grad_norm is not an optimizer"
            " parameter; use gradient_clipping at top level",
            source="deepspeed/runtime/engine.py, _configure_basic_optimizer",
        )
    for path, value in _strings(document):
        text = f"{path} is the string {value!r}, which Python takes for true; write"
        yield at(path, f"{text} {value.lower()} without quotes", make=warning)
    params = _block(_block(document, "scheduler"), "params")
    for least, most in (
        ("warmup_num_steps", "total_num_steps"),
        ("warmup_min_lr", "warmup_max_lr"),
    ):
        low, high = params.get(least), params.get(most)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            yield at(
                f"scheduler.params.{least}",
                f"{least} {low} is above {most} {high}",
                make=warning,
                value=str(low),
                limit=str(high),
                source="deepspeed/runtime/lr_schedules.py",
            )
    zero = _block(document, "zero_optimization")
    stage = zero.get("stage", 0)
    if isinstance(stage, int) and stage not in _STAGES:
        text, limit = f"ZeRO has no stage {stage}", f"0 to {max(_STAGES)}"
        yield at("zero_optimization.stage", text, value=str(stage), limit=limit)
    for key in _OFFLOADS:
        offload = _block(zero, key)
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            yield critical(
                f"{name}: {key} goes to NVMe but has no nvme_path",
                remedy=find_key(name, key, "-A4"),
                source="deepspeed/runtime/zero/offload_config.py",
                component=f"{name}: zero_optimization.{key}.nvme_path",
            )


def _strings(block: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each truth value that is written as a string."""
    for key, value in block.items():
        path = f"{above}{key}"
        if isinstance(value, dict):
            yield from _strings(value, f"{path}.")
        elif isinstance(value, str) and value.lower() in {"true", "false"}:
            yield path, value


def _stated(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a configuration that DeepSpeed has not read."""
    zero, optimizer = _block(document, "zero_optimization"), _block(document, "optimizer")
    stage = zero.get("stage", 0)
    return {
        "stage": stage if isinstance(stage, int) else max(_STAGES),
        "optimizer": str(optimizer.get("type", "")).lower(),
        **{key: str(_block(zero, key).get("device", "none")) for key in _OFFLOADS},
    }


def of_accelerate(name: str, settings: Mapping[str, str]) -> Iterator[Result]:
    """Yield what a configuration of Accelerate offloads in vain."""
    if (stage := natural(settings.get("zero_stage"))) is not None:
        devices = {key: settings.get(f"{key}_device", "none") for key in _OFFLOADS}
        yield from _engine(name, {"stage": stage, "optimizer": "", **devices}, RELEASE)


def _engine(name: str, settings: Mapping[str, Any], source: str) -> Iterator[Result]:
    """Yield conflicts in the engine between settings that DeepSpeed's configuration accepts."""
    stage, optimizer = settings["stage"], settings["optimizer"] or ""
    for key, cpu in _OFFLOADS.items():
        least = max(_STAGES) if settings[key] == "nvme" else cpu
        if settings[key] in {"cpu", "nvme"} and stage < least:
            yield warning(
                f"{name}: {key} needs ZeRO stage {least} or higher, but the stage is {stage}:"
                " nothing is offloaded",
                remedy=find_key(name, "stage"),
                value=str(stage),
                limit=str(least),
                source="deepspeed/runtime/zero/offload_config.py",
                component=f"{name}: zero_optimization.{key}",
            )
    if settings["offload_optimizer"] != "none" and stage and optimizer not in {"", *_CPU}:
        yield warning(
            f"{name}: the optimizer is offloaded to the CPU, but DeepSpeed has no {optimizer}"
            " for the CPU",
            remedy=find_key(name, "optimizer", "-A2"),
            value=optimizer,
            limit=", ".join(_CPU),
            source=source,
            component=f"{name}: optimizer.type",
        )
    yield from _scheduler(name, settings, source)
    if settings.get("optimizer_problem") == "unknown":
        yield critical(
            f"{name}: neither DeepSpeed nor torch.optim has the optimizer {optimizer}",
            remedy=find_key(name, "optimizer", "-A2"),
            value=optimizer,
            source=source,
            component=f"{name}: optimizer.type",
        )
    elif settings.get("optimizer_problem") == "untested":
        yield critical(
            f"{name}: ZeRO is not tested with {optimizer}, and DeepSpeed aborts at startup"
            " unless zero_allow_untested_optimizer is true",
            remedy=find_key(name, "optimizer", "-A2"),
            source=source,
            component=f"{name}: optimizer.type",
        )


def _scheduler(name: str, settings: Mapping[str, Any], source: str) -> Iterator[Result]:
    scheduler = settings.get("scheduler")
    meanings = {
        "unknown": "neither DeepSpeed nor torch.optim.lr_scheduler has the scheduler {}",
        "wrapped": "{} is torch's and takes an optimizer of torch, but ZeRO, fp16 and bf16 wrap"
        " the optimizer: it raises TypeError at startup; create it in the script instead, as a"
        " callable given to deepspeed.initialize(lr_scheduler=...)",
    }
    if problem := settings.get("scheduler_problem"):
        yield critical(
            f"{name}: {meanings[problem].format(scheduler)}",
            remedy=find_key(name, "scheduler", "-A2"),
            value=str(scheduler),
            limit="a scheduler of DeepSpeed, such as WarmupCosineLR",
            source=f"deepspeed/runtime/engine.py, _scheduler_from_config; {source}",
            component=f"{name}: scheduler.type",
        )


def _block(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}


CHECK = check_of(
    lambda job: job.config,
    UNREADABLE,
    "config-key",
    "config-conflicts",
    "The configuration does not contradict itself",
    _conflicts,
)
