"""Remedies: commands for people to paste, of words that users chose: each word is quoted.

A key of a configuration or the name of a file may hold anything. It stays one word of the command,
and a word with control characters, which a terminal would act on, makes no command at all.
"""

from __future__ import annotations

import shlex


def paste(*words: str) -> str:
    """Return a remedy's command of these words; empty if one of them cannot be shown."""
    return shlex.join(words) if all(word.isprintable() for word in words) else ""


def show(path: str) -> str:
    """Return the remedy's command that says what is at a path."""
    return paste("ls", "-la", "--", path)


def find_key(path: str, key: str, *options: str) -> str:
    """Return the remedy's command that finds a key in a configuration; `options` are of grep."""
    return paste("grep", "-nF", *options, "-e", f'"{key}"', "--", path)


def edit(path: str, script: str, *options: str) -> str:
    """Return the remedy's command that changes a file by a script of sed; `options` are of sed."""
    return paste("sed", "-i", *options, "-e", script, "--", path)


def add_key(path: str, key: str, value: str) -> str:
    """Return the remedy's command that puts a key first into a configuration."""
    return edit(path, f'0,/{{/s//{{\\n  "{key}": {value},/')
