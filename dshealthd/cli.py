"""The command `dshealthd`, which imports no more than the command that is called needs.

Reading a log takes less time than importing asyncio, the configuration and every command.
"""

from __future__ import annotations

import os
import select
import sys

EXIT_PIPE = 141
"""As a shell has it for a program that SIGPIPE ends."""


def main(words: list[str] | None = None) -> int:
    """Run the command `dshealthd`, with no more imports than it needs; return its exit status.

    0 done, 1 failed, 2 bad usage or configuration; `explain`, `doctor`, `status` and `jobs` have
    their own. 141: whoever reads the output has gone, as `head` does.
    """
    try:
        status = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_gone():  # another pipe: a defect, which must be seen
            raise
        # What is still buffered would fail again at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    return status


def _reader_gone() -> bool:
    """Tell whether the command's standard output is a pipe that nothing reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(words: list[str] | None) -> int:
    """Import the module of the one command that is called, run it, and return its exit status."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["explain"]:  # needs no configuration, and has exit statuses of its own
        from dshealthd.explain import command as explain

        return explain.main(words[1:])
    if words[:1] == ["doctor"]:  # exit statuses of its own, for bad usage too
        from dshealthd import doctor_command

        return doctor_command.main(words[1:])
    if words[:1] == ["free-port"]:  # starts processes and becomes one: no thread of the log
        from dshealthd import free_port_command

        return free_port_command.main(words[1:])
    from dshealthd import commands

    return commands.main(words)
