"""The command `dshealthd`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import faulthandler
import functools
import io
import os
import resource
import sys
import time
import typing
from pathlib import Path
from typing import Any

from dshealthd import __version__, config, logs
from dshealthd.config import SECTIONS, Config, ConfigError
from dshealthd.notify import ServiceManager
from dshealthd.status_line import first_of

if typing.TYPE_CHECKING:
    from dshealthd.http.client import Access

ACCESS = ("tls", "ca_file", "user", "password_file")
"""Arguments of commands that ask agents."""
MAX_FILES = 16_384
"""Descriptors at most: 1,024, the usual soft limit, are few for all connections and peers at once.

Not more, as some libraries in children touch every possible descriptor.
"""
EXIT_FAILURE = 1
EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 done, 1 failed, 2 bad usage or configuration; `explain` and `doctor` have their own.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["explain"]:  # needs no configuration, and has exit statuses of its own
        from dshealthd.explain import command as explain

        return explain.main(arguments[1:])
    if arguments[:1] == ["doctor"]:  # exit statuses of its own, for bad usage too
        from dshealthd.doctor import command as doctor

        return doctor.main(arguments[1:], _common(), _flags)
    if arguments[:1] == ["free-port"]:  # starts processes and becomes one: no thread of the log
        from dshealthd import free_port_command

        return free_port_command.main(arguments[1:], _common(), _flags)
    options = _parser().parse_args(arguments)
    flags = _flags(options)
    manager = ServiceManager.from_environment(os.environ)  # no child inherits it
    try:
        loaded = config.load(options.config_file, flags)
        logs.configure(loaded.log)
        if options.command is run:
            options.command = functools.partial(run, manager=manager)
        command: typing.Callable[..., int] = options.command
        return command(
            loaded,
            options.config_file,
            flags,
            **{name: getattr(options, name) for name in options.own},
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        manager.say(first_of(str(error)))
        return EXIT_USAGE


def run(
    loaded: Config,
    file: Path | None,
    flags: dict[str, dict[str, Any]],
    manager: ServiceManager | None = None,
) -> int:
    """Run the agent until SIGTERM or SIGINT."""
    from dshealthd.agent import Agent
    from dshealthd.web.server import ListenError

    manager = manager or ServiceManager()
    with contextlib.suppress(io.UnsupportedOperation):  # standard error is no file
        faulthandler.enable()  # the watchdog's SIGABRT prints where the event loop is stuck
    _raise_file_limit()
    output = logs.LineWriter(1)  # which may be a pipe that nobody reads

    def announce(url: str) -> None:
        output.put(f"dshealthd {__version__}: page {url}  metrics {url}metrics")

    try:
        asyncio.run(Agent(loaded, file, flags).run(announce, manager))
    except ListenError as error:
        logs.writer.put(f"dshealthd: {error}")
        manager.say(str(error))
        return EXIT_FAILURE
    finally:
        manager.close()
    return 0


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, but not beyond `MAX_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_config(loaded: Config, file: Path | None, _flags: dict[str, dict[str, Any]]) -> int:
    """Check the web config file too, and say that the configuration is good.

    A bad one does not come this far.
    """
    if loaded.web.config_file is not None:
        from dshealthd.web import config_file

        config_file.load(loaded.web.config_file)
    enabled = [name for name, options in loaded.collectors.items() if options.enabled]
    print(
        f"{file or 'defaults'}: ok, {len(enabled)} of {len(loaded.collectors)} collectors enabled"
    )
    return 0


def metrics(loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]]) -> int:
    """Collect once and print what a scrape would show."""
    from dshealthd.collection.scheduler import Scheduler
    from dshealthd.core.exposition import Format
    from dshealthd.core.snapshot import Snapshot
    from dshealthd.self_metrics import SelfMetrics

    snapshot = Snapshot(time.monotonic, time.time)
    telemetry = SelfMetrics(time.time())
    asyncio.run(Scheduler(snapshot, time.monotonic, time.time).once(loaded))
    sys.stdout.write(snapshot.body(Format.PROMETHEUS, telemetry.samples).decode())
    return 0


def probe(loaded: Config, file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any) -> int:
    """Run small collectives now, on this machine or between nodes, and print their times.

    Exit status: 0 ok, 1 failed, 2 bad usage, 3 declined, 4 unreachable, 5 refused, 6 unauthorized,
    7 hung, 8 wrong data, 9 inconclusive.
    """
    from dshealthd.probe import command

    return command.probe(loaded, file, **own)


def targets(
    loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any
) -> int:
    """Print the nodes that are probed as targets for Prometheus' file service discovery.

    An agent serves the same list at /api/v1/targets for HTTP service discovery. Every agent is
    taken to listen on the port that is configured here.
    """
    from dshealthd.targets import targets as command

    return command(loaded, **own)


def status(
    loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any
) -> int:
    """Say what is wrong with this node, or with others.

    Findings first, then GPUs, links, jobs and probes.

    Exit status, of the worst node: 0 ok, 1 warning, 2 critical, 3 unknown, as when an agent does
    not answer.
    """
    from dshealthd.status import command

    return command.status(loaded, _access(own), **own)


def jobs(loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any) -> int:
    """List the training jobs of this node, or of others, with their ranks side by side.

    Exit status: 0 no job is hung, 2 one is, 3 an agent does not answer.
    """
    from dshealthd.status import command

    return command.jobs(loaded, _access(own), **own)


def _access(own: dict[str, Any]) -> Access:
    """Take from a command's arguments how agents are asked."""
    from dshealthd.http.client import Access

    return Access(**{name: own.pop(name) for name in ACCESS})


