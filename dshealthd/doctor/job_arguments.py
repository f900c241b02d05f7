"""The arguments by which a user says what a job is: its configuration, hostfile, command."""

from __future__ import annotations

import argparse
import re

from dshealthd.core.options import Bytes
from dshealthd.jobs.environment import natural

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,6})?(?:e\d{1,2})?)([kmbgt]?)", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments by which a user can describe a job."""
    group = parser.add_argument_group("job", "what a job is started from, with --job")
    group.add_argument("--job", action="store_true", help="check a job about to start")
    group.add_argument("--deepspeed-config", metavar="FILE", help="DeepSpeed configuration")
    group.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile")
    group.add_argument(
        "--launch", metavar="COMMAND", help="launcher command in one word; it is not run"
    )
    group.add_argument("--slurm-script", metavar="FILE", help="Slurm batch script; it is not run")
    group.add_argument(
        "--environment",
        metavar="FILE",
        help="variables of the job as NAME=VALUE lines; those of this shell without it",
    )
    group.add_argument("--checkpoint", metavar="DIR", help="checkpoint that the job will load")
    group.add_argument(
        "--tag", default="", help="tag of that checkpoint; what its file `latest` says without it"
    )
    group.add_argument(
        "--python",
        metavar="PYTHON",
        action="append",
        default=[],
        help="interpreter of a training environment, read from its files; may be repeated. With "
        "--job the first is run, so that its DeepSpeed reads the configuration",
    )
    group.add_argument(
        "--parameters",
        metavar="COUNT",
        type=count,
        help="parameters of the model, such as 7e9 or 7B",
    )
    group.add_argument(
        "--largest-layer",
        metavar="COUNT",
        type=count,
        default=0,
        help="parameters of its largest layer, for the memory of ZeRO 3",
    )
    group.add_argument("--ranks", metavar="COUNT", type=positive, help="ranks of the job in all")
    group.add_argument(
        "--model-parallel",
        metavar="COUNT",
        type=positive,
        default=1,
        help="ranks that share one copy of the model: tensor x pipeline x sequence; 1 without it",
    )
    group.add_argument("--gpus-per-node", metavar="COUNT", type=positive, help="GPUs of each node")
    group.add_argument(
        "--gpu-memory", metavar="SIZE", type=size, help="memory of each GPU, such as 80GiB"
    )


def count(text: str) -> int:
    """Return the number that an argument such as `7e9`, `7B` or `350M` writes."""
    match = _COUNT.fullmatch(text)
    if match is None:
        message = f"{text!r} is no number such as 7e9 or 7B"
        raise argparse.ArgumentTypeError(message)
    return int(float(match[1]) * _UNITS[match[2].lower()])


def positive(text: str) -> int:
    """Return the number from 1 on that an argument writes."""
    found = natural(text)
    if not found:
        message = f"{text!r} is no number from 1 on"
        raise argparse.ArgumentTypeError(message)
    return found


def size(text: str) -> int:
    """Return bytes of an argument such as `80GiB`, as the configuration writes sizes."""
    try:
        return Bytes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
