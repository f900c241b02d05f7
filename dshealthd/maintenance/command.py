"""`dshealthd maintenance`: sets, ends or shows the maintenance of this node.

The files are written with the caller's rights, and the agent reads them within seconds. The agent
need not be running: maintenance survives restarts of the agent and of the node.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from dshealthd.config.flags import EXIT_FAILURE
from dshealthd.core import state_file
from dshealthd.core.options import COMMAND_LINE, ConfigError, Duration
from dshealthd.core.text import print_lines, printable
from dshealthd.maintenance.file import FILES, LIMIT, MAX_REASON, Maintenance, parse

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.config.config import Config

DEFAULT = "2h"
"""How long maintenance lasts without `--for`."""
SHORTEST, LONGEST = 60.0, 30 * 86400.0
"""Seconds. Maintenance without an end would hide later faults."""


class MaintenanceError(Exception):
    """The requested action is not possible; the message says why."""


def maintenance(loaded: Config, action: str, duration: str | None, reason: str | None) -> int:
    """Run one action of `dshealthd maintenance`; if it fails, print why and return 1. Raise
    ConfigError for wrong arguments.
    """
    if action != "on" and (duration is not None or reason is not None):
        raise ConfigError(COMMAND_LINE, ["--for and --reason are only for on"])
    try:
        if action == "on":
            _on(loaded.path.state, _seconds(duration or DEFAULT), _line(reason or ""))
        else:
            (_off if action == "off" else _show)(loaded.path.state)
    except PermissionError as error:
        print_lines(
            f"dshealthd maintenance {action}: {error.filename}: {error.strerror}: must be run as "
            "root or as the agent's user",
            error=True,
        )
        return EXIT_FAILURE
    except (FileNotFoundError, NotADirectoryError) as error:
        print_lines(
            f"dshealthd maintenance {action}: {loaded.path.state}: {error.strerror}; --path.state "
            "names the agent's directory",
            error=True,
        )
        return EXIT_FAILURE
    except (MaintenanceError, OSError) as error:
        print_lines(f"dshealthd maintenance {action}: {error}", error=True)
        return EXIT_FAILURE
    return 0


def _on(directory: Path, seconds: float, reason: str) -> None:
    now = time.time()
    place = directory / FILES["operator"]
    state_file.replace(place, Maintenance(now, now + seconds, reason).encode(), durable=True)
    _show(directory)


def _off(directory: Path) -> None:
    place = directory / FILES["operator"]
    try:
        os.unlink(place)
    except FileNotFoundError:
        print_lines("no operator had put this node in maintenance")
    _show(directory)


def _show(directory: Path) -> None:
    os.stat(directory)  # a missing or unreadable directory must not mean "not in maintenance"
    now, shown = time.time(), 0
    for source, name in FILES.items():
        place = directory / name
        try:
            found = parse(state_file.read(place, LIMIT))
        except FileNotFoundError:
            continue
        except (ValueError, ArithmeticError) as error:
            raise MaintenanceError(f"{place}: {error}") from error
        if found.end > now:
            shown += 1
            until = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(found.end))
            why = f": {printable(found.reason)}" if found.reason else ""
            print_lines(f"in maintenance until {until} ({source}){why}")
    if not shown:
        print_lines("not in maintenance")


def _seconds(text: str) -> float:
    try:
        seconds = Duration.parse(text)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(COMMAND_LINE, [f'--for: "{text}" is {error}']) from error
    if not SHORTEST <= seconds <= LONGEST:
        limits = f"between {Duration(SHORTEST)} and {Duration(LONGEST)}"
        raise ConfigError(COMMAND_LINE, [f"--for: {text} is not {limits}"])
    return seconds


def _line(reason: str) -> str:
    if len(reason) > MAX_REASON or not reason.isprintable():
        wanted = f"one line of at most {MAX_REASON} printable characters"
        raise ConfigError(COMMAND_LINE, [f"--reason: must be {wanted}"])
    return reason
