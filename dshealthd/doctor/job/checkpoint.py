"""The checkpoint is complete and fits the job that will load it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.remedies import find_key, paste, show, unreadable

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.source import Source
    from dshealthd.jobs.checkpoint_files import Checkpoint, Gap

ENGINE = "deepspeed/runtime/engine.py"
MAX_NAMED = 8
PARTITIONED = 3
"""The ZeRO stage that saves partitioned parameters; 1 and 2 can load each other's files."""
_STAGES = {3: "3", 1: "1 or 2", 0: "0"}


def _checkpoint(context: JobContext, source: Source[Checkpoint]) -> Iterator[Result]:
    checkpoint = source.value
    if checkpoint is None:
        yield unreadable(source)
        return
    missing = list(_tag(checkpoint))
    if missing:
        yield from missing
        return
    yield from _files(checkpoint)
    yield from _shape(context, checkpoint)


def _path(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.directory}/{checkpoint.tag}"


def _tag(checkpoint: Checkpoint) -> Iterator[Result]:
    directory, pointer = checkpoint.directory, checkpoint.pointer
    universal = pointer == "latest_universal"
    tags = f"; available tags: {', '.join(checkpoint.tags[-4:])}" if checkpoint.tags else ""
    if not checkpoint.tag:
        suited = [tag for tag in checkpoint.tags if tag.endswith("_universal") == universal]
        newest = suited[-1] if suited else "TAG"
        yield critical(
            f"{directory} has no file `{pointer}`: DeepSpeed only warns, and training starts"
            f" from scratch{tags}",
            f"echo {shlex.quote(newest)} > {shlex.quote(f'{directory}/{pointer}')}",
            source=f"{ENGINE}, load_checkpoint",
            component=directory,
        )
    elif not checkpoint.tag_exists:
        origin = f"named in `{pointer}`, " if checkpoint.tag == checkpoint.latest else ""
        yield critical(
            f"{_path(checkpoint)}, {origin}does not exist{tags}",
            show(directory),
            source=f"{ENGINE}, load_checkpoint",
            component=_path(checkpoint),
        )
    elif not checkpoint.files:
        yield critical(
            f"{_path(checkpoint)} has no files",
            show(_path(checkpoint)),
            component=_path(checkpoint),
        )


def _files(checkpoint: Checkpoint) -> Iterator[Result]:
    path = _path(checkpoint)
    empty = [name for name, size in checkpoint.files.items() if not size and name.endswith(".pt")]
    for names, what in ((empty, "is empty"), (checkpoint.truncated, "is truncated")):
        for name in names[:MAX_NAMED]:
            yield critical(
                f"{path}/{name} {what}: it was not written completely",
                paste("df", "-h", "--", checkpoint.directory),
                component=name,
            )
        if len(names) > MAX_NAMED:
            yield critical(f"{plural(len(names) - MAX_NAMED, 'more file')}: each {what}")
    if checkpoint.is_universal:
        return
    for gap in checkpoint.gaps():
        yield _absent(path, gap)
    shards, models = checkpoint.shards(), checkpoint.model_shards()
    if models and shards:
        saved, optimizers = _most(models), _most(shards)
        if saved != optimizers:
            yield critical(
                f"{path} has the parameters of {plural(saved, 'rank')} but the optimizer"
                f" states of {optimizers}",
                show(path),
                component=path,
            )
    if not models and not checkpoint.models():
        yield critical(
            f"{path} has no model: mp_rank_00_model_states.pt is missing",
            show(path),
            source=f"{ENGINE}, _get_ckpt_name",
            component=path,
        )


def _most(groups: dict[int, set[int]]) -> int:
    return max(len(ranks) for ranks in groups.values())


def _absent(path: str, gap: Gap) -> Result:
    kind, absent, whole = gap.kind, gap.absent, gap.whole
    shown = ", ".join(map(str, absent[:MAX_NAMED])) + (", ..." if len(absent) > MAX_NAMED else "")
    file = f"zero_pp_rank_{absent[0]}_mp_rank_{gap.model_rank:02d}_{kind}_states.pt"
    return critical(
        f"{path}: {len(absent)} of {whole} {kind}_states files are missing: data-parallel"
        f" ranks {shown}",
        show(path),
        source=f"{ENGINE}, _get_all_zero_checkpoint_names",
        component=file,
    )


def _shape(context: JobContext, checkpoint: Checkpoint) -> Iterator[Result]:
    inspection, of = context.inspection, ManifestFields(context.document)
    settings = (inspection.settings if inspection else None) or {}
    universal = settings.get("load_universal", of.stated("checkpoint.load_universal") is True)
    path = _path(checkpoint)
    program = ("python", "-m", "deepspeed.checkpoint.ds_to_universal")
    target = f"{path}_universal"
    convert = paste(*program, "--input_folder", path, "--output_folder", target)
    if checkpoint.is_universal != universal and (context.config is not None or universal):
        have = "a universal checkpoint" if checkpoint.is_universal else "not a universal checkpoint"
        yield critical(
            f"{path} is {have}, but the configuration has checkpoint.load_universal"
            f" {'true' if universal else 'off'}",
            convert
            if universal
            else find_key(context.config.name if context.config else "", "checkpoint.enabled"),
            source=f"{ENGINE}, _load_zero_checkpoint",
            component="checkpoint.load_universal",
        )
    if checkpoint.is_universal or universal or checkpoint.stage is None:
        return
    stage = _configured_stage(context)
    if stage is not None and (stage == PARTITIONED) != (checkpoint.stage == PARTITIONED):
        yield critical(
            f"{path} was saved with ZeRO stage {_STAGES[checkpoint.stage]}, but the configuration"
            f" has stage {stage}: DeepSpeed ends with an AssertionError without a message",
            convert,
            source=f"{ENGINE}, _get_ckpt_name",
            component="zero_optimization.stage",
        )
    saved = _most(checkpoint.shards()) if checkpoint.shards() else None
    copies = context.data_parallel
    if saved is not None and copies is not None and saved != copies and not checkpoint.has_experts:
        yield critical(
            f"{path} was saved by {plural(saved, 'data-parallel rank')}, but the job has"
            f" {copies} ({context.layout.source})",
            convert,
            source=f"{ENGINE}, _load_zero_checkpoint",
            component="WORLD_SIZE",
        )


def _configured_stage(context: JobContext) -> int | None:
    inspection = context.inspection
    if inspection is not None and inspection.settings is not None:
        return int(inspection.settings["stage"])
    stage = ManifestFields(context.document).stated("zero_optimization.stage") or 0
    return stage if isinstance(stage, int) and context.document is not None else None


CHECK = check_of(
    lambda job: job.checkpoint,
    "no checkpoint is given (--checkpoint)",
    "checkpoint-incompatible",
    "checkpoint",
    "The checkpoint is complete and fits",
    _checkpoint,
)
