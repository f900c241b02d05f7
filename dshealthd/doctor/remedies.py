"""Remedies: commands for people to paste. They contain words chosen by users, so each is quoted.

A key of a configuration or the name of a file may hold anything. It stays one word of the command.
If a word has control characters, which a terminal would act on, there is no command at all.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import Result, critical, unknown

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.source import Source


def paste(*words: str) -> str:
    """Return the command made of these words; empty if one of them is not printable."""
    return shlex.join(words) if all(word.isprintable() for word in words) else ""


def show(path: str) -> str:
    """Return the command that lists what is at a path."""
    return paste("ls", "-la", "--", path)


def unreadable(source: Source[Any], /, **more: str) -> Result:
    """Return the result for a source that cannot be read; one that hung may still be well."""
    text = f"{source.name}: {source.problem}" if source.hung else source.problem
    result = unknown if source.hung else critical
    return result(text, remedy=show(source.name), component=source.name, **more)


def find_key(path: str, key: str, *options: str) -> str:
    """Return the command that finds a key in a configuration; `options` are grep's."""
    return paste("grep", "-nF", *options, "-e", f'"{key}"', "--", path)
