"""The command `dshealthd`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
import typing
from pathlib import Path
from typing import Any

from dshealthd import __version__, config, logs
from dshealthd.config import SECTIONS, Config, ConfigError

EXIT_FAILURE = 1
EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 bad usage or configuration."""
    options = _parser().parse_args(arguments)
    flags = _flags(options)
    try:
        loaded = config.load(options.config_file, flags)
        logs.configure(loaded.log)
        command: typing.Callable[..., int] = options.command
        return command(loaded, options.config_file, flags, **{name: getattr(options, name) for name in options.own})
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE


def run(loaded: Config, file: Path | None, flags: dict[str, dict[str, Any]]) -> int:
    """Run the agent until SIGTERM or SIGINT."""
    from dshealthd.agent import Agent

    def announce(url: str) -> None:
        print(f"dshealthd {__version__}: page {url}  metrics {url}metrics", flush=True)

    try:
        asyncio.run(Agent(loaded, file, flags).run(announce))
    except OSError as error:
        print(f"dshealthd: cannot serve on {loaded.web.listen_address}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def check_config(loaded: Config, file: Path | None, _flags: dict[str, dict[str, Any]]) -> int:
    """Check the web config file too, and say that the configuration is good; a bad one does not come this far."""
    if loaded.web.config_file is not None:
        from dshealthd.web import config_file

        config_file.load(loaded.web.config_file)
    enabled = [name for name, options in loaded.collectors.items() if options.enabled]
    print(f"{file or 'defaults'}: ok, {len(enabled)} of {len(loaded.collectors)} collectors enabled")
    return 0


def metrics(loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]]) -> int:
    """Collect once and print what a scrape would show."""
    from dshealthd.exposition import Format
    from dshealthd.scheduler import Scheduler
    from dshealthd.snapshot import Snapshot
    from dshealthd.telemetry import Telemetry

    snapshot = Snapshot(time.monotonic, time.time)
    telemetry = Telemetry(time.time())
    asyncio.run(Scheduler(snapshot, time.monotonic, time.time).once(loaded))
    sys.stdout.write(snapshot.body(Format.PROMETHEUS, telemetry.samples).decode())
    return 0


def probe(loaded: Config, file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any) -> int:
    """Run small collectives now, on this machine or between nodes, and print their times.

    Exit status: 0 ok, 1 failed, 2 bad usage, 3 declined, 4 unreachable, 5 refused, 6 unauthorized, 7 hung, 8 wrong data, 9 inconclusive.
    """
    from dshealthd.probe import command

    return command.probe(loaded, file, **own)


def targets(loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any) -> int:
    """Print the nodes that are probed as targets for Prometheus' file service discovery.

    An agent serves the same list at /api/v1/targets for HTTP service discovery. Every agent is taken to listen on the port that is
    configured here.
    """
    from dshealthd.targets import targets as command

    return command(loaded, **own)


def evidence(loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], job: str | None) -> int:
    """Look at the training jobs of this node now and keep what is found: stacks, flight recorders, NCCL RAS, kernel, metrics.

    Prints a summary that says who is behind whom. Takes root for what belongs to other users. The jobs go on undisturbed.
    """
    from dshealthd.evidence.command import evidence as command

    return command(loaded, job)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config.file", dest="config_file", type=Path, metavar="FILE", help="TOML file; without it, defaults")
    for section, schema in SECTIONS.items():
        for field in dataclasses.fields(schema):
            if "doc" not in field.metadata:  # a table of its own
                continue
            common.add_argument(
                f"--{section}.{field.name.replace('_', '-')}",
                dest=f"{section}.{field.name}",
                default=argparse.SUPPRESS,
                metavar="VALUE",
                help=field.metadata["doc"].replace("%", "%%"),
            )
    parser = argparse.ArgumentParser(prog="dshealthd", description="Cluster health monitor for GPU training.")
    parser.add_argument("--version", action="version", version=f"dshealthd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function in (("run", run), ("check-config", check_config), ("metrics", metrics)):
        text = (function.__doc__ or "").split("\n", 1)[0]
        commands.add_parser(name, parents=[common], help=text, description=text).set_defaults(command=function, own=())
    text = (probe.__doc__ or "").split("\n", 1)[0]
    parser_of_probe = commands.add_parser("probe", parents=[common], help=text, description=probe.__doc__)
    own = {action.dest for action in _probe_arguments(parser_of_probe)}
    parser_of_probe.set_defaults(command=probe, own=own)
    text = (targets.__doc__ or "").split("\n", 1)[0]
    parser_of_targets = commands.add_parser("targets", parents=[common], help=text, description=targets.__doc__)
    parser_of_targets.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile, instead of the configured members")
    parser_of_targets.add_argument("--output", metavar="FILE", help="file to replace; it stays as it is where the members cannot be told")
    parser_of_targets.set_defaults(command=targets, own=("hostfile", "output"))
    text = (evidence.__doc__ or "").split("\n", 1)[0]
    parser_of_evidence = commands.add_parser("evidence", parents=[common], help=text, description=evidence.__doc__)
    parser_of_evidence.add_argument("--job", metavar="JOB", help="name of one job, as the label `job` has it; all of the node without it")
    parser_of_evidence.set_defaults(command=evidence, own=("job",))
    return parser


def _probe_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Declare what `probe` takes beside the configuration."""
    return [
        parser.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile: probe every pair of its nodes, through their agents"),
        parser.add_argument("--kind", choices=["local", "pair", "rail", "group", "light"], help="local without a hostfile, pair with one"),
        parser.add_argument("--size", metavar="BYTES,...", help="payloads of the all-reduces, such as 8,32K,64M"),
        parser.add_argument("--repetitions", type=int, metavar="N", help="times that each size is timed; the median counts"),
        parser.add_argument("--json", dest="as_json", action="store_true", help="one JSON document instead of tables"),
    ]


def _flags(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the given flags as tables by section. A number, true or false is one if it looks like one; `config.load` checks its type."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in vars(options).items():
        section, dot, name = key.partition(".")
        if dot:
            tables.setdefault(section, {})[name] = _value(typing.get_type_hints(SECTIONS[section])[name], value)
    return tables


def _value(kind: object, text: str) -> int | bool | str:
    if kind is bool and text in {"true", "false"}:
        return text == "true"
    return int(text) if kind is int and text.lstrip("-").isdecimal() else text
