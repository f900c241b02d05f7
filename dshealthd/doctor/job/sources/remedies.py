"""Remedies: commands for people to paste. They contain words chosen by users, so each is quoted.

A key of a configuration or the name of a file may hold anything. It stays one word of the command.
If a word has control characters, which a terminal would act on, there is no command at all.

A command that edits a configuration is offered only where it changes the one key that is meant. In
every other case the command shows the line, and a person decides.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from dshealthd.doctor.check import Result, critical, unknown

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.deepspeed_config import Parsed
    from dshealthd.doctor.job.sources.source import Source

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
"""A key without characters that are special to sed."""
_SED = ("sed", "-i", "--follow-symlinks", "-E", "-e")
"""Without --follow-symlinks, sed replaces a link to a shared configuration by a private copy."""


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


def rename_key(config: Source[Parsed], key: str, right: str) -> str:
    """Return the command that renames a key of a configuration, or else the one that shows it."""
    if _uses(config, key) != 1 or _uses(config, right):
        return find_key(config.name, key)
    return paste(*_SED, f's/"{key}"([[:space:]]*:)/"{right}"\\1/', "--", config.name)


def set_number(config: Source[Parsed], key: str, value: int) -> str:
    """Return the command that gives a key another number, or else the one that shows it."""
    if _uses(config, key) != 1:
        return find_key(config.name, key)
    return paste(
        *_SED, f's/("{key}"[[:space:]]*:[[:space:]]*)[0-9]+/\\1{value}/', "--", config.name
    )


def add_key(config: Source[Parsed], key: str, value: str) -> str:
    """Return the command that adds a key at the start, or else one that shows the place."""
    if (uses := _uses(config, key)) is None:
        return paste("cat", "--", config.name)
    if uses:
        return find_key(config.name, key)
    return paste(*_SED, f'0,/\\{{/s//{{\\n  "{key}": {value},/', "--", config.name)


def _uses(config: Source[Parsed], key: str) -> int | None:
    """Return how many blocks of a configuration have a key; None where sed may not edit it.

    That is a file which is not plain JSON, as Hjson writes keys without quotes and has comments,
    and one in which a block has a key twice.
    """
    parsed = config.value
    if parsed is None or not parsed["document"] or parsed["duplicates"]:
        return None
    return _count(parsed["document"], key) if _PLAIN.fullmatch(key) else None


def _count(value: Any, key: str) -> int:
    if isinstance(value, dict):
        return (key in value) + sum(_count(below, key) for below in value.values())
    return sum(_count(below, key) for below in value) if isinstance(value, list) else 0