def evidence(
    loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any
) -> int:
    """Look at the training jobs of this node now and keep what is found.

    Stacks, flight recorders, NCCL RAS, kernel, metrics.

    Prints a summary that says who is behind whom. Takes root for what belongs to other users. The
    jobs go on undisturbed.
    """
    from dshealthd.evidence.command import evidence as command

    return command(loaded, _access(own), **own)


def keys(loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any) -> int:
    """Make, rotate or show the key that the agents of all nodes share.

    A rotation takes three files; each is to be on every node before the next one is made, so that
    no round is missed. Fingerprints are shown, never a key.
    """
    from dshealthd.probe.keys import keys as command

    return command(loaded, **own)


def maintenance(
    loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any
) -> int:
    """Set this node to maintenance for planned work, end that, or show it.

    Alerts of the node are shown and wake nobody, and probes leave it out, until it ends by itself.
    It is kept over restarts. Takes root, or the agent's user: whoever may write to path.state.
    """
    from dshealthd.maintenance.command import maintenance as command

    return command(loaded, **own)


def send_test_alert(
    _loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], **own: Any
) -> int:
    """Send one labelled test page through Alertmanager, and say where it stopped.

    With --prometheus, it is first asked whether it scrapes, evaluates the rules and knows an
    Alertmanager.
    """
    from dshealthd.alerting_check import check_alerting as command

    return command(**own)


def slurm(loaded: Config, _file: Path | None, _flags: dict[str, dict[str, Any]], hook: str) -> int:
    """Run as one of Slurm's hooks: drain the node for what its agent has found, within a budget.

    Exit status: 100 from a prolog where the job must not start, else 0. See deploy/slurm/.
    """
    from dshealthd.slurm.command import slurm as command

    return command(loaded, hook)


