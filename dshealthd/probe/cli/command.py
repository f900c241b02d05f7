"""The command `dshealthd probe`: probe this machine's GPUs among themselves, or pairs of nodes.

The local probe needs only an interpreter with torch: no configuration, no agent. Between nodes the
agents do the work: the command asks the first node of each pair, by the peer API, to lead a round.
Many pairs run at a time, and no node is in two of them.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from dshealthd.core import documents
from dshealthd.core.options import COMMAND_LINE, ConfigError
from dshealthd.core.text import print_lines
from dshealthd.probe.cli import report
from dshealthd.probe.cli.local import local, show_local
from dshealthd.probe.cli.pairs import probe_pairs, show_pairs
from dshealthd.probe.observation import Outcome, RoundKind
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.peers.fields import MAX_REPETITIONS, MAX_SIZE, MAX_SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.config.config import Config

SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 16 << 20, 64 << 20)
SMALL = 1 << 20
REPETITIONS, FEW = 20, 5
"""Repetitions for sizes up to SMALL, and for larger ones."""
_SIZE = re.compile(r"(\d{1,10})([KMG]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def probe(
    loaded: Config,
    file: Path | None,
    *,
    hostfile: str | None,
    kind: str | None,
    size: str | None,
    repetitions: int | None,
    as_json: bool,
) -> int:
    """Run collectives, print their timings and return the status, as in `report.EXIT`.
    Raises ConfigError.
    """
    source = str(file) if file is not None else COMMAND_LINE
    steps = parse_steps(size, repetitions)
    if hostfile is None and kind in {None, "local"}:
        document = asyncio.run(local(loaded, steps, _say))
        text = show_local
    elif hostfile is None and not loaded.section(ProbeOptions).members.sources:
        raise ConfigError(
            COMMAND_LINE, [f"--kind: {kind} needs a hostfile, or members in the configuration"]
        )
    else:
        if kind == "local":
            raise ConfigError(
                COMMAND_LINE, ["--kind: local probes this machine alone; leave out the hostfile"]
            )
        document = asyncio.run(
            probe_pairs(loaded, source, hostfile, RoundKind(kind or "pair"), steps, _say)
        )
        text = show_pairs
    print_lines(documents.dumps(document, indent=2) if as_json else text(document))
    return report.EXIT[Outcome(document["outcome"])]


def _say(text: str) -> None:
    print_lines(text, error=True)


def parse_steps(sizes: str | None, repetitions: int | None) -> tuple[tuple[int, int], ...]:
    """Return the sizes in bytes and their repetitions from the flags; raises ConfigError."""
    found = []
    for text in sizes.split(",") if sizes is not None else map(str, SIZES):
        match = _SIZE.fullmatch(text.strip().upper().removesuffix("B"))
        number = int(match[1]) * _UNITS[match[2]] if match else 0
        if not 1 <= number <= MAX_SIZE:
            raise ConfigError(
                COMMAND_LINE,
                [f'--size: "{text}" is not a number of bytes up to 1G, such as 8, 32K or 64M'],
            )
        found.append(number)
    if len(found) > MAX_SIZES:
        raise ConfigError(
            COMMAND_LINE, [f"--size: {len(found)} sizes; must be at most {MAX_SIZES}"]
        )
    if repetitions is not None and not 1 <= repetitions <= MAX_REPETITIONS:
        raise ConfigError(COMMAND_LINE, [f"--repetitions: must be from 1 to {MAX_REPETITIONS}"])
    return tuple(
        (number, repetitions or (REPETITIONS if number <= SMALL else FEW)) for number in found
    )
