"""The command `dshealthd`, which imports only what the called command needs.

Reading a log takes less time than importing asyncio, the configuration and all commands.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import signal
import sys

from dshealthd.cli.apart import APART

EXIT_PIPE = 141
"""Exit status that a shell reports for a program that SIGPIPE ends."""
EXIT_OUTPUT = os.EX_IOERR
"""Exit status if the output cannot be written, such as to a full disk; no command's verdict."""


def main(words: list[str] | None = None) -> int:
    """Run the command `dshealthd` and return its exit status.

    0 done, 1 failed, 2 bad usage or configuration; `explain`, `doctor`, `status` and `jobs` have
    their own. 74: the output cannot be written. 141: its reader, such as `head`, has exited.
    """
    _open_standard_streams()
    try:
        status = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_gone():  # another pipe: a defect that must surface
            raise
        _discard_output()
        return EXIT_PIPE
    except KeyboardInterrupt:
        # Its end by the signal, which a shell's loop needs to see, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise
    except OSError as error:
        if not _output_fails():
            raise
        _discard_output()
        sys.stderr.write(f"dshealthd: standard output: {error.strerror}\n")
        return EXIT_OUTPUT
    return status


def _open_standard_streams() -> None:
    """Open on `/dev/null` what the caller has closed, as a socket would get that descriptor, and
    print in UTF-8.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    # Whatever the locale: with LANG=en_US, which is Latin-1, a log's line or a runbook's `…` fails.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _discard_output() -> None:
    """Drop buffered output, which would fail again when the interpreter exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_fails() -> bool:
    """Return whether standard output takes nothing, neither what it has kept nor a line."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _reader_gone() -> bool:
    """Return whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(words: list[str] | None) -> int:
    words = sys.argv[1:] if words is None else words
    if words and words[0] in APART:
        status: int = importlib.import_module(APART[words[0]][0]).main(words[1:])
        return status
    from dshealthd.cli import commands

    return commands.main(words)
