"""Batch sizes add up: train = micro x accumulation x data-parallel ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown
from dshealthd.doctor.remedies import find_key, paste
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.source import Source

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_TRAINER = "--per_device_train_batch_size"
UNREADABLE = "there is no readable configuration"
SOURCE = "deepspeed/runtime/config.py, _set_batch_related_parameters and _batch_assertion"


def _batch_sizes(context: JobContext, config: Source[Parsed]) -> Iterator[Result]:
    name, document = config.name, context.document
    if document is None:
        yield unknown(UNREADABLE)
        return
    given = {key: document[key] for key in (TRAIN, MICRO, ACCUMULATION) if key in document}
    given = {key: value for key, value in given.items() if value is not None}
    automatic = [key for key, value in given.items() if value == "auto"]
    wrong = list(_wrong(name, given))
    if wrong:
        yield from wrong
    elif automatic:
        yield ok(
            f"{name}: Hugging Face's Trainer or Accelerate fills in {', '.join(automatic)};"
            " plain DeepSpeed aborts on `auto`",
            source=SOURCE,
        )
    elif TRAIN not in given and MICRO not in given:
        yield critical(
            f"{name} has neither {TRAIN} nor {MICRO}; DeepSpeed needs one of them",
            remedy=paste("cat", "--", name),
            source=SOURCE,
            component=f"{name}: {TRAIN}",
        )
    else:
        yield _judged(context, name, given)
    yield from _of_trainer(context, name, given)


def _of_trainer(context: JobContext, name: str, given: dict[str, Any]) -> Iterator[Result]:
    """Yield a batch size of Hugging Face's Trainer that is not the configuration's."""
    launcher = context.launcher
    words = [word for one in launcher.chain() for word in one.arguments] if launcher else []
    words = [part for word in words for part in word.split("=", 1)]
    value = natural(dict(itertools.pairwise(words)).get(_TRAINER))
    if value is not None and given.get(MICRO, "auto") not in ("auto", value):
        yield critical(
            f"{name}: {MICRO} is {given[MICRO]}, but the command says {_TRAINER} {value}: Hugging"
            " Face's Trainer refuses to start; write auto in the configuration",
            remedy=find_key(name, MICRO),
            value=str(given[MICRO]),
            limit=str(value),
            source="transformers/integrations/deepspeed.py, fill_match",
            component=f"{name}: {MICRO}",
        )


def _wrong(name: str, given: dict[str, Any]) -> Iterator[Result]:
    for key, value in given.items():
        if value == "auto" or (
            isinstance(value, int) and not isinstance(value, bool) and value > 0
        ):
            continue
        yield critical(
            f"{name}: {key} is {str(value)[:40]!r}, not a whole number above 0",
            remedy=find_key(name, key),
            value=str(value)[:40],
            limit="a whole number of at least 1",
            source=SOURCE,
            component=f"{name}: {key}",
        )


def _judged(context: JobContext, name: str, given: dict[str, int]) -> Result:
    copies, said = context.data_parallel, context.layout.source
    train, micro, steps = given.get(TRAIN), given.get(MICRO), given.get(ACCUMULATION)
    if context.layout.ranks is not None and copies is None:
        return critical(
            f"{plural(context.layout.ranks, 'rank')} ({said}) cannot be split into groups of"
            f" {context.model_parallel} (--model-parallel)",
            value=str(context.layout.ranks),
            limit=f"a multiple of {context.model_parallel}",
        )
    if train is None:
        known = (
            f" x {plural(copies, 'rank')} = {micro * (steps or 1) * copies}"
            if copies and micro
            else ""
        )
        return ok(
            f"{name}: {TRAIN} follows from {MICRO} {micro} x {ACCUMULATION} {steps or 1}{known}",
            source=SOURCE,
        )
    if copies is None:
        return _without_ranks(name, train, micro, steps)
    unit = (micro or 1) * (steps or 1) * copies
    complete = micro is not None and steps is not None
    # DeepSpeed computes a missing value by integer division
    fits = train == unit if complete else train % unit == 0
    if fits:
        return ok(
            f"{name}: {TRAIN} {train} fits {plural(copies, 'data-parallel rank')} ({said})",
            source=SOURCE,
        )
    product = " x ".join(
        [
            *([f"{MICRO} {micro}"] if micro is not None else []),
            *([f"{ACCUMULATION} {steps}"] if steps is not None else []),
            f"{plural(copies, 'data-parallel rank')} ({said})",
        ]
    )
    relation = "is not" if complete else "is not a multiple of"
    offers = _offers(train, micro, steps, copies)
    return critical(
        f"{name}: {TRAIN} {train} {relation} {product} = {unit}; possible fixes: "
        + ", or ".join(f"{key} {value}" for key, value in offers),
        remedy=find_key(name, TRAIN),
        value=str(train),
        limit=str(unit),
        source=SOURCE,
        component=f"{name}: {TRAIN}",
    )


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


def _without_ranks(name: str, train: int, micro: int | None, steps: int | None) -> Result:
    """Judge batch sizes when the number of ranks is unknown: can they fit any number?"""
    unit = (micro or 1) * (steps or 1)
    if train % unit:
        return critical(
            f"{name}: {TRAIN} {train} is not a multiple of {MICRO} x {ACCUMULATION} = {unit},"
            " so it fits no number of ranks",
            remedy=find_key(name, TRAIN),
            value=str(train),
            limit=f"a multiple of {unit}",
            source=SOURCE,
            component=f"{name}: {TRAIN}",
        )
    if micro is not None and steps is not None:
        text = f"{name}: the batch is for {plural(train // unit, 'data-parallel rank')}"
    else:
        text = f"{name}: {TRAIN} {train} must be a multiple of {unit} x the ranks"
    return unknown(
        f"{text}, but the job's number of ranks is unknown (--ranks, --hostfile, -- COMMAND)",
        source=SOURCE,
        component=f"{name}: {TRAIN}",
    )


CHECK = check_of(
    lambda job: job.config,
    UNREADABLE,
    "batch-arithmetic",
    "batch-sizes",
    "Batch sizes fit the number of ranks",
    _batch_sizes,
)
