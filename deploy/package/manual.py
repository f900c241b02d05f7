"""Manual pages and shell completion, made from the command's own parser and options.

They are made when a package is built and kept nowhere, so that they cannot be out of date.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import typing
from typing import TYPE_CHECKING, Any

from dshealthd import __version__
from dshealthd.cli.apart import APART
from dshealthd.cli.commands import parser as command_line
from dshealthd.config import registry
from dshealthd.config.config import SECTIONS
from dshealthd.core.options import Duration, settable

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT = (
    ("0", "done"),
    ("1", "failed"),
    ("2", "bad usage, or a configuration that cannot be used"),
)
FILES = (
    ("/etc/dshealthd/dshealthd.toml", "the configuration, see dshealthd.toml(5)"),
    ("/var/lib/dshealthd", "what outlives a restart; evidence of hangs in evidence/"),
)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command that the manual describes."""
    parser = command_line()
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to list them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            return {
                name: importlib.import_module(APART[name][0]).parser() if name in APART else parser
                for name, parser in action.choices.items()
            }
    message = "the parser has no commands"
    raise LookupError(message)


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a command, without --help and what --help leaves out."""
    return [
        action
        for action in parser._actions  # noqa: SLF001
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS
    ]


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command that are no options, such as NODE."""
    return [
        action
        for action in parser._actions  # noqa: SLF001
        if not action.option_strings and action.help != argparse.SUPPRESS
    ]


def help_text(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return what --help says of an argument, with its default in place."""
    return parser._get_formatter()._expand_help(action) if action.help else ""  # noqa: SLF001


def roff(text: str) -> str:
    """Return a text of one paragraph as roff, which manual pages are in, takes it."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in {".", "'"} else escaped


def dshealthd_8(date: str) -> str:
    """Return the manual page of the command `dshealthd`."""
    lines = [
        f'.TH DSHEALTHD 8 "{date}" "dshealthd {__version__}"',
        ".SH NAME",
        "dshealthd \\- health agent for GPU training nodes",
        ".SH SYNOPSIS",
        ".B dshealthd",
        "\\fICOMMAND\\fR [\\fIOPTION\\fR]...",
        ".SH COMMANDS",
    ]
    found = commands()
    shared = {name for action in options(found["run"]) for name in action.option_strings}
    for name, parser in found.items():
        lines += [".TP", f"\\fB{roff(name)}\\fR", roff(parser.description or "")]
        own = [action for action in options(parser) if not shared & set(action.option_strings)]
        for action in (*arguments(parser), *own):
            lines += [".RS", *_argument(parser, action), ".RE"]
        lines += _epilog(parser)
    without = [name for name, one in found.items() if not shared & _flags(one)]
    lines += [".SH OPTIONS", f"Every command takes these but {roff(', '.join(without))}."]
    lines += ["A flag wins over the configuration file."]
    for action in options(found["run"]):
        lines += _argument(found["run"], action)
    lines += [".SH EXIT STATUS", "Where the command says nothing else:"]
    for code, meaning in EXIT:
        lines += [".TP", code, roff(meaning)]
    lines += [".SH SIGNALS", ".TP", "SIGHUP", "load the configuration again; a bad one is named"]
    lines += [".TP", "SIGTERM, SIGINT", "stop", ".SH FILES"]
    for file, meaning in FILES:
        lines += [".TP", f"\\fI{roff(file)}\\fR", roff(meaning)]
    lines += [".SH SEE ALSO", "dshealthd.toml(5), systemd.service(5)"]
    return "\n".join(lines) + "\n"


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in options(parser) for name in action.option_strings}


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    value = str(action.metavar or "") if action.nargs != 0 else ""
    if action.choices:
        value = "|".join(map(str, action.choices))
    value = f"\\fI{roff(value or action.dest.upper())}\\fR" if action.nargs != 0 else ""
    if action.nargs in ("?", "*", argparse.REMAINDER):
        value = f"[{value}]"
    if action.nargs in ("*", "+", argparse.REMAINDER):
        value += "..."
    names = ", ".join(f"\\fB{roff(name)}\\fR" for name in action.option_strings)
    return [".TP", " ".join(filter(None, (names, value))), roff(help_text(parser, action))]


