"""Bundles: directories of evidence below the agent's state, named by time and job.

Only the agent's user can read them.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.host import read

if TYPE_CHECKING:
    from pathlib import Path

SUMMARY = "summary.txt"
_USER = "user.txt"
"""File with the uid of the bundle's job; absent if evidence was taken by hand."""
_NAME = re.compile(r"(\d{8}T\d{6}Z)-([A-Za-z0-9_.-]{1,80}?)(?:-again(\d+))?")
_FILE = re.compile(r"[a-z0-9][a-z0-9.-]{0,80}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_TIME = "%Y%m%dT%H%M%SZ"


class BundleRefused(Exception):
    """No bundle can be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A bundle on the disk."""

    name: str
    job: str
    taken: float
    """Unix time at which it was begun."""


def parse_name(name: str) -> Kept | None:
    """Return the bundle that a directory's name denotes; None if it is not a bundle's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        taken = time.strptime(match[1], _TIME)
    except (ValueError, ArithmeticError):
        return None
    return Kept(name, match[2], float(calendar.timegm(taken)))


def bundles_in(directory: Path) -> list[Kept]:
    """Return the bundles in a directory, oldest first; none if it does not exist. Reads the disk.

    OSError if it cannot be listed.
    """
    try:
        return bundles_among(os.listdir(directory))
    except FileNotFoundError:
        return []


def bundles_among(names: Iterable[str]) -> list[Kept]:
    """Return the bundles among the names in a directory, oldest first."""
    found = [bundle for name in names if (bundle := parse_name(name)) is not None]
    return sorted(found, key=lambda bundle: (bundle.taken, bundle.name))


def size(directory: str | Path) -> int:
    """Return the total bytes of the files in a bundle's directory and below."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # of a bundle that is being made
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


class Bundle:
    """A new bundle with a limit on its bytes.

    Its files are opened through its directory's descriptor, so a replaced path changes nothing.
    """

    def __init__(self, path: Path, max_bytes: int, owner: tuple[int, int]) -> None:
        """Make the directory. `hand_over` gives it to `owner` (user and group). OSError."""
        os.mkdir(path, 0o700)
        self.path = path
        self.full = False
        """Whether something was cut or left out at the limit."""
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._owner = owner
        self._left = max_bytes

    def append(self, name: str, data: bytes) -> None:
        """Append to a file of the bundle; data beyond the limit is left out.

        ValueError if the file name is invalid. OSError.
        """
        if not _FILE.fullmatch(name):
            raise ValueError(f"not a valid name for an evidence file: {name[:100]!r}")
        self.full = self.full or len(data) > self._left
        data = data[: self._left]
        self._left -= len(data)
        with os.fdopen(self._open(name, os.O_APPEND), "wb") as file:
            file.write(data)

    def read(self, name: str) -> bytes:
        """Return the content of a file of the bundle. OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=self._directory), "rb") as file:
            return file.read()

    def summarize(self, text: str) -> None:
        """Replace the bundle's summary atomically; the limit does not apply to it. OSError."""
        new = f".{SUMMARY}"
        with os.fdopen(
            self._open(new, os.O_TRUNC), "w", encoding="utf-8", errors="replace"
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, SUMMARY, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def hand_over(self) -> None:
        """Give the bundle to its owner, if another user took it by hand. OSError."""
        if self._owner[0] != os.geteuid():
            for name in os.listdir(self._directory):
                os.chown(name, *self._owner, dir_fd=self._directory, follow_symlinks=False)
            os.fchown(self._directory, *self._owner)

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory)


def _place(directory: Path) -> tuple[int, int]:
    """Make the directory of all bundles if it does not exist, and return its user and group.

    `BundleRefused` if others can read it, OSError.

    It belongs to the owner of its parent directory, the agent's user. Only root may keep bundles
    for another user.
    """
    above = os.stat(directory.parent)
    try:
        os.mkdir(directory, 0o700)
        if above.st_uid != os.geteuid():
            os.chown(directory, above.st_uid, above.st_gid)
    except FileExistsError:
        pass
    found = os.lstat(directory)
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        or (os.geteuid() and found.st_uid != os.geteuid())
    ):
        message = f"{directory} is not a directory that only its owner, the agent's user, can read"
        raise BundleRefused(message)
    return found.st_uid, found.st_gid


def make(
    directory: Path,
    job: str,
    now: float,
    *,
    user: int | None = None,
    max_bundles: int,
    max_bytes: int,
    bundle_bytes: int,
    min_free: int,
) -> Bundle:
    """Make a new bundle below a directory, after removing the oldest ones if the limits require it.

    `now` is Unix time; all sizes are in bytes. Bundles of the user who has most are removed, the
    new bundle included in the count, so that one user's many jobs do not displace another's
    evidence. `BundleRefused` if less than `min_free` would remain on the file system, OSError.
    """
    owner = _place(directory)
    for old in _surplus(directory, max_bundles, max_bytes, user, bundle_bytes):
        # Before the free space is checked, which this increases.
        with contextlib.suppress(FileNotFoundError):  # another collection has removed it
            shutil.rmtree(directory / old)
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if free < min_free + bundle_bytes:
        raise BundleRefused(
            f"{directory}: {free >> 20} MiB are free, and {min_free >> 20} MiB must be left "
            f"after a bundle of {bundle_bytes >> 20} MiB"
        )
    stem = f"{time.strftime(_TIME, time.gmtime(now))}-{_UNSAFE.sub('_', job)[:80] or 'all'}"
    name, number, bundle = stem, 1, None
    while bundle is None:
        try:
            bundle = Bundle(directory / name, bundle_bytes, owner)
        except FileExistsError:  # of the same second
            number += 1
            name = f"{stem}-again{number}"
    if user is not None:
        bundle.append(_USER, b"%d\n" % user)
    return bundle


def _surplus(
    directory: Path, most: int, most_bytes: int, user: int | None, size_of_new: int
) -> Iterator[str]:
    """Yield the bundles to remove before a user's new one.

    These are the oldest of the user who has most: by count if there are too many bundles, by bytes
    if they are too large.
    """
    bundles = [(bundle.name, _user(directory / bundle.name)) for bundle in bundles_in(directory)]
    sizes = {name: size(directory / name) for name, _ in bundles}
    while bundles:
        shares, room = Counter[int | None]({user: 1}), Counter[int | None]({user: size_of_new})
        for name, owner in bundles:
            shares[owner] += 1
            room[owner] += sizes[name]
        # By the limit that is exceeded: a large bundle is not removed because of many small ones.
        if shares.total() > most:
            share = shares
        elif room.total() > most_bytes:
            share = room
        else:
            return
        owners = {owner for _, owner in bundles}
        greatest = max(share[owner] for owner in owners)
        oldest = next(entry for entry in bundles if share[entry[1]] == greatest)
        bundles.remove(oldest)
        yield oldest[0]


def _user(bundle: Path) -> int | None:
    """Return the uid of a bundle's job; None if it is not recorded."""
    try:
        return int(read(str(bundle / _USER)))
    except (OSError, ValueError, ArithmeticError):
        return None
