"""`python -m grafana`: write or check the dashboards' JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from generate import files
from generate.alert_rules import RUNBOOKS
from grafana import fleet, jobs, limits, node, probes
from grafana.board import Source, write

BOARDS = (fleet, jobs, node, probes)
DIRECTORY = Path(__file__).parent / "dashboards"


def documents(source: Source) -> dict[str, str]:
    """Return the JSON of every dashboard by the name of its file."""
    boards = (module.board(source) for module in BOARDS)
    return {f"{board.uid}.json": write(board) for board in boards}


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files; return 1 if one is out of date or belongs to no dashboard."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana", description="Write the dashboards' JSON."
    )
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=DIRECTORY,
        help="output directory; default %(default)s",
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument(
        "--thresholds",
        metavar="FILE",
        type=Path,
        default=limits.FILE,
        help="rule file with the thresholds for colors; default %(default)s",
    )
    parser.add_argument(
        "--runbooks",
        metavar="URL",
        default=RUNBOOKS,
        help="URL of the runbooks, with SLUG for the symptom; default %(default)s",
    )
    options = parser.parse_args(arguments)
    source = Source(limits=limits.read(options.thresholds), runbooks=options.runbooks)
    made = {options.directory / name: text for name, text in documents(source).items()}
    return files.write(made, check=options.check, there=options.directory.glob("dshealthd-*.json"))


if __name__ == "__main__":
    sys.exit(main())
