"""The watch of one running job's checkpoints, with its user's rights, a few files at a time.

It checks the checkpoint that DeepSpeed's `latest` names, once after each save: names, sizes and the
last bytes of files. It must not be called during a save, when the checkpoint is incomplete without
being broken.
"""

from __future__ import annotations

import stat
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.jobs.checkpoint_files import (
    MAX_FILES,
    MAX_OPENED,
    Checkpoint,
    check_tag,
    is_truncated,
    pointed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dshealthd.linux.process_files import Root
    from dshealthd.training.page import Saved

POINTER = "latest"
FILES_A_LOOK = 512
"""Most files checked before other jobs have their turn."""
AGAIN = 300.0
"""Seconds after which an incomplete checkpoint is checked again: a network file system may show
another node's files late.
"""
REMEMBERED = 3
"""Number of checkpoints whose sizes are remembered."""


class _Pointed(NamedTuple):
    """The checkpoint that a `latest` names, and when the file was written."""

    directory: str
    tag: str
    written: int
    """Unix time in nanoseconds; a save that repeats its tag rewrites the file."""


class CheckpointWatch:
    """The state of one job's checkpoints; None is unknown."""

    def __init__(self) -> None:
        self.free: int | None = None
        """Bytes free where the job saves."""
        self.saved_at: float | None = None
        """Unix time at which the newest checkpoint was completed."""
        self.problems: Mapping[str, int] | None = None
        """Number of files of the newest checkpoint with each problem."""
        self._sizes: deque[int] = deque(maxlen=REMEMBERED)
        self._makes_room = False
        self._seen: _Pointed | None = None
        self._exists = False
        self._todo: list[str] = []
        self._files: dict[str, int] = {}
        self._truncated: list[str] = []
        self._universal = False
        self._finished: float | None = None
        """Monotonic time at which the last file was checked; None until then."""

    @property
    def next_size(self) -> int | None:
        """The expected bytes of the job's next checkpoint: those of the largest recent one.

        None while none is known, and if the job frees space by itself: it overwrites the last
        checkpoint, or has saved with less free space than that before.
        """
        return None if self._makes_room or not self._sizes else max(self._sizes)

    def look(self, root: Root, saved: Saved, now: float, has_time: Callable[[], bool]) -> None:
        """Check the checkpoint that a job saved, a few files at a time over several calls.

        `now` is monotonic. OSError if it cannot be read; ValueError if it is not a DeepSpeed
        checkpoint.
        """
        before, self.free = self.free, root.free(saved.directory)
        place = f"{saved.directory}/{POINTER}"
        status = root.look(place)
        if status is None:  # a job without DeepSpeed
            self._forget()
            return
        newest = _Pointed(saved.directory, pointed(root, place), status.st_mtime_ns)
        if newest != self._seen:
            self._makes_room = self._has_made_room(newest, before)
            self._forget()
            self._seen, self.saved_at = newest, status.st_mtime
            self._begin(root, newest)
        elif self._finished is not None and now - self._finished >= AGAIN and self._is_broken:
            self._begin(root, newest)
        if self._finished is None and self._go_on(root, newest, has_time):
            self._finished = now
            self._conclude(newest, saved)

    @property
    def _is_broken(self) -> bool:
        return self.problems is not None and any(self.problems.values())

    def _has_made_room(self, newest: _Pointed, before: int | None) -> bool:
        """Return whether the job saved with less free space than a checkpoint needs."""
        if self._seen is None:
            return False
        if self._seen[:2] == newest[:2]:
            return True
        if before is None or self.free is None or not self._sizes:
            return False
        return max(before, self.free) < max(self._sizes)

    def _forget(self) -> None:
        self.saved_at = self.problems = self._seen = None

    def _begin(self, root: Root, newest: _Pointed) -> None:
        """List a checkpoint's files to check; OSError, ValueError if it has too many."""
        self._files, self._truncated, self._todo = {}, [], []
        self._universal, self._finished = False, None
        check_tag(newest.tag, f"{newest.directory}/{POINTER}")
        folder = f"{newest.directory}/{newest.tag}"
        found = root.look(folder) if newest.tag else None
        self._exists = found is not None and stat.S_ISDIR(found.st_mode)
        if not self._exists:
            return
        names = root.names(folder, MAX_FILES + 1)
        if len(names) > MAX_FILES:
            message = f"{folder} has more than {MAX_FILES} files"
            raise ValueError(message)
        self._universal = "zero" in names
        self._todo = sorted(names, reverse=True)

    def _go_on(self, root: Root, newest: _Pointed, has_time: Callable[[], bool]) -> bool:
        """Check some of the checkpoint's files, and return whether all are done."""
        for _ in range(FILES_A_LOOK):
            if not self._todo or not has_time():
                break
            name = self._todo[-1]
            path = f"{newest.directory}/{newest.tag}/{name}"
            status = root.look(path)
            if status is not None and stat.S_ISREG(status.st_mode):
                opens = name.endswith(".pt") and status.st_size and len(self._files) < MAX_OPENED
                if opens and is_truncated(root, path):
                    self._truncated.append(name)
                self._files[name] = status.st_size
            self._todo.pop()  # only now, so that an unreadable file does not count as absent
        return not self._todo

    def _conclude(self, newest: _Pointed, saved: Saved) -> None:
        checkpoint = Checkpoint(
            directory=newest.directory,
            tag=newest.tag,
            pointer=POINTER,
            latest=newest.tag,
            files=self._files,
            truncated=tuple(self._truncated),
            is_universal=self._universal,
            tag_exists=self._exists,
            tags=(),
        )
        problems = {
            "no_directory": int(not self._exists),
            "empty": sum(not size for name, size in self._files.items() if name.endswith(".pt")),
            "cut_off": len(self._truncated),
        }
        if not saved.is_node_local and not self._universal:
            problems["missing"] = checkpoint.missing(saved.optimizer_files) if self._exists else 0
        if self._exists:
            if self.problems is not None and not self.problems["no_directory"]:  # checked again
                self._sizes.pop()
            self._sizes.append(sum(self._files.values()))
        self.problems = problems
