"""Remedies: commands for people to paste. They contain words chosen by users, so each is quoted.

A key of a configuration or the name of a file may hold anything. It stays one word of the command.
If a word has control characters, which a terminal would act on, there is no command at all.
"""

from __future__ import annotations

import shlex


def paste(*words: str) -> str:
    """Return the command made of these words; empty if one of them is not printable."""
    return shlex.join(words) if all(word.isprintable() for word in words) else ""


def show(path: str) -> str:
    """Return the command that lists what is at a path."""
    return paste("ls", "-la", "--", path)


def find_key(path: str, key: str, *options: str) -> str:
    """Return the command that finds a key in a configuration; `options` are grep's."""
    return paste("grep", "-nF", *options, "-e", f'"{key}"', "--", path)


def edit(path: str, script: str, *options: str) -> str:
    """Return the command that edits a file with a sed script; `options` are sed's."""
    return paste("sed", "-i", *options, "-e", script, "--", path)


def add_key(path: str, key: str, value: str) -> str:
    """Return the command that adds a key at the start of a configuration."""
    return edit(path, f'0,/{{/s//{{\\n  "{key}": {value},/')