def _common() -> argparse.ArgumentParser:
    """Return the options that name and change the configuration."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config.file",
        dest="config_file",
        type=Path,
        metavar="FILE",
        help="TOML file; without it, defaults",
    )
    for section, schema in SECTIONS.items():
        for field in dataclasses.fields(schema):
            if "doc" not in field.metadata:  # a table of its own
                continue
            flags = [f"--{section}.{field.name.replace('_', '-')}"]
            if flags == ["--web.config-file"]:
                flags.insert(0, "--web.config.file")  # as Prometheus' own exporters spell it
            common.add_argument(
                *flags,
                dest=f"{section}.{field.name}",
                default=argparse.SUPPRESS,
                metavar="VALUE",
                help=field.metadata["doc"].replace("%", "%%"),
            )
    return common


def _parser() -> argparse.ArgumentParser:
    common = _common()
    parser = argparse.ArgumentParser(
        prog="dshealthd", description="Cluster health monitor for GPU training."
    )
    parser.add_argument("--version", action="version", version=f"dshealthd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function in (("run", run), ("check-config", check_config), ("metrics", metrics)):
        text = (function.__doc__ or "").split("\n", 1)[0]
        commands.add_parser(name, parents=[common], help=text, description=text).set_defaults(
            command=function, own=()
        )
    text = (probe.__doc__ or "").split("\n", 1)[0]
    parser_of_probe = commands.add_parser(
        "probe", parents=[common], help=text, description=probe.__doc__
    )
    own = tuple(action.dest for action in _probe_arguments(parser_of_probe))
    parser_of_probe.set_defaults(command=probe, own=own)
    text = (targets.__doc__ or "").split("\n", 1)[0]
    parser_of_targets = commands.add_parser(
        "targets", parents=[common], help=text, description=targets.__doc__
    )
    parser_of_targets.add_argument(
        "--hostfile", metavar="FILE", help="DeepSpeed hostfile, instead of the configured members"
    )
    parser_of_targets.add_argument(
        "--output",
        metavar="FILE",
        help="file to replace; it stays as it is where the members cannot be told",
    )
    parser_of_targets.set_defaults(command=targets, own=("hostfile", "output"))
    text = (evidence.__doc__ or "").split("\n", 1)[0]
    parser_of_evidence = commands.add_parser(
        "evidence", parents=[common], help=text, description=evidence.__doc__
    )
    parser_of_evidence.add_argument(
        "--job",
        metavar="JOB",
        help="name of one job, as the label `job` has it; all of the node without it",
    )
    _access_arguments(parser_of_evidence)
    parser_of_evidence.set_defaults(command=evidence, own=("job", *ACCESS))
    for name, function in (("status", status), ("jobs", jobs)):
        text = (function.__doc__ or "").split("\n", 1)[0]
        added = commands.add_parser(name, parents=[common], help=text, description=function.__doc__)
        _query_arguments(added)
        own = ("nodes", "members", "as_json", "watch", *ACCESS)
        added.set_defaults(command=function, own=own)
    _add_keys(commands, common)
    _add_maintenance(commands, common)
    _add_test_alert(commands, common)
    text = (slurm.__doc__ or "").split("\n", 1)[0]
    parser_of_slurm = commands.add_parser(
        "slurm", parents=[common], help=text, description=slurm.__doc__
    )
    parser_of_slurm.add_argument("hook", choices=["health", "prolog", "epilog"])
    parser_of_slurm.set_defaults(command=slurm, own=("hook",))
    text = "Name the cause of a job's failure from its logs."
    commands.add_parser("explain", help=text, description=text, add_help=False)
    text = "Say whether this node, or others, are fit to start a training."
    commands.add_parser("doctor", help=text, description=text, add_help=False)
    text = "Print a free port for a rendezvous, and hold it."
    commands.add_parser("free-port", help=text, description=text, add_help=False)
    return parser


def _query_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which agents are asked, and how the answer is shown."""
    parser.add_argument(
        "nodes",
        nargs="*",
        metavar="NODE",
        help="ask the agents of these nodes, HOST or HOST:PORT; this node's own without any",
    )
    parser.add_argument(
        "--members", action="store_true", help="ask the agents of all nodes that are probed"
    )
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="one JSON document, see docs/status-api.md",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=2.0,
        metavar="SECONDS",
        help="ask again and again until Ctrl-C; every 2 seconds by default",
    )
    _access_arguments(parser)


