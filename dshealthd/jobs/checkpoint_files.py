"""The files of a DeepSpeed checkpoint, by name, size and form; nothing is unpickled.

Layout of DeepSpeed 0.19.8: runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`),
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dshealthd.linux.process_files import Root

MAX_FILES = 20_000
"""Files of one tag; a job of 8,192 ranks with ZeRO 3 has two of each."""
MAX_OPENED = 2048
"""Files whose last bytes are read; each costs a network file system one round trip."""
MAX_TAG = 255
_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERT = re.compile(
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"
    r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_ZIP_HEAD, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_END_SIZE = 22
"""Bytes of a zip file's last record; torch writes no comment behind it."""


class Gap(NamedTuple):
    """Data-parallel ranks of which a file is missing, of one model-parallel rank."""

    kind: str
    """Of what: `optim` or `model`."""
    model_rank: int
    absent: list[int]
    whole: int
    """How many data-parallel ranks there are, by the highest that has a file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What lies in a checkpoint directory."""

    directory: str
    tag: str
    """Empty where neither the user nor `latest` says one."""
    pointer: str
    """The file that names the tag: `latest`, or `latest_universal` for universal ones."""
    latest: str
    """What that file says; empty if there is none."""
    files: Mapping[str, int]
    """Sizes in bytes by name, of the files of the tag."""
    truncated: tuple[str, ...]
    """Files that begin as torch's do, and end before their table of contents."""
    is_universal: bool
    tag_exists: bool
    tags: tuple[str, ...]
    """Directories beside it."""

    def shards(self) -> dict[int, set[int]]:
        """Return the data-parallel ranks with optimizer files, by model-parallel rank."""
        return _ranks(_SHARD, self.files)

    def model_shards(self) -> dict[int, set[int]]:
        """Return the data-parallel ranks whose parameter files are there: with ZeRO 3 alone."""
        return _ranks(_MODEL_SHARD, self.files)

    def models(self) -> set[int]:
        """Return the model-parallel ranks whose checkpoint files are there."""
        return {int(match[1]) for name in self.files if (match := _MODEL.fullmatch(name))}

    def gaps(self) -> Iterator[Gap]:
        """Yield of which ranks files are missing, as others of higher ranks are there."""
        for groups, kind in ((self.shards(), "optim"), (self.model_shards(), "model")):
            whole = 1 + max((max(ranks) for ranks in groups.values()), default=-1)
            for model_rank, ranks in sorted(groups.items()):
                absent = sorted(set(range(whole)) - ranks)
                if absent:
                    yield Gap(kind, model_rank, absent, whole)

    def missing(self, optimizer_files: int | None) -> int:
        """Return how many files are missing; `optimizer_files` were to be written, if known.

        Each count is what is missing at least.
        """
        shards, models = self.shards(), self.model_shards()
        gaps = Counter[str]()
        for gap in self.gaps():
            gaps[gap.kind] += len(gap.absent)
        optimizers = sum(map(len, shards.values()))
        absent = max(gaps["optim"], (optimizer_files or 0) - optimizers)
        if models:
            # With ZeRO 3 each rank that has a file of one kind has one of the other.
            parameters = sum(map(len, models.values()))
            return absent + max(gaps["model"], optimizers + absent - parameters)
        return absent + (not self.models())

    @property
    def has_experts(self) -> bool:
        """Whether files of experts are there, which keep their optimizers elsewhere."""
        return any(_EXPERT.fullmatch(name) for name in self.files)

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the files tell: 3, 1 (which stands for 2 too), or 0; else None."""
        if self.model_shards():
            return 3
        if self.shards():
            return 1
        return 0 if self.models() and not self.has_experts else None


def _ranks(pattern: re.Pattern[str], names: Mapping[str, int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    return found


def read(directory: str, tag: str = "", *, universal: bool = False) -> dict[str, Any]:
    """Return a checkpoint as JSON has it, read with its owner's rights.

    `universal` is whether the job will load a universal one. OSError; ValueError if it has more
    files than any job saves, or its `latest` is no name.
    """
    pointer = "latest_universal" if universal else "latest"
    place = os.path.abspath(directory)
    with Root.of_owner(Path("/"), place) as root:
        names = root.names(place, MAX_FILES + 1)
        latest = pointed(root, f"{place}/{pointer}") if pointer in names else ""
        chosen = tag or latest
        check_tag(chosen, f"{directory}/{pointer}")
        files: dict[str, int] = {}
        truncated: list[str] = []
        folder = f"{place}/{chosen}"
        found = root.look(folder) if chosen else None
        exists = found is not None and stat.S_ISDIR(found.st_mode)
        is_universal = False
        if exists:
            inside = root.names(folder, MAX_FILES + 1)
            if len(inside) > MAX_FILES:
                message = f"{directory}/{chosen} has more than {MAX_FILES} files"
                raise ValueError(message)
            is_universal = "zero" in inside
            for name in sorted(inside):
                status = root.look(f"{folder}/{name}")
                if status is None or not stat.S_ISREG(status.st_mode):
                    continue
                files[name] = status.st_size
                if name.endswith(".pt") and status.st_size and len(files) <= MAX_OPENED:
                    truncated += [name] if is_truncated(root, f"{folder}/{name}") else []
        tags = sorted(
            name
            for name in names[:MAX_FILES]
            if (status := root.look(f"{place}/{name}")) is not None and stat.S_ISDIR(status.st_mode)
        )
    return {
        "directory": directory,
        "tag": chosen,
        "pointer": pointer,
        "latest": latest,
        "files": files,
        "truncated": truncated,
        "is_universal": is_universal,
        "tag_exists": exists,
        "tags": tags[-16:],
    }


def from_json(document: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint's files from a JSON document."""
    return Checkpoint(
        **{
            **document,
            "truncated": tuple(document["truncated"]),
            "tags": tuple(document["tags"]),
        }
    )


def pointed(root: Root, path: str) -> str:
    """Return the checkpoint's tag that a file such as `latest` names, empty if it is empty.
    OSError.
    """
    return root.read(path, MAX_TAG + 2).decode(errors="replace").strip()


def check_tag(tag: str, where: str) -> None:
    """Raise ValueError if a checkpoint's tag, of a file or a user, is no name of a directory."""
    if len(tag) > MAX_TAG or "/" in tag or tag in {".", ".."}:
        message = f"{where}: {tag[:60]!r} is no name of a checkpoint"
        raise ValueError(message)


def is_truncated(root: Root, path: str) -> bool:
    """Tell whether a checkpoint file begins as torch's do, and ends too early. OSError."""
    descriptor = root.open(path)
    try:
        if os.pread(descriptor, len(_ZIP_HEAD), 0) != _ZIP_HEAD:
            return False  # of a torch before 1.6, or another writer's
        size = os.fstat(descriptor).st_size
        end = os.pread(descriptor, _END_SIZE, max(0, size - _END_SIZE))
        return not end.startswith(_ZIP_END)
    finally:
        os.close(descriptor)
