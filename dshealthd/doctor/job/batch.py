"""Batch sizes add up: train = micro x accumulation x data-parallel ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, unknown
from dshealthd.doctor.job.config import UNREADABLE
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.remedies import at_key

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.source import Source

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
SOURCE = "deepspeed/runtime/config.py, _set_batch_related_parameters and _batch_assertion"
_TRAINER = "per_device_train_batch_size"
"""An argument that only Hugging Face's Trainer has."""
_FALSE = frozenset({"false", "no", "0", "n", "f"})
_FILLED = {
    MICRO: _TRAINER,
    ACCUMULATION: "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Settings that must be those of the Trainer's arguments (transformers/integrations/deepspeed.py,
`fill_match`)."""


def _batch_sizes(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    name, document = config.name, context.document
    if document is None:
        yield unknown(UNREADABLE)
        return
    given = {key: document[key] for key in (TRAIN, MICRO, ACCUMULATION) if key in document}
    given = {key: value for key, value in given.items() if value not in (None, "auto")}
    wrong = {key: value for key, value in given.items() if type(value) is not int or value < 1}
    for key, value in wrong.items():
        text = f"{key} is {str(value)[:40]!r}, not a whole number above 0"
        yield at_key(name, key, text, source=SOURCE)
    is_filled = "auto" in (document.get(TRAIN), document.get(MICRO), document.get(ACCUMULATION))
    if not wrong and not is_filled:  # a program fills in `auto`
        if TRAIN not in given and MICRO not in given:
            text = f"it has neither {TRAIN} nor {MICRO}; DeepSpeed needs one of them"
            yield at_key(name, TRAIN, text, source=SOURCE, shown=ACCUMULATION)
        else:
            yield from _judged(context, name, given)
    yield from _of_trainer(context, name, document)


def _of_trainer(context: JobContext, name: str, document: dict[str, Any]) -> Iterator[Result]:
    """Yield settings that are not those of the arguments of Hugging Face's Trainer."""
    said = context.launcher.stated if context.launcher else {}
    of = ManifestFields(document)
    if _TRAINER not in said:
        return
    for path, argument in _FILLED.items():
        value, text = of.stated(path), said.get(argument)
        differs = False
        if isinstance(value, bool) and "$" not in (text or "") and "pure_bf16" not in said:
            differs = value == (("false" if text is None else text).lower() in _FALSE)
        elif isinstance(value, int | float) and text is not None:
            with contextlib.suppress(ValueError, ArithmeticError):  # only its shell knows
                differs = float(text) != value
        if differs:
            told = f"has no --{argument}" if text is None else f"says --{argument} {text}"
            yield at_key(
                name,
                path,
                f"{path} is {value}, but the command {told}: Hugging Face's Trainer refuses to"
                " start; write auto in the configuration",
                source="transformers/integrations/deepspeed.py, fill_match",
            )


def _judged(context: JobContext, name: str, given: dict[str, int]) -> Iterator[Result]:
    copies, said = context.data_parallel, context.layout.source
    train, micro, steps = given.get(TRAIN), given.get(MICRO), given.get(ACCUMULATION)
    if context.layout.ranks is not None and copies is None:
        yield critical(
            f"{plural(context.layout.ranks, 'rank')} ({said}) cannot be split into groups of"
            f" {context.model_parallel} (--model-parallel)",
        )
    if train is None or (context.layout.ranks is not None and copies is None):
        return
    each = (micro or 1) * (steps or 1)
    if copies is None:
        if train % each:
            text = f"{TRAIN} {train} is not a multiple of {MICRO} x {ACCUMULATION} = {each}, so it"
            yield at_key(name, TRAIN, f"{text} fits no number of ranks", source=SOURCE)
        else:
            text = f"{name}: {TRAIN} {train} must be a multiple of {each} x the ranks"
            if micro and steps:
                text = f"{name}: the batch is for {plural(train // each, 'data-parallel rank')}"
            why = "but the job's number of ranks is unknown (--ranks, --hostfile, -- COMMAND)"
            yield unknown(f"{text}, {why}", source=SOURCE)
        return
    unit = each * copies
    complete = micro is not None and steps is not None
    if train == unit if complete else train % unit == 0:  # a missing value is train // the others
        return
    parts = [f"{key} {given[key]}" for key in (MICRO, ACCUMULATION) if key in given]
    product = " x ".join((*parts, f"{plural(copies, 'data-parallel rank')} ({said})"))
    offers = ", or ".join(f"{key} {value}" for key, value in _offers(train, micro, steps, copies))
    text = f"{TRAIN} {train} is not {'' if complete else 'a multiple of '}{product} = {unit}"
    yield at_key(name, TRAIN, f"{text}; possible fixes: {offers}", source=SOURCE)


def _offers(
    train: int, micro: int | None, steps: int | None, copies: int
) -> Iterator[tuple[str, int]]:
    """Yield each batch key with a value that fits the others; `train_batch_size` comes last."""
    if steps is not None and train % ((micro or 1) * copies) == 0:
        yield ACCUMULATION, train // ((micro or 1) * copies)
    if micro is not None and train % ((steps or 1) * copies) == 0:
        yield MICRO, train // ((steps or 1) * copies)
    unit = (micro or 1) * (steps or 1) * copies
    if micro is not None and steps is not None:
        yield TRAIN, unit
    else:
        below = train // unit * unit
        yield TRAIN, below if below and train - below <= unit / 2 else below + unit


CHECK = check_of(
    lambda job: job.config,
    UNREADABLE,
    "batch-arithmetic",
    "batch-sizes",
    "Batch sizes fit the number of ranks",
    _batch_sizes,
)
