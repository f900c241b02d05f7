"""Runs every benchmark and prints its tables, one section each: `./dev bench [NAME …]`."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Run the named benchmarks, or all.

    Each in a process of its own, so that none inherits another's memory.
    """
    names = sys.argv[1:] or sorted(
        file.stem.removeprefix("bench_") for file in HERE.glob("bench_*.py")
    )
    print(
        f"Linux {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}\n",
        flush=True,
    )
    for name in names:
        module = importlib.import_module(f"bench.bench_{name}")
        print(f"## `{name}`\n\n{(module.__doc__ or '').strip()}\n", flush=True)
        subprocess.run([sys.executable, "-m", module.__name__], check=True, cwd=HERE.parent)


if __name__ == "__main__":
    main()
