"""The arguments that describe a job: its configuration, hostfile, command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dshealthd.jobs.environment import natural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that describe a job."""
    group = parser.add_argument_group(
        "job", "inputs of a job, with --job; put its launcher command after --"
    )
    group.add_argument("--job", action="store_true", help="check a job that is about to start")
    group.add_argument("--deepspeed-config", metavar="FILE", help="DeepSpeed configuration")
    group.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile")
    group.add_argument("--checkpoint", metavar="DIR", help="checkpoint that the job will load")
    group.add_argument(
        "--tag", default="", help="tag of that checkpoint (default: from its file `latest`)"
    )
    group.add_argument(
        "--python",
        metavar="PYTHON",
        action="append",
        default=[],
        help=(
            "interpreter of a training environment to check; may be repeated. With --job, the "
            "first one runs its DeepSpeed on the configuration"
        ),
    )
    group.add_argument("--ranks", metavar="COUNT", type=positive, help="total ranks of the job")
    group.add_argument(
        "--model-parallel",
        metavar="COUNT",
        type=positive,
        default=1,
        help="ranks that share one copy of the model: tensor x pipeline x sequence (default: 1)",
    )
    group.add_argument("--gpus-per-node", metavar="COUNT", type=positive, help="GPUs per node")
    group.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help=(
            "batch script, Kubernetes manifest, or configuration of Accelerate (YAML) or "
            "DeepSpeed (JSON); never run"
        ),
    )


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; what follows `--` is the launcher command, its words as `launch`."""
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    options.launch = words[at + 1 :]
    return options


def positive(text: str) -> int:
    """Return the positive whole number in an argument."""
    found = natural(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return found
