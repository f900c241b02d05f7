"""`dshealthd doctor`: its arguments, the nodes and environments it examines, its exit status."""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.config import flags
from dshealthd.core import documents
from dshealthd.core.options import ConfigError
from dshealthd.core.text import print_lines
from dshealthd.doctor import node
from dshealthd.doctor import report as callers
from dshealthd.doctor.choice import choose_checks, of_the_job
from dshealthd.doctor.examination import examine, mark_accepted
from dshealthd.doctor.job.arguments import add_arguments as add_job_arguments
from dshealthd.doctor.job.arguments import parse
from dshealthd.doctor.node_context import NodeContext, facts
from dshealthd.doctor.options import DoctorOptions
from dshealthd.doctor.path_check import path_check
from dshealthd.doctor.report import NodeReport, Report, text
from dshealthd.doctor.several_nodes import compare
from dshealthd.doctor.snapshot_check import SnapshotCheck
from dshealthd.doctor.ssh import HostsError, examine_nodes, host_names
from dshealthd.doctor.status_document import collect, status_document
from dshealthd.findings.finding import State
from dshealthd.http.client import Access
from dshealthd.probe.options import ProbeOptions
from dshealthd.status.paint import EXIT, Paint, colored
from dshealthd.status.progress import Progress
from dshealthd.symptoms import runbooks

if TYPE_CHECKING:
    from dshealthd.config.config import Config
    from dshealthd.doctor.check import Check

UNKNOWN = EXIT[State.UNKNOWN]
DESCRIPTION = """\
Check whether this node, or each of several, is fit to start a training job.
Report each problem, its severity and limit, and the command that fixes it.
Nothing is changed.
"""
EPILOG = """\
examples:
  dshealthd doctor
  dshealthd doctor --path /checkpoints --python /opt/train/bin/python
  dshealthd doctor --hosts 'node[01-16]' --json
  dshealthd doctor --for kubernetes
  dshealthd doctor --job job.sbatch
  dshealthd doctor --job -- torchrun --nproc-per-node=8 train.py

Exit status, by the worst result: 0 ok, 1 warning, 2 critical, 3 unknown or wrong usage.
"""


class Parser(flags.FlagParser):
    """Argument parser that exits with the status of *unknown* on an error: 2 means critical."""

    exit_usage = UNKNOWN


def parser() -> Parser:
    """Return the parser of the command `doctor`."""
    added = Parser(prog="dshealthd doctor", description=DESCRIPTION, epilog=EPILOG)
    output = added.add_mutually_exclusive_group()
    output.add_argument("--json", dest="as_json", action="store_true", help="one JSON document")
    output.add_argument(
        "--for",
        dest="caller",
        choices=[*callers.CALLERS],
        help="output and exit status for this caller",
    )
    added.add_argument("--verbose", "-v", action="store_true", help="also print ok results")
    added.add_argument("--only", metavar="CHECK,...", default="", help="run only these checks")
    added.add_argument("--skip", metavar="CHECK,...", default="", help="skip these checks")
    added.add_argument("--list", dest="listed", action="store_true", help="list the checks")
    added.add_argument(
        "--runbook", metavar="SLUG", help="print this runbook; an unknown name lists all of them"
    )
    added.add_argument(
        "--path",
        dest="paths",
        metavar="DIRECTORY",
        action="append",
        default=[],
        help="checkpoint or offload directory: check its space and time a 4 KiB write; may be "
        "repeated",
    )
    added.add_argument(
        "--no-agent",
        dest="agent",
        action="store_false",
        help="read the sources directly even if an agent runs",
    )
    across = added.add_argument_group("several nodes, over SSH")
    across.add_argument(
        "--hosts",
        metavar="NODES",
        help="examine and compare these nodes: node[01-16],login1 in Slurm's notation, "
        "@FILE for a DeepSpeed hostfile, slurm for the allocation",
    )
    across.add_argument(
        "--host-timeout",
        type=flags.seconds,
        default=20.0,
        metavar="SECONDS",
        help="deadline for each node (default: 20)",
    )
    across.add_argument(
        "--remote-command",
        metavar="PROGRAM",
        default="dshealthd",
        help="path of dshealthd on the other nodes, if it is not in their PATH",
    )
    across.add_argument("--ssh", metavar="PROGRAM", default="ssh", help="SSH client (default: ssh)")
    across.add_argument("--across", action="store_true", help=argparse.SUPPRESS)
    flags.declare_access(added.add_argument_group("the agent of this node"))
    add_job_arguments(added)
    flags.add_flags(added)
    return added


def main(words: Sequence[str]) -> int:
    """Run `dshealthd doctor`; return its exit status: 0 ok, 1 warning, 2 critical, 3 unknown."""
    known = parser()
    options = parse(known, list(words))
    if (options.file or options.launch) and not options.job:
        known.error("a file or command is of a job: add --job")
    if options.runbook is not None:
        return _runbook(known, options.runbook)
    try:
        loaded, wrong = flags.usable(options)
        checks = choose_checks(options, loaded)
    except ConfigError as error:
        print_lines(error, error=True)
        return UNKNOWN
    if options.listed:
        for check in checks:
            print_lines(f"{check.name:24} {check.slug:24} {check.title}")
        return 0
    try:
        several = options.hosts is not None and (options.paths or _of_nodes(checks))
        report = _across(options, checks) if several else _here(options, loaded, wrong, checks)
    except (HostsError, OSError) as error:
        print_lines(f"dshealthd doctor: {error}", error=True)
        return UNKNOWN
    return _print(options, report)


