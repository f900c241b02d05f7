"""The watch of one running job's checkpoints, with its user's rights, a few files at a time.

It checks the checkpoint that DeepSpeed's `latest` names, once after each save: names, sizes and the
last bytes of files. It must not be called during a save, when the checkpoint is incomplete without
being broken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.jobs.checkpoint_files import Checkpoint, Scan, check_tag, read_tag

if TYPE_CHECKING:
    from dshealthd.linux.process_root import Root
    from dshealthd.training.saved import Saved

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
        """Bytes free where the job saves; None also where its file system has no size."""
        self.problems: Mapping[str, int] | None = None
        """Number of files of the newest checkpoint with each problem."""
        self._sizes: deque[int] = deque(maxlen=REMEMBERED)
        self._makes_room = False
        self._seen: _Pointed | None = None
        self._scan: Scan | None = None
        """The look at its files in progress."""
        self._finished: float | None = None
        """Monotonic time at which the last file was checked; None until then."""

    @property
    def next_size(self) -> int | None:
        """The expected bytes of the job's next checkpoint: those of the largest recent one.

        None while none is known, and if the job frees space by itself: it overwrites the last
        checkpoint, or has saved with less free space than that before.
        """
        return None if self._makes_room or not self._sizes else max(self._sizes)

    def check(self, root: Root, saved: Saved, now: float, has_time: Callable[[], bool]) -> None:
        """Check the checkpoint that a job saved, a few files at a time over several calls.

        `now` is monotonic. OSError if it cannot be read; ValueError if it is not a DeepSpeed
        checkpoint.
        """
        before, self.free = self.free, root.free(saved.directory)
        place = f"{saved.directory}/{POINTER}"
        status = root.stat(place) if saved.is_deepspeed else None
        if status is None:
            self._forget()
            return
        newest = _Pointed(saved.directory, read_tag(root, place), status.st_mtime_ns)
        if newest != self._seen:
            self._makes_room = self._has_made_room(newest, before)
            self._forget()
            self._seen = newest
            self._begin(root, newest)
        elif self._finished is not None and now - self._finished >= AGAIN and self._is_broken:
            self._begin(root, newest)
        if (scan := self._scan) is None:
            return
        for _ in range(FILES_A_LOOK):
            if not scan.todo:
                break
            if not has_time():
                return
            scan.check(root)
        if not scan.todo:
            self._scan, self._finished = None, now
            self._conclude(scan, saved)

    @property
    def _is_broken(self) -> bool:
        return any((self.problems or {}).values())

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
        self.problems = self._seen = None

    def _begin(self, root: Root, newest: _Pointed) -> None:
        """List a checkpoint's files to check; OSError, ValueError if it has too many."""
        self._scan = self._finished = None
        check_tag(newest.tag, f"{newest.directory}/{POINTER}")
        self._scan = Scan(root, newest.directory, newest.tag)

    def _conclude(self, scan: Scan, saved: Saved) -> None:
        problems = {
            "no_directory": int(not scan.exists),
            "empty": sum(not size for name, size in scan.files.items() if name.endswith(".pt")),
            "cut_off": len(scan.truncated),
        }
        if not saved.is_node_local and not scan.is_universal:
            missing = Checkpoint(files=scan.files).missing(saved.optimizer_files)
            problems["missing"] = missing if scan.exists else 0
        if scan.exists:
            if self.problems is not None and not self.problems["no_directory"]:  # checked again
                self._sizes.pop()
            self._sizes.append(sum(scan.files.values()))
        self.problems = problems
