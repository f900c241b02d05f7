"""The commands that take the agent's configuration, and the parser of the whole command line."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import importlib
import io
import os
import resource
import sys
import time
import typing
from typing import Any

from dshealthd import __version__
from dshealthd.agent import logs
from dshealthd.agent.systemd import ServiceManager
from dshealthd.cli import arguments, warnings
from dshealthd.cli.apart import APART
from dshealthd.cli.arguments import Command
from dshealthd.config.flags import (
    ACCESS,
    EXIT_FAILURE,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    FlagParser,
    tables_of_flags,
    usable,
)
from dshealthd.core.options import COMMAND_LINE, ConfigError, Duration
from dshealthd.core.text import first_of, print_lines

if typing.TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator
    from pathlib import Path  # noqa: TC004 - nothing evaluates this type

    from dshealthd.config.config import Config  # noqa: TC004 - as above
    from dshealthd.core.collector import Sample
    from dshealthd.http.client import Access

MAX_FILES = 16_384
"""Most file descriptors: the usual soft limit of 1,024 is too few for all connections and peers.

The limit is not higher because some libraries in children touch every possible descriptor.
"""
Function = typing.TypeVar("Function", bound=typing.Callable[..., int])
COMMANDS: list[Command] = []
"""All commands except those with a parser of their own, in the order of `--help`."""


@dataclasses.dataclass(frozen=True)
class Invocation:
    """What every command is run with, besides its own arguments."""

    config: Config
    file: Path | None
    flags: dict[str, dict[str, Any]]
    manager: ServiceManager


def _command(
    *examples: str,
    name: str = "",
    declare: typing.Callable[[ArgumentParser], None] = arguments.no_arguments,
    exit_usage: int = EXIT_USAGE,
    forgives: bool = False,
) -> typing.Callable[[Function], Function]:
    """Declare a command, called as its function if it has no other name."""

    def declared(function: Function) -> Function:
        known = name or function.__name__.replace("_", "-")
        COMMANDS.append(Command(known, function, examples, declare, exit_usage, forgives))
        return function

    return declared


def main(words: list[str]) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 bad usage or configuration.

    `status` and `jobs` return the verdict's instead, and 3 (unknown) for bad usage.
    """
    options = parser().parse_args(words)
    manager = ServiceManager.from_environment(os.environ)  # so that no child inherits it
    try:
        loaded, wrong = usable(options)
        if wrong is not None and not options.forgives:
            raise wrong
        if wrong is not None:
            print_lines(wrong, error=True)
        logs.configure(loaded.log)
        given = Invocation(loaded, options.config_file, tables_of_flags(options), manager)
        command: typing.Callable[..., int] = options.command
        return command(given, **{name: getattr(options, name) for name in options.own})
    except ConfigError as error:
        print_lines(error, error=True)
        manager.set_status(first_of(str(error)))
        exit_usage: int = options.exit_usage
        return exit_usage


@_command("dshealthd run --config.file FILE")
def run(given: Invocation) -> int:
    """Run the agent until SIGTERM or SIGINT."""
    _import_aiohttp()
    from dshealthd.agent.agent import Agent
    from dshealthd.web.server import ListenError

    manager = given.manager
    with contextlib.suppress(io.UnsupportedOperation):  # standard error is not a file
        faulthandler.enable()  # the watchdog's SIGABRT prints where the event loop is stuck
    _raise_file_limit()
    output = logs.LineWriter(1)  # standard output may be a pipe without a reader

    def announce(url: str) -> None:
        output.put(f"dshealthd {__version__}: page {url}  metrics {url}metrics")

    try:
        asyncio.run(Agent(given.config, given.file, given.flags).run(announce, manager))
    except ConfigError as error:  # from web.config_file and the files it names
        manager.set_status(first_of(str(error)))
        raise
    except ListenError as error:
        logs.writer.put(f"dshealthd: {error}")
        manager.set_status(str(error))
        return EXIT_FAILURE
    finally:
        manager.close()
    return 0


def _import_aiohttp() -> None:
    """Import aiohttp without the system's certificate authorities.

    Its client reads them all at import, 2 MiB and 60 ms, and the agent uses only its server.
    """
    places = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # where OpenSSL looks for them
    before = {name: os.environ[name] for name in places if name in os.environ}
    os.environ.update(dict.fromkeys(places, os.devnull))
    try:
        importlib.import_module("aiohttp")
    finally:
        for name in places:
            del os.environ[name]
        os.environ.update(before)


