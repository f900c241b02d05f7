"""Remedies: commands for people to paste. They contain words chosen by users, so each is quoted.

A key of a configuration or the name of a file may hold anything. It stays one word of the command.
If a word has control characters, which a terminal would act on, there is no command at all.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import Result, critical, unknown

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.source import Source

_COMMON = frozenset({"type", "enabled", "device", "nvme_path", "ratio", "stages"})
"""Keys that several blocks of a configuration have."""


def paste(*words: str) -> str:
    """Return the remedy, a command of these words; empty if one of them is not printable."""
    return shlex.join(words) if all(word.isprintable() for word in words) else ""


def show(path: str) -> str:
    """Return the remedy that lists what is at a path."""
    return paste("ls", "-la", "--", path)


def unreadable(source: Source[Any], /, **more: str) -> Result:
    """Return the result for a source that cannot be read; one that hung may still be well."""
    text = f"{source.name}: {source.problem}" if source.hung else source.problem
    result = unknown if source.hung else critical
    return result(text, remedy=show(source.name), component=source.name, **more)


def find_key(file: str, path: str) -> str:
    """Return the command that shows a key of a configuration by its dotted path: its block, where
    other blocks have such a key too.
    """
    *above, key = path.split(".")
    options = ["-A9"] if above and key in _COMMON else []
    shown = above[-1] if options else key
    return paste("grep", "-nF", *options, "-e", f'"{shown}"', "--", file)


def at_key(
    file: str,
    path: str,
    text: str,
    make: Callable[..., Result] = critical,
    *,
    source: str = "",
    shown: str = "",
) -> Result:
    """Return the result about a key of a configuration, with the command that shows it, or the key
    `shown`, which is there.
    """
    return make(
        f"{file}: {text}",
        find_key(file, shown or path),
        source=source,
        component=f"{file}: {path}",
    )
