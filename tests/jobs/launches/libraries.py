"""Builds a library with NCCL's exported names and nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nccl.c")
PUSH = ("-O0", "-fcf-protection=none")
ENDBR64 = ("-O0", "-fcf-protection=full")
MOVES = (*PUSH, "-DMOVES")
OTHER = ("-O2", "-fcf-protection=none")
"""Options of the compiler, by what each function begins with."""


def build(folder: Path, options: tuple[str, ...] = PUSH) -> Path:
    """Return the folder of the libraries, in which rank.py looks for both."""
    folder.mkdir()
    nccl = folder / "libnccl.so.2"
    command = ["gcc", "-shared", "-fPIC", *options, "-Wl,-soname,libnccl.so.2", str(SOURCE)]
    subprocess.run([*command, "-o", str(nccl)], check=True, timeout=120)
    (folder / "libcudart.so").symlink_to(nccl.name)
    return folder
