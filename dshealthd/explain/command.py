"""`dshealthd explain LOG…`: the cause of a job's failure, from its logs."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from dshealthd.core import documents
from dshealthd.core.text import print_lines, printable
from dshealthd.explain import answer, dumps
from dshealthd.explain import input as logs
from dshealthd.explain.events import Place
from dshealthd.explain.finding import Finding, decide
from dshealthd.explain.recognition import Recognizer
from dshealthd.symptoms import runbooks

EXIT_NOTHING, EXIT_FOUND, EXIT_UNDECIDED, EXIT_USAGE = 0, 1, 3, 64
EXIT = {"nothing": EXIT_NOTHING, "found": EXIT_FOUND, "undecided": EXIT_UNDECIDED}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {printable(message)}\nSee `{self.prog} --help`.\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command `explain`."""
    made = _Parser(
        prog="dshealthd explain",
        description="Name the cause of a job's failure from its logs.",
        epilog=(
            "Exit status: 0 no failure found, 1 cause found, 3 undecided, 64 bad usage, or nothing "
            "to read."
        ),
    )
    made.add_argument(
        "logs", nargs="*", metavar="LOG", help="file, folder or glob pattern; - is standard input"
    )
    made.add_argument(
        "--runbook", metavar="SLUG", help="print this runbook; an unknown name lists all of them"
    )
    made.add_argument("--json", action="store_true", help="one JSON document instead of text")
    made.add_argument(
        "--healthy",
        action="append",
        default=[],
        metavar="LOG",
        help="log of a healthy run: its events are not causes",
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Explain logs and return the exit status.

    0 nothing found, 1 a cause found, 3 undecided, 64 bad usage or no readable log.
    """
    made = parser()
    options = made.parse_args(arguments)
    if options.runbook is not None:
        try:
            print_lines(runbooks.named(options.runbook).removesuffix("\n"))
        except LookupError as error:
            made.error(error.args[0])
        return EXIT_NOTHING
    if not options.logs:
        made.error("the following arguments are required: LOG")
    try:
        recognizer, unread = read(options.logs, options.healthy)
    except logs.InputError as error:
        print_lines(f"dshealthd explain: {error}", error=True)
        return EXIT_USAGE
    found = recognizer.found
    finding = conclude(recognizer, unread)
    if options.json:
        print_lines(documents.dumps(answer.document(finding, found, unread), indent=2))
    else:
        print_lines(answer.text(finding, found, unread).removesuffix("\n"))
    return EXIT[finding.outcome]


def read(names: Sequence[str], healthy: Sequence[str] = ()) -> tuple[Recognizer, list[str]]:
    """Read logs and dumps; return what was recognized, and what was not read in whole and why.

    InputError: a name matches no file, or nothing can be read, as all files are empty.
    """
    good = read(healthy)[0] if healthy else Recognizer()
    usual = {(event.pattern, event.says) for event in good.found.events}
    recognizer = Recognizer()
    refused: list[OSError] = []
    files = logs.expand(names, refused.append)
    unread = [f"not read: {error.filename}: {error.strerror}" for error in refused]
    for name in files:
        try:
            if dumps.is_dump(name):
                rank = dumps.rank_of(name)
                place = Place(name, 0, "flight recorder")
                recognizer.found.ranks_seen.add(rank)
                recognizer.found.ledger.add_dump(rank, dumps.read(name), place)
            else:
                recognizer.add(name)
        except (logs.InputError, dumps.UnreadableDump, OSError) as error:
            unread.append(f"not read: {error}")
    statistics = recognizer.found.statistics
    # A program that failed may have left an empty log, or nothing in a pipe: that is not healthy.
    empty = statistics.files == len(files) and not statistics.bytes
    if empty or len(unread) == len(files) + len(refused):
        raise logs.InputError(unread[0] if unread else f"{names[0]}: nothing to read")
    unread += statistics.unread
    events = recognizer.found.events
    events[:] = [event for event in events if (event.pattern, event.says) not in usual]
    for facts, healthy_one in itertools.product(recognizer.found.sources, good.found.sources):
        facts.statements.forget(healthy_one.statements)
    return recognizer, unread


def conclude(recognizer: Recognizer, unread: Sequence[str] = ()) -> Finding:
    """Return the answer for everything recognized so far; a failure may stand in what is unread."""
    finding = decide(recognizer.found, now=time.time())
    if unread and finding.outcome == "nothing":
        return replace(
            finding,
            outcome="undecided",
            statement="no failure found in what could be read, which is not all",
        )
    return finding