def _raise_file_limit() -> None:
    """Raise the agent's soft limit on open files to the hard one, at most `MAX_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@_command(
    "dshealthd status",
    "dshealthd status node-17 node-18",
    "dshealthd status --members",
    declare=arguments.query,
    exit_usage=EXIT_UNKNOWN,
    forgives=True,
)
def status(given: Invocation, **own: Any) -> int:
    """Show what is wrong with this node, or with others.

    Findings first, then GPUs, links, jobs and probes.

    Exit status of the worst node: 0 ok, 1 warning, 2 critical, 3 unknown (also if an agent does
    not answer, and for bad usage).
    """
    from dshealthd.status import command

    return command.status(command.AgentQuery(given.config, _access(own), **own))


@_command(
    "dshealthd jobs node-17",
    "dshealthd jobs --members",
    "dshealthd jobs --members --report slurm-4711",
    "dshealthd jobs --members --exclude slurm-4711",
    declare=arguments.jobs,
    exit_usage=EXIT_UNKNOWN,
    forgives=True,
)
def jobs(
    given: Invocation,
    exclude: str | None,
    report: str | None,
    history: bool,  # noqa: FBT001 - as argparse passes it
    **own: Any,
) -> int:
    """List the training jobs of this node, or of others, with their ranks side by side.

    Exit status: 0 no job is hung, 2 a job is hung, 3 an agent does not answer, has just started or
    left a job out, or bad usage. With --history, --report or --exclude: 0 all agents answered, 3
    one did not, nothing is known of JOB, or bad usage.
    """
    from dshealthd.status import command

    asked = command.AgentQuery(given.config, _access(own), **own)
    if exclude is not None:
        return command.exclude(asked, exclude)
    if report is not None or history:
        return command.runs(asked, report or "")
    return command.jobs(asked)


@_command(
    "dshealthd history",
    "dshealthd history node-17 --since 90d",
    declare=arguments.history,
    exit_usage=EXIT_UNKNOWN,
    forgives=True,
)
def history(given: Invocation, since: str, **own: Any) -> int:
    """Show past problems of this node, or of others, and its repairs.

    Covers findings, boots, agent starts, driver changes and maintenance, for at most 90 days.

    Exit status: 0 all agents answered, 3 an agent did not, or bad usage.
    """
    from dshealthd.status import command

    try:
        seconds = Duration.parse(since)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(COMMAND_LINE, [f'--since: "{since}" is {error}']) from error
    return command.history(command.AgentQuery(given.config, _access(own), **own), seconds)


def _access(own: dict[str, Any]) -> Access:
    from dshealthd.http.client import Access

    return Access(**{name: own.pop(name) for name in ACCESS})


@_command(
    "dshealthd probe",
    "dshealthd probe --hostfile /job/hostfile --size 64M",
    declare=arguments.probe,
)
def probe(given: Invocation, **own: Any) -> int:
    """Run small collectives now, on this machine or between nodes, and print their times.

    Exit status: 0 ok, 1 failed, 2 bad usage, 3 declined, 4 unreachable, 5 refused, 6 unauthorized,
    7 hung, 8 wrong data, 9 inconclusive.
    """
    from dshealthd.probe.cli import command

    return command.probe(given.config, given.file, **own)


@_command("dshealthd evidence --job slurm-4711", declare=arguments.evidence, forgives=True)
def evidence(given: Invocation, **own: Any) -> int:
    """Collect evidence from the training jobs on this node now.

    Stacks, flight recorders, NCCL RAS, kernel, metrics.

    Prints a summary that names the lagging ranks. Needs root for other users' jobs. The jobs
    continue undisturbed.

    Exit status: 0 taken, 1 none was taken, 2 bad usage.
    """
    from dshealthd.evidence.command import evidence as command

    return command(given.config, _access(own), **own)


@_command("dshealthd check-config")
def check_config(given: Invocation) -> int:
    """Check the configuration and the web config file, and list every error with its key.

    A configured file that is missing is a warning: a job may create its hostfile later.

    Exit status: 0 usable, 2 errors.
    """
    loaded, file = given.config, given.file
    if loaded.web.config_file is not None:
        from dshealthd.web.config_file import WebConfigFile

        WebConfigFile(loaded.web.config_file)
    for warning in warnings.of(loaded):
        print_lines(f"{file or 'command line'}: warning: {warning}", error=True)
    enabled = [name for name, options in loaded.collectors.items() if options.enabled]
    print_lines(
        f"{file or 'defaults'}: ok, {len(enabled)} of {len(loaded.collectors)} collectors enabled"
    )
    return 0


@_command("dshealthd metrics | grep gpu_temperature")
def metrics(given: Invocation) -> int:
    """Collect once, print the metrics as a scrape would show them, and exit.

    Findings are left out, because they need more than one sample.
    """
    from dshealthd.agent import node_figures
    from dshealthd.collection.scheduler import Scheduler
    from dshealthd.core.self_metrics import SelfMetrics
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.findings.options import FindingsOptions

    snapshot = Snapshot(time.monotonic, time.time)
    telemetry = SelfMetrics(time.time())
    busy = given.config.section(FindingsOptions).limits.gpu_busy_ratio

    def own() -> Iterator[Sample]:
        yield from telemetry.samples()
        yield from node_figures.samples(snapshot, busy)

    asyncio.run(Scheduler(snapshot, time.monotonic, time.time).once(given.config))
    sys.stdout.write(snapshot.body(own).decode())
    return 0


@_command(
    "dshealthd targets --hostfile /job/hostfile --output targets/dshealthd.json",
    declare=arguments.targets,
)
def targets(given: Invocation, **own: Any) -> int:
    """Print the probed nodes as targets for Prometheus' file service discovery.

    An agent serves the same list at /api/v1/targets for HTTP service discovery. All agents are
    assumed to listen on the port that is configured here.
    """
    from dshealthd.probe.members.targets import targets as command

    return command(given.config, **own)


@_command("dshealthd keys new", "dshealthd keys show", declare=arguments.keys)
def keys(given: Invocation, **own: Any) -> int:
    """Create, rotate or show the key that the agents of all nodes share.

    A rotation takes three files. Distribute each to every node before you create the next one, so
    that no round is missed. Shows fingerprints, never a key.
    """
    from dshealthd.probe.cli.keys import keys as command

    return command(given.config, **own)


@_command(
    "dshealthd maintenance on --for 4h --reason 'new optics'",
    "dshealthd maintenance off",
    declare=arguments.maintenance,
)
def maintenance(given: Invocation, **own: Any) -> int:
    """Put this node in maintenance for planned work, end it, or show it.

    Until maintenance ends, the node's alerts are shown but page no one, and probes skip the node.
    It survives restarts. Needs root, or the agent's user, which can write to path.state.
    """
    from dshealthd.maintenance.command import maintenance as command

    return command(given.config, **own)


@_command(
    "dshealthd test-alert --alertmanager http://alerts:9093 --prometheus http://prom:9090",
    name="test-alert",
    declare=arguments.test_alert,
    forgives=True,
)
def send_test_alert(_given: Invocation, **own: Any) -> int:
    """Send one labeled test page through Alertmanager, and report where it stopped.

    With --prometheus, first check that Prometheus scrapes agents, evaluates the rules and has an
    Alertmanager.

    Exit status: 0 delivered, 1 stopped, 2 bad usage.
    """
    from dshealthd.cli.test_alert import check_alerting as command

    return command(**own)


@_command("dshealthd slurm health", declare=arguments.slurm)
def slurm(given: Invocation, hook: str) -> int:
    """Run as a Slurm hook: drain the node for its agent's findings, within a budget.

    Exit status: 100 from a prolog where the job must not start, 2 bad usage or configuration, else
    0. See deploy/slurm/.
    """
    from dshealthd.slurm.command import slurm as command

    return command(given.config, hook)


@_command("dshealthd launches", declare=arguments.launches, forgives=True)
def launches(given: Invocation, output: Path) -> int:
    """Count the collectives that training jobs launch, until SIGTERM or SIGINT.

    The agent reads the counts. Needs CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH,
    CAP_SETUID and CAP_SETGID: run by dshealthd-launches.service.
    """
    from dshealthd.jobs.launches import command

    if not output.parent.is_dir():  # systemd makes it for the service
        raise ConfigError(COMMAND_LINE, [f"--output: {output.parent} is not a directory"])
    return command.launches(given.config.path.host, output)


def parser() -> FlagParser:
    """Return the parser of the whole command line; the manual pages are made from it, too."""
    whole = FlagParser(
        prog="dshealthd",
        description="Cluster health monitor for GPU training.",
        epilog="`dshealthd COMMAND --help` shows the options of a command, with an example.",
    )
    whole.add_argument("--version", action="version", version=f"dshealthd {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        arguments.declare(commands, command)
    for name, (_, text) in APART.items():
        commands.add_parser(name, help=text, description=text, add_help=False)
    return whole
