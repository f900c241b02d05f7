"""Generated files: written, or with `--check` compared with what is there."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path


def write(files: Mapping[Path, str], *, check: bool, there: Iterable[Path] = ()) -> int:
    """Write files whose text differs, and remove those of `there` that are not among them; with
    `check` name them instead, and return 1 if there are any.
    """
    stale = {
        file
        for file, text in files.items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    } | ({*there} - files.keys())
    for file in sorted(stale):
        if check:
            print(f"{file} is out of date: run ./dev generate", file=sys.stderr)
        elif file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(files[file], encoding="utf-8")
        else:
            file.unlink()
    return int(check and bool(stale))


def main(
    program: str,
    documents: Callable[[], Mapping[Path, str]],
    arguments: list[str] | None = None,
) -> int:
    """Write or check the documents, for a `program` that has no other arguments; return 1 if one is
    out of date.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="Write its files.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    return write(documents(), check=parser.parse_args(arguments).check)