def _access_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how agents are asked that want TLS or a password."""
    parser.add_argument("--tls", action="store_true", help="ask agents over TLS")
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="certificates that vouch for them, with TLS"
    )
    parser.add_argument("--user", default="", metavar="NAME", help="user name for the agents")
    parser.add_argument(
        "--password-file", type=Path, metavar="FILE", help="file with that user's password"
    )


def _add_keys(commands: Any, common: argparse.ArgumentParser) -> None:
    text = (keys.__doc__ or "").split("\n", 1)[0]
    parser = commands.add_parser("keys", parents=[common], help=text, description=keys.__doc__)
    parser.add_argument("action", choices=["new", "rotate", "show"])
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="key file, instead of probe.peer.key_file or /etc/dshealthd/probe.key",
    )
    parser.set_defaults(command=keys, own=("action", "file"))


def _add_maintenance(commands: Any, common: argparse.ArgumentParser) -> None:
    text = (maintenance.__doc__ or "").split("\n", 1)[0]
    parser = commands.add_parser(
        "maintenance", parents=[common], help=text, description=maintenance.__doc__
    )
    parser.add_argument("action", choices=["on", "off", "show"])
    parser.add_argument(
        "--for",
        dest="duration",
        metavar="DURATION",
        help='when it ends by itself, such as "30m" or "12h"; "2h" without it',
    )
    parser.add_argument("--reason", metavar="TEXT", help="why, for whoever sees the node")
    parser.set_defaults(command=maintenance, own=("action", "duration", "reason"))


def _add_test_alert(commands: Any, common: argparse.ArgumentParser) -> None:
    text = (send_test_alert.__doc__ or "").split("\n", 1)[0]
    parser = commands.add_parser(
        "test-alert", parents=[common], help=text, description=send_test_alert.__doc__
    )
    parser.add_argument(
        "--alertmanager",
        metavar="URL",
        default="http://127.0.0.1:9093",
        help="address of Alertmanager, http://127.0.0.1:9093 without it",
    )
    parser.add_argument("--prometheus", metavar="URL", help="address of Prometheus, asked first")
    parser.add_argument(
        "--severity",
        choices=["critical", "warning"],
        default="critical",
        help="critical for a page, warning for a ticket",
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="how long a notification is waited for, 30 without it",
    )
    parser.set_defaults(
        command=send_test_alert, own=("alertmanager", "prometheus", "severity", "wait")
    )


def _probe_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Declare what `probe` takes beside the configuration."""
    return [
        parser.add_argument(
            "--hostfile",
            metavar="FILE",
            help="DeepSpeed hostfile: probe every pair of its nodes, through their agents",
        ),
        parser.add_argument(
            "--kind",
            choices=["local", "pair", "rail", "group", "light"],
            help="local without a hostfile, pair with one",
        ),
        parser.add_argument(
            "--size", metavar="BYTES,...", help="payloads of the all-reduces, such as 8,32K,64M"
        ),
        parser.add_argument(
            "--repetitions",
            type=int,
            metavar="N",
            help="times that each size is timed; the median counts",
        ),
        parser.add_argument(
            "--json",
            dest="as_json",
            action="store_true",
            help="one JSON document instead of tables",
        ),
    ]


def _flags(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the given flags as tables by section.

    A number, true or false is one if it looks like one; `config.load` checks its type.
    """
    tables: dict[str, dict[str, Any]] = {}
    for key, value in vars(options).items():
        section, dot, name = key.partition(".")
        if dot:
            tables.setdefault(section, {})[name] = _value(
                typing.get_type_hints(SECTIONS[section])[name], value
            )
    return tables


def _value(kind: object, text: str) -> int | bool | str:
    if kind is bool and text in {"true", "false"}:
        return text == "true"
    return int(text) if kind is int and text.lstrip("-").isdecimal() else text
