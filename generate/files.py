"""Generated files: written, or with `--check` compared with what is there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write(files: Mapping[Path, str], *, check: bool) -> int:
    """Write files whose text differs; with `check` name them instead, and return 1 if there are
    any.
    """
    stale = {
        file: text
        for file, text in files.items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    }
    for file, text in stale.items():
        if check:
            print(f"{file} is out of date: run ./dev generate", file=sys.stderr)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return int(check and bool(stale))
