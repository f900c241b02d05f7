"""Reading a source of a job: a file or directory that a user named, and its content."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dshealthd.jobs.environment import MAX_VALUE
from dshealthd.linux.forked import Emit, Pool
from dshealthd.linux.process_root import Root

T = TypeVar("T")

READ_DEADLINE = 4.0
"""Seconds for one file or directory; a healthy network file system answers in milliseconds."""
MAX_BYTES = 1 << 18
"""Bytes of a configuration, script or manifest: Slurm accepts scripts of 4 MiB, and Kubernetes
objects of 1.5, but those that people write have a few KiB.
"""
MAX_ENVIRONMENT = 1 << 20
"""Bytes of `.deepspeed_env`; the kernel passes a program 128 KiB of each variable (execve(2))."""
_PREFIXES = ("NCCL_", "PET_", "TORCH_NCCL_", "CUDA_", "SLURM_", "DEEPSPEED_", "DS_", "GLOO_")
_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("LD_LIBRARY_PATH", "ACCELERATE_DISABLE_NCCL"),
    }
)


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """A file or directory, by the name the user gave, and its content or why there is none."""

    name: str
    value: T | None = None
    problem: str = ""
    """Why there is no value: unreadable, too large, or hung."""
    hung: bool = False
    """Whether it did not answer by its deadline: what it holds is unknown, not wrong."""


def read_all(
    readers: Mapping[str, Callable[[], Any]], deadline: float = READ_DEADLINE
) -> dict[str, Source[Any]]:
    """Read sources in parallel, each in its own process that is killed at its deadline.

    A reader returns a JSON value, or raises OSError or ValueError with the reason.
    """
    pool = Pool()
    try:
        for name, reader in readers.items():
            pool.start(name, functools.partial(_read, reader=reader), deadline)
        return {
            one.name: Source(one.name, one.value, one.problem, one.hung) for one in pool.ended()
        }
    finally:
        pool.close()


def _read(_emit: Emit, reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except OSError as error:
        if error.filename and error.strerror:  # in a shell's words, without the number
            raise OSError(f"{error.filename}: {error.strerror}") from error
        raise


def read_owned(path: str, limit: int) -> bytes:
    """Return the content of a regular file, read with the rights of its owner.

    OSError; ValueError if it holds more than `limit` bytes. Anything but a regular file is refused
    without being opened.
    """
    absolute = os.path.abspath(path)
    with Root.of_owner(Path("/"), absolute) as root:
        content = root.read(absolute, limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} is larger than {limit >> 10} KiB, the limit")
    return content


def read_text(path: str, limit: int) -> str:
    """Return the content of a text file; ValueError names the line that is not UTF-8. OSError."""
    content = read_owned(path, limit)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: byte {content[error.start]:#04x} is not UTF-8") from error


def variables_in_deepspeed_env() -> list[str]:
    """Return the variables that `deepspeed` passes on to every node, from `.deepspeed_env`.

    It reads that file in the home and in this directory (launcher/runner.py,
    DEEPSPEED_ENVIRONMENT_PATHS).
    OSError; ValueError if one is too large or not UTF-8.
    """
    names: set[str] = set()
    for directory in (os.path.expanduser("~"), "."):
        path = os.path.join(directory, os.environ.get("DS_ENV_FILE", ".deepspeed_env"))
        try:
            text = read_text(path, MAX_ENVIRONMENT)
        except FileNotFoundError:
            continue
        names |= {line.partition("=")[0] for line in text.splitlines() if "=" in line}
    return sorted(names)


def training_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter to training; the rest may hold secrets."""
    return {
        name: value
        for name, value in variables.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and len(value) <= MAX_VALUE
    }


def count_gpus() -> int:
    """Return how many GPUs this node has; ValueError if NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        raise ValueError(str(error)) from error
