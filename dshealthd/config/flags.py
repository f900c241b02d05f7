"""Flags: parsing of the command line, and its `--help`.

Every configuration option outside nested tables is also a flag. Only the help of `run` lists these
flags, in one group per section; elsewhere they would bury a command's own arguments and examples.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

from dshealthd.config import config
from dshealthd.config.config import SECTIONS
from dshealthd.core.options import Bytes, Duration
from dshealthd.core.text import printable

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.config.config import Config
    from dshealthd.core.options import ConfigError

INSTALLED = Path("/etc/dshealthd/dshealthd.toml")
"""The file that the packages' service reads, and so each command on a node unless told another."""
EXIT_FAILURE = 1
"""Exit status of a command that could not do what it was told to; EXIT_FAILURE of C."""
EXIT_USAGE = 2
EXIT_UNKNOWN = 3
"""Exit status for bad usage where 2 means critical: nothing was queried."""
ACCESS = ("tls", "ca_file", "user", "password_file")
"""Arguments of commands that query agents."""
FORMS = {
    bool: "true|false",
    int: "N",
    float: "NUMBER",
    str: "TEXT",
    Path: "PATH",
    Duration: "DURATION",
    Bytes: "BYTES",
}
"""Placeholder of a value in `--help`, by the type of the option."""


class FlagParser(argparse.ArgumentParser):
    """Parses a command line; what it does not know is an error of the command that it was given
    to.
    """

    exit_usage = EXIT_USAGE
    """Exit status for bad usage."""

    def __init__(self, **settings: Any) -> None:
        """Take argparse's settings.

        Flags cannot be abbreviated, as a new flag could make an abbreviation ambiguous.
        """
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(  # type: ignore[override] # argparse's overloads are of its own types
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown flags here, with this command's exit status for bad usage."""
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"unknown arguments: {' '.join(extra)}")
        return found, extra

    def error(self, message: str) -> NoReturn:
        """Print the error and where to find help; the whole usage would bury it."""
        self.exit(
            self.exit_usage, f"{self.prog}: {printable(message)}\nSee `{self.prog} --help`.\n"
        )


def add_flags(parser: argparse.ArgumentParser, *, listed: bool = False) -> None:
    """Add the configuration flags below a command's own arguments.

    Args:
        parser: The command's.
        listed: Whether its help lists those of the sections, too.
    """
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split()).replace("%", "%%")
    parser.usage = f"{usage} [--config.file FILE] [--SECTION.OPTION VALUE]..."
    where = "" if listed else "; `dshealthd run --help` lists them"
    group = parser.add_argument_group("configuration", f"Flags override the file{where}.")
    group.add_argument(
        "--config.file",
        dest="config_file",
        type=Path,
        metavar="FILE",
        default=INSTALLED if _exists(INSTALLED) else None,
        help="TOML file; dshealthd.toml(5), or docs/dshealthd.toml, describes it (default: "
        f"{INSTALLED}, if it exists)",
    )
    for section, schema in SECTIONS.items():
        summary = " ".join((inspect.getdoc(schema) or "").split("\n\n")[0].split())
        if listed:
            group = parser.add_argument_group(f"{section} options", summary)
        hints = typing.get_type_hints(schema)
        for field in dataclasses.fields(schema):
            if "doc" not in field.metadata:  # a table of its own
                continue
            names = [f"--{section}.{field.name.replace('_', '-')}"]
            if names == ["--web.config-file"]:
                names.insert(0, "--web.config.file")  # as Prometheus' own exporters spell it
            group.add_argument(
                *names,
                dest=f"{section}.{field.name}",
                default=argparse.SUPPRESS,
                metavar=field.metadata["form"] or form(hints[field.name]),
                help=_help(field.metadata) if listed else argparse.SUPPRESS,
            )


def _exists(file: Path) -> bool:
    """Return whether there is such a file; one that may not be looked at is one to tell of."""
    try:
        os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def usable(options: argparse.Namespace) -> tuple[Config, ConfigError | None]:
    """Return the configuration for a command that helps on a node whose own is broken.

    Of the installed file, it is what `config.usable` returns. Raise ConfigError for flags or a
    given file with errors.
    """
    loaded, wrong = config.usable(options.config_file, tables_of_flags(options))
    if wrong is not None and options.config_file != INSTALLED:
        raise wrong
    return loaded, wrong


def seconds(text: str) -> float:
    """Return how long to wait, given as `30` or as `30s`; for argparse."""
    try:
        found = float(text)
    except (ValueError, ArithmeticError):
        try:
            found = Duration.parse(text)
        except (ValueError, ArithmeticError) as error:
            raise argparse.ArgumentTypeError(f'"{text}" is {error}') from error
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f'"{text}" is not a time to wait')
    return found


def declare_access(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the arguments for agents that require TLS or a password, for every command."""
    parser.add_argument("--tls", action="store_true", help="query agents over TLS")
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="certificate authorities to trust with --tls (default: the system's)",
    )
    parser.add_argument(
        "--user", default="", metavar="NAME", help="user name for agents with basic authentication"
    )
    parser.add_argument(
        "--password-file", type=Path, metavar="FILE", help="file with that user's password"
    )


def form(hint: Any) -> str:
    """Return the placeholder in `--help` of a flag's value of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        return f"{form(arguments[0])},..."
    if origin in (types.UnionType, typing.Union):
        return form(arguments[0])
    return FORMS[hint]


def _help(metadata: typing.Mapping[str, Any]) -> str:
    text = str(metadata["doc"]).removesuffix(".")
    default = default_text(metadata["default"])
    return f"{text} (default: {default})".replace("%", "%%")


def default_text(default: Any) -> str:
    """Return a flag's default as a user would type it; `none` if there is none."""
    if default is None or default in ("", ()):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default)


def tables_of_flags(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the given flags as tables by section.

    A value has the type of its option if it looks like one; `config.load` checks it.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in vars(options).items():
        section, dot, name = key.partition(".")
        if dot:
            hint = typing.get_type_hints(SECTIONS[section])[name]
            found.setdefault(section, {})[name] = _value(hint, value)
    return found


def _value(hint: Any, text: str) -> Any:
    if typing.get_origin(hint) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if hint is bool and text in {"true", "false"}:
        return text == "true"
    for number in (int, float):
        if hint is number:
            try:
                return number(text)
            except (ValueError, ArithmeticError):
                return text
    return text
