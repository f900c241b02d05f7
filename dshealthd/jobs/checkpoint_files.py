"""The files of a DeepSpeed checkpoint, by name, size and format; nothing is unpickled.

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

from dshealthd.linux.process_root import Root

MAX_FILES = 20_000
"""Most files of one tag; with ZeRO 3 each rank writes two, so 8,192 ranks fit."""
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
"""Bytes of a zip file's last record; torch writes no comment after it."""


class Gap(NamedTuple):
    """Data-parallel ranks without a file, within one model-parallel rank."""

    kind: str
    """Kind of the missing files: `optim` or `model`."""
    model_rank: int
    absent: list[int]
    whole: int
    """Number of data-parallel ranks, inferred from the highest one that has a file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint directory."""

    files: Mapping[str, int]
    """Sizes in bytes of the tag's files, by name."""
    directory: str = ""
    tag: str = ""
    """Empty if neither the user nor `latest` names one."""
    pointer: str = "latest"
    """The file that names the tag: `latest`, or `latest_universal` for universal ones."""
    latest: str = ""
    """Content of that file; empty if it does not exist."""
    truncated: tuple[str, ...] = ()
    """Files that begin as torch's do but lack their table of contents at the end."""
    is_universal: bool = False
    tag_exists: bool = True
    tags: tuple[str, ...] = ()
    """All directories in the checkpoint directory."""

    def shards(self) -> dict[int, set[int]]:
        """Return the data-parallel ranks with optimizer files, by model-parallel rank."""
        return _ranks(_SHARD, self.files)

    def model_shards(self) -> dict[int, set[int]]:
        """Return the data-parallel ranks with parameter files, which only ZeRO 3 writes."""
        return _ranks(_MODEL_SHARD, self.files)

    def models(self) -> set[int]:
        """Return the model-parallel ranks with checkpoint files."""
        return {int(match[1]) for name in self.files if (match := _MODEL.fullmatch(name))}

    def gaps(self) -> Iterator[Gap]:
        """Yield the ranks whose files are missing although higher ranks have theirs."""
        for groups, kind in ((self.shards(), "optim"), (self.model_shards(), "model")):
            whole = 1 + max((max(ranks) for ranks in groups.values()), default=-1)
            for model_rank, ranks in groups.items():
                absent = [rank for rank in range(whole) if rank not in ranks]
                if absent:
                    yield Gap(kind, model_rank, absent, whole)

    def missing(self, optimizer_files: int | None) -> int:
        """Return the least number of files that a checkpoint lacks.

        `optimizer_files` is the expected number of optimizer files, None if unknown.
        """
        shards, models = self.shards(), self.model_shards()
        gaps = Counter[str]()
        for gap in self.gaps():
            gaps[gap.kind] += len(gap.absent)
        optimizers = sum(map(len, shards.values()))
        absent = max(gaps["optim"], (optimizer_files or 0) - optimizers)
        if models:
            # With ZeRO 3 each rank writes one file of each kind.
            parameters = sum(map(len, models.values()))
            return absent + max(gaps["model"], optimizers + absent - parameters)
        return absent + (not self.models())

    @property
    def has_experts(self) -> bool:
        """Whether there are files of experts, whose optimizers are stored separately."""
        return any(_EXPERT.fullmatch(name) for name in self.files)

    @property
    def stage(self) -> int | None:
        """The ZeRO stage inferred from the files: 3, 1 (also for 2) or 0; None if unknown."""
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


class Scan:
    """The files of one checkpoint, looked at one by one."""

    def __init__(self, root: Root, directory: str, tag: str) -> None:
        """List the files of a tag, none if it is empty or has no directory.

        OSError; ValueError if it has more files than any job saves.
        """
        self._folder = f"{directory}/{tag}"
        self.files: dict[str, int] = {}
        """Sizes in bytes of those that were looked at."""
        self.truncated: list[str] = []
        found = root.stat(self._folder) if tag else None
        self.exists = found is not None and stat.S_ISDIR(found.st_mode)
        names = root.names(self._folder, MAX_FILES + 1) if self.exists else []
        if len(names) > MAX_FILES:
            raise ValueError(f"{self._folder} has more than {MAX_FILES} files")
        self.is_universal = "zero" in names
        self.todo = sorted(names, reverse=True)

    def check(self, root: Root) -> None:
        """Check size and end of the checkpoint's next file. OSError: then it is the next one still,
        and does not count as absent.
        """
        name = self.todo[-1]
        status = root.stat(f"{self._folder}/{name}")
        if status is not None and stat.S_ISREG(status.st_mode):
            opens = name.endswith(".pt") and status.st_size and len(self.files) < MAX_OPENED
            if opens and is_truncated(root, f"{self._folder}/{name}"):
                self.truncated.append(name)
            self.files[name] = status.st_size
        self.todo.pop()


def read(directory: str, tag: str = "", *, universal: bool = False) -> dict[str, Any]:
    """Return a checkpoint as a JSON document, read with its owner's rights.

    `universal` says whether the job will load a universal one. OSError; ValueError if it has more
    files than any job saves, or if its `latest` is not a valid name.
    """
    pointer = "latest_universal" if universal else "latest"
    place = os.path.abspath(directory)
    with Root.of_owner(Path("/"), place) as root:
        names = root.names(place, MAX_FILES + 1)
        latest = read_tag(root, f"{place}/{pointer}") if pointer in names else ""
        chosen = tag or latest
        check_tag(chosen, f"{directory}/{pointer}")
        scan = Scan(root, place, chosen)
        while scan.todo:
            scan.check(root)
        tags = sorted(
            name
            for name in names[:MAX_FILES]
            if (status := root.stat(f"{place}/{name}")) is not None and stat.S_ISDIR(status.st_mode)
        )
    return {
        "directory": directory,
        "tag": chosen,
        "pointer": pointer,
        "latest": latest,
        "files": scan.files,
        "truncated": scan.truncated,
        "is_universal": scan.is_universal,
        "tag_exists": scan.exists,
        "tags": tags,
    }


def from_json(document: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint of a JSON document."""
    return Checkpoint(
        **{**document, "truncated": tuple(document["truncated"]), "tags": tuple(document["tags"])}
    )


def read_tag(root: Root, path: str) -> str:
    """Return the tag in a file such as `latest`; empty if the file is empty. OSError."""
    return root.read(path, MAX_TAG + 2).decode(errors="replace").strip()


def check_tag(tag: str, where: str) -> None:
    """Raise ValueError if a tag, from a file or a user, is not a valid directory name."""
    if len(tag) > MAX_TAG or "/" in tag or tag in {".", ".."}:
        raise ValueError(f"{where}: {tag[:60]!r} is not a valid checkpoint name")


def is_truncated(root: Root, path: str) -> bool:
    """Return whether a checkpoint file begins as torch's do but is cut off. OSError."""
    descriptor = root.open(path)
    try:
        if os.pread(descriptor, len(_ZIP_HEAD), 0) != _ZIP_HEAD:
            return False  # written by torch before 1.6, or by something else
        size = os.fstat(descriptor).st_size
        end = os.pread(descriptor, _END_SIZE, max(0, size - _END_SIZE))
        return not end.startswith(_ZIP_END)
    finally:
        os.close(descriptor)
