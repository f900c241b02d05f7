"""The arguments of each command besides the configuration flags."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshealthd.config.flags import EXIT_USAGE, FlagParser, add_flags, declare_access, seconds
from dshealthd.jobs.launches import OUTPUT


def no_arguments(_parser: ArgumentParser) -> None:
    """Declare no arguments of a command."""


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    name: str
    function: Callable[..., int]
    """Receives an `Invocation`, and its own arguments by name. Its docstring is the description."""
    examples: tuple[str, ...]
    declare: Callable[[ArgumentParser], None] = no_arguments
    exit_usage: int = EXIT_USAGE
    """Exit status for bad usage or configuration; differs where 2 is a verdict."""
    forgives: bool = False
    """Whether it helps on a node whose installed configuration has errors, too: it tells them."""


def declare(commands: Any, command: Command) -> None:
    """Add a command to the subparsers: its own arguments first, then the configuration flags."""
    description = inspect.getdoc(command.function) or ""
    examples = "\n".join(f"  {example}" for example in command.examples)
    parser: FlagParser = commands.add_parser(
        command.name,
        help=description.split("\n", 1)[0],
        description=description,
        epilog=f"examples:\n{examples}",
    )
    parser.exit_usage = command.exit_usage
    before = len(parser._actions)  # noqa: SLF001 - argparse has no other way to list them
    command.declare(parser)
    own = tuple(action.dest for action in parser._actions[before:])  # noqa: SLF001
    add_flags(parser, listed=command.name == "run")
    parser.set_defaults(
        command=command.function, own=own, exit_usage=command.exit_usage, forgives=command.forgives
    )


def query(parser: ArgumentParser) -> None:
    """Declare the arguments that select the queried agents and the output."""
    parser.add_argument(
        "nodes",
        nargs="*",
        metavar="NODE",
        help="nodes to query, HOST or HOST:PORT (default: this one)",
    )
    parser.add_argument(
        "--members",
        action="store_true",
        help=(
            "query the agents of all probe members: those in --config.file, else those that "
            "this node's agent lists (without sending them a password)"
        ),
    )
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print one JSON document; docs/status-api.md describes its fields",
    )
    declare_access(parser)


def jobs(parser: ArgumentParser) -> None:
    """Declare the arguments of `jobs`: the queried agents, and what to print instead."""
    query(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--history",
        action="store_true",
        help=(
            "print the attempts of each job within 90 days instead: when, which steps, why each "
            "ended"
        ),
    )
    instead.add_argument(
        "--report",
        metavar="JOB",
        help=(
            "print where the time of this job went instead; JOB is its label `training_job`, or "
            "the name of its run"
        ),
    )
    instead.add_argument(
        "--exclude",
        metavar="JOB",
        help=(
            "print the nodes whose own faults hit this job or run instead, for `sbatch "
            "--exclude`; JOB as in --report"
        ),
    )


def launches(parser: ArgumentParser) -> None:
    """Declare the arguments of `launches`: where it writes."""
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        default=Path(OUTPUT),
        help="file for the counts, as `collectors.job_launches.file` has it",
    )


def history(parser: ArgumentParser) -> None:
    """Declare the arguments of `history`: the queried agents, the output, and how far back."""
    query(parser)
    parser.add_argument(
        "--since",
        metavar="DURATION",
        default="30d",
        help='how far back, such as "12h" or "90d" (default: %(default)s)',
    )


def targets(parser: ArgumentParser) -> None:
    """Declare the arguments of `targets`: its source and its output."""
    parser.add_argument(
        "--hostfile", metavar="FILE", help="DeepSpeed hostfile (default: the configured members)"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file to replace; unchanged if the members are unknown (default: stdout)",
    )


def evidence(parser: ArgumentParser) -> None:
    """Declare the argument of `evidence` that selects the job."""
    parser.add_argument(
        "--job", metavar="JOB", help="one job, by its label `training_job` (default: all jobs)"
    )
    declare_access(parser)


def keys(parser: ArgumentParser) -> None:
    """Declare the arguments of `keys`: the action, and the key file."""
    parser.add_argument("action", choices=["new", "rotate", "show"], help="what to do")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="key file (default: probe.peer.key_file, else /etc/dshealthd/probe.key)",
    )


def maintenance(parser: ArgumentParser) -> None:
    """Declare the arguments of `maintenance`: the action, its duration and reason."""
    parser.add_argument("action", choices=["on", "off", "show"], help="what to do")
    parser.add_argument(
        "--for",
        dest="duration",
        metavar="DURATION",
        help='duration, such as "30m" or "12h" (default: 2h)',
    )
    parser.add_argument(
        "--reason", metavar="TEXT", help="reason shown with the node (default: none)"
    )


def test_alert(parser: ArgumentParser) -> None:
    """Declare the arguments of `test-alert`: its destination, severity and wait."""
    parser.add_argument(
        "--alertmanager",
        metavar="URL",
        default="http://127.0.0.1:9093",
        help="Alertmanager's address (default: %(default)s)",
    )
    parser.add_argument(
        "--prometheus", metavar="URL", help="Prometheus' address, checked first (default: none)"
    )
    parser.add_argument(
        "--severity",
        choices=["critical", "warning"],
        default="critical",
        help="critical pages, warning opens a ticket (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=seconds,
        default=30.0,
        help="how long to wait for the notification (default: %(default)g)",
    )


def slurm(parser: ArgumentParser) -> None:
    """Declare the argument of `slurm`: the hook it runs as."""
    parser.add_argument("hook", choices=["health", "prolog", "epilog"], help="Slurm hook")


def probe(parser: ArgumentParser) -> None:
    """Declare the arguments of `probe`."""
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="DeepSpeed hostfile: probe every pair of its nodes, through their agents "
        "(default: this machine alone)",
    )
    parser.add_argument(
        "--kind",
        choices=["local", "pair", "rail", "light"],
        help="kind of round (default: local, or pair with a hostfile)",
    )
    parser.add_argument(
        "--size",
        metavar="BYTES,...",
        help="payloads of the all-reduces, such as 8,32K,64M (default: six from 8 to 64M)",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        metavar="N",
        help="timed runs per size; the median counts (default: 20 up to 1M, 5 above)",
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print one JSON document"
    )
