"""The command `dshealthd`, which imports only what the called command needs.

Reading a log takes less time than importing asyncio, the configuration and all commands.
"""

from __future__ import annotations

import importlib
import os
import select
import sys

from dshealthd.cli.apart import APART

EXIT_PIPE = 141
"""Exit status that a shell reports for a program that SIGPIPE ends."""


def main(words: list[str] | None = None) -> int:
    """Run the command `dshealthd` and return its exit status.

    0 done, 1 failed, 2 bad usage or configuration; `explain`, `doctor`, `status` and `jobs` have
    their own. 141: the reader of the output, such as `head`, has exited.
    """
    try:
        status = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_gone():  # another pipe: a defect that must surface
            raise
        # Buffered output would fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    return status


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
