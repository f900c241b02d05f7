"""The environment file of a job: the variables that matter to training, without secrets."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources.source import read_text
from dshealthd.jobs.environment import MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ENVIRONMENT = 1 << 20
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "SLURM_", "DEEPSPEED_", "DS_", "GLOO_")
_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("LD_LIBRARY_PATH", "ACCELERATE_DISABLE_NCCL"),
    }
)


def read(path: str) -> dict[str, str]:
    """Return the variables in a file of NAME=VALUE lines, or of `env -0`.

    OSError; ValueError names the first entry that is not a variable.
    """
    text = read_text(path, MAX_ENVIRONMENT)
    lines = text.split("\0") if "\0" in text else text.splitlines()
    pairs = [
        line.strip().removeprefix("export ").partition("=")
        for line in lines
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            message = f"{path}: {json.dumps(name[:60])} is not NAME=VALUE"
            raise ValueError(message)
    return kept({name: value.strip("\"'") for name, _, value in pairs})


def taken_to_all_nodes() -> list[str]:
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


def kept(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter to training; the rest may hold secrets."""
    return {
        name: value
        for name, value in variables.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and len(value) <= MAX_VALUE
    }
