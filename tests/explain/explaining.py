"""Explaining logs in tests, given as lines or as paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.explain import command
from dshealthd.explain.input import Raw
from dshealthd.explain.recognition import Recognizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dshealthd.explain.causality import Finding


def explained(*lines: str) -> Finding:
    """Explain one log of some lines."""
    return explained_files({"job.out": lines})


def explained_files(files: Mapping[str, Iterable[str]]) -> Finding:
    """Explain the lines of files by their names; all of them are looked at."""
    recognizer = Recognizer()
    for name, lines in files.items():
        recognizer.add(name, [Raw(number, line) for number, line in enumerate(lines, 1)])
    return command.conclude(recognizer)


def explained_paths(*paths: Path) -> Finding:
    """Explain files and folders, all of which can be read."""
    recognizer, unread = command.read([*map(str, paths)])
    assert unread == []
    return command.conclude(recognizer)


def explained_text(folder: Path, text: str) -> Finding:
    """Explain a text as the log `job.out` in a folder."""
    (folder / "job.out").write_text(text)
    return explained_paths(folder / "job.out")
