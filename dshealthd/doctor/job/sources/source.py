"""Reading a source of a job: a file or directory that a user named, and its content."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dshealthd.evidence import step
from dshealthd.linux.process_files import Root

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

READ_DEADLINE = 4.0
"""Seconds for one file or directory; a healthy network file system answers in milliseconds."""
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """A file or directory, by the name the user gave, and its content or why there is none."""

    name: str
    value: T | None = None
    problem: str = ""
    """Why there is no value: unreadable, too large, or hung."""
    hung: bool = False
    """Whether it did not answer by its deadline: what it holds is unknown, not wrong."""


def read_all(
    readers: Mapping[str, Callable[[], Any]], deadline: float = READ_DEADLINE
) -> dict[str, Source[Any]]:
    """Read sources in parallel, each in its own process that is killed at its deadline.

    A reader returns a JSON value, or raises OSError or ValueError with the reason.
    """
    starts = [functools.partial(_start, name, reader, deadline) for name, reader in readers.items()]
    return {
        one.name: Source(one.name, one.answer, one.problem, one.hung)
        for one in step.run(starts, _AT_ONCE)
    }


def _start(name: str, reader: Callable[[], Any], deadline: float) -> step.RunningStep:
    return step.RunningStep(name, lambda _emit: reader(), deadline, 0, lambda _name, _data: None)


def read_owned(path: str, limit: int) -> bytes:
    """Return the content of a regular file, read with the rights of its owner.

    OSError; ValueError if it holds more than `limit` bytes. Anything but a regular file is refused
    without being opened.
    """
    place = os.path.abspath(path)
    with Root.of_owner(Path("/"), place) as root:
        content = root.read(place, limit + 1)
    if len(content) > limit:
        message = f"{path} is larger than {limit >> 10} KiB, the limit"
        raise ValueError(message)
    return content


def read_text(path: str, limit: int) -> str:
    """Return the content of a text file; ValueError names the line that is not UTF-8. OSError."""
    content = read_owned(path, limit)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"{path}:{line}: byte {content[error.start]:#04x} is not UTF-8"
        raise ValueError(message) from error