def _epilog(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the end of --help, examples and exit status, a line each as it is there."""
    if parser.epilog:
        yield from (".RS", ".PP", ".nf")
        yield from (roff(line) if line.strip() else "" for line in parser.epilog.splitlines())
        yield from (".fi", ".RE")


def dshealthd_toml_5(date: str) -> str:
    """Return the page of the configuration file: every key, its default and its meaning."""
    lines = [
        f'.TH DSHEALTHD.TOML 5 "{date}" "dshealthd {__version__}"',
        ".SH NAME",
        "dshealthd.toml \\- configuration of dshealthd(8)",
        ".SH DESCRIPTION",
        roff(
            "TOML. It may be empty or absent: every key has the default that is given here. An "
            "unknown key or a bad value is an error, and all errors of a file are listed at once "
            "by dshealthd check-config. SIGHUP (systemctl reload dshealthd) applies a change; web, "
            "log and path.state take effect after a restart."
        ),
    ]
    for name, schema in SECTIONS.items():
        lines += _table(name, schema)
    for name, kind in registry.all_collectors().items():
        lines += _table(f"collectors.{name}", kind.Options)
    lines += [".SH SEE ALSO", "dshealthd(8)"]
    return "\n".join(lines) + "\n"


def _table(name: str, schema: type[Any]) -> Iterator[str]:
    yield f".SH [{name}]"
    yield roff((inspect.getdoc(schema) or "").split("\n\n", 1)[0])
    hints = typing.get_type_hints(schema)
    tables = []
    for field in settable(schema):
        if "doc" not in field.metadata:
            tables.append(field.name)
            continue
        default = field.metadata["default"]
        yield ".TP"
        yield f"\\fB{field.name}\\fR"
        yield roff(f"{field.metadata['doc']} Default: {_value(default)}.")
    for table in tables:
        yield from _table(f"{name}.{table}", hints[table])


def _value(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, (tuple, list)):
        return json.dumps([str(item) for item in default])
    if isinstance(default, (bool, int, float)) and not isinstance(default, Duration):
        return json.dumps(default)
    return json.dumps(str(default))


def bash() -> str:
    """Return the completion for bash."""
    found = commands()
    cases = []
    for name, parser in found.items():
        words = " ".join(flag for action in options(parser) for flag in action.option_strings)
        cases.append(f'    {name}) words="{words}" ;;')
    return f"""# Made from the options of dshealthd {__version__}.
_dshealthd() {{
    local words current=${{COMP_WORDS[COMP_CWORD]}}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(found)} --help --version" -- "$current"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{chr(10).join(cases)}
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$words --help" -- "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _dshealthd dshealthd
"""


def zsh() -> str:
    """Return the completion for zsh."""
    found = commands()
    described = "\n".join(
        f"    {_quoted(f'{name}:{parser.description or chr(32)}')}"
        for name, parser in found.items()
    )
    cases = []
    for name, parser in found.items():
        specs = []
        for action in options(parser):
            text = help_text(parser, action).replace("[", "(").replace("]", ")")
            value = "" if action.nargs == 0 else ":value:_files"
            if action.choices:
                value = f":value:({' '.join(map(str, action.choices))})"
            specs += [
                _quoted(f"{flag}[{text.replace(':', chr(92) + ':')}]{value}")
                for flag in action.option_strings
            ]
        cases.append(f"  {name}) _arguments {' '.join(specs)} ;;")
    return f"""#compdef dshealthd
# Made from the options of dshealthd {__version__}.
local -a commands
commands=(
{described}
)
if (( CURRENT == 2 )); then
  _describe command commands
  return
fi
local command=$words[2]
shift words
(( CURRENT-- ))
case $command in
{chr(10).join(cases)}
esac
"""


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return "'" + line.replace("'", "'\\''") + "'"