def _runbook(known: Parser, slug: str) -> int:
    """Print a runbook, which needs neither an agent nor a network."""
    try:
        print(runbooks.named(slug), end="")
    except LookupError as error:
        known.error(error.args[0])
    return EXIT[State.OK]


def _here(
    options: argparse.Namespace,
    loaded: Config,
    wrong: ConfigError | None,
    checks: Sequence[Check[Any]],
) -> Report:
    wall, started = time.time(), time.monotonic()
    base = NodeContext(
        loaded,
        several=_several(options, loaded),
        broken=tuple(str(wrong).splitlines()) if wrong is not None else (),
        python=_training_environments(options, loaded),
    )
    access = Access(**{name: getattr(options, name) for name in flags.ACCESS})
    look = functools.partial(status_document, loaded, access)
    if not options.agent:
        look = functools.partial(collect, loaded)
    waiting = [check for check in checks if isinstance(check, SnapshotCheck)]
    plain = of_the_job(options, checks)
    plain += [(check, base) for check in _of_nodes(checks) if not isinstance(check, SnapshotCheck)]
    plain += [(path_check(os.path.abspath(path)), base) for path in options.paths]
    progress = Progress("checks")
    try:
        examined, document = examine(plain, waiting, look, base.with_document, progress)
    finally:
        progress.close()
    accepted = mark_accepted(
        examined, loaded.section(DoctorOptions).accepted(), dt.datetime.now().astimezone().date()
    )
    context = base.with_document(document)
    here = NodeReport(
        os.uname().nodename,
        tuple(accepted),
        source=str(document.get("source", "")),
        facts=facts(context),
    )
    return Report((here,), wall, time.monotonic() - started)


def _several(options: argparse.Namespace, loaded: Config) -> bool:
    """Return whether jobs of this node run across several nodes."""
    slurm = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return (
        bool(options.across)
        or loaded.section(ProbeOptions).wanted
        or (slurm.isdecimal() and int(slurm) > 1)
    )


def _training_environments(options: argparse.Namespace, loaded: Config) -> tuple[str, ...]:
    """Return the training environments to examine: given, configured, active.

    An active environment belongs to the user, so root ignores it.
    """
    configured = getattr(loaded.collectors["software"], "environments", ())
    found = [*filter(None, options.python), *map(str, configured)]
    if loaded.section(ProbeOptions).python is not None:
        found.append(str(loaded.section(ProbeOptions).python))
    if os.geteuid() != 0:
        found += filter(None, map(os.environ.get, ("VIRTUAL_ENV", "CONDA_PREFIX")))
    return tuple(dict.fromkeys(os.path.abspath(one) for one in found))


def _across(options: argparse.Namespace, checks: Sequence[Check[Any]]) -> Report:
    """Examine several nodes over SSH and compare them; a job is checked from this node."""
    wall, started = time.time(), time.monotonic()
    hosts = host_names(options.hosts)
    remote = [options.remote_command, "doctor", "--json", "--across"]
    remote += _passed_on(options, checks)
    progress = Progress("nodes")
    try:
        reports = examine_nodes(hosts, [options.ssh], remote, options.host_timeout, progress)
    finally:
        progress.close()
    across = compare(reports)
    if plain := of_the_job(options, checks):
        across += examine(plain, (), dict, dict, lambda *_: None)[0]
    return Report(tuple(reports), wall, time.monotonic() - started, tuple(across))


def _of_nodes(checks: Sequence[Check[Any]]) -> list[Check[Any]]:
    return [check for check in checks if check in node.CHECKS]


def _passed_on(options: argparse.Namespace, checks: Sequence[Check[Any]]) -> list[str]:
    passed = []
    if options.config_file not in {None, flags.INSTALLED}:  # each node reads its own
        passed += ["--config.file", str(options.config_file)]
    if options.only:  # without the checks of the job, which is checked from here
        names = [check.name for check in _of_nodes(checks)]
        names += [f"path {os.path.abspath(path)}" for path in options.paths]
        passed += ["--only", ",".join(names)]
    if options.skip:
        passed += ["--skip", options.skip]
    for path in options.paths:
        passed += ["--path", os.path.abspath(path)]
    for python in filter(None, options.python):
        passed += ["--python", os.path.abspath(python)]
    return passed if options.agent else [*passed, "--no-agent"]


def _print(options: argparse.Namespace, report: Report) -> int:
    if options.caller:
        return callers.CALLERS[options.caller](report)
    if options.as_json:
        print_lines(documents.dumps(report.document()))
    else:
        color = colored()
        for line in text(report, Paint(color=color), verbose=options.verbose):
            print(line)
    return report.exit
