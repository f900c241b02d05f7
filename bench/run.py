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
    """Run the named benchmarks, or all but packages.

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
        # A package takes hours, and runs only by its name.
        module = f"bench.{name}" if (HERE / name).is_dir() else f"bench.bench_{name}"
        text = importlib.import_module(module).__doc__ or ""
        print(f"## `{name}`\n\n{text.strip()}\n", flush=True)
        subprocess.run([sys.executable, "-m", module], check=True, cwd=HERE.parent)


if __name__ == "__main__":
    main()
