"""The command `dshealthd`, which imports no more than the command that is called needs.

Reading a log takes less time than importing asyncio, the configuration and every command.
"""

from __future__ import annotations

import sys


def main(words: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 done, 1 failed, 2 bad usage or configuration; `explain`, `doctor`, `status` and `jobs` have
    their own.
    """
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["explain"]:  # needs no configuration, and has exit statuses of its own
        from dshealthd.explain import command as explain

        return explain.main(words[1:])
    if words[:1] == ["doctor"]:  # exit statuses of its own, for bad usage too
        from dshealthd.doctor import command as doctor

        return doctor.main(words[1:])
    if words[:1] == ["free-port"]:  # starts processes and becomes one: no thread of the log
        from dshealthd import free_port_command

        return free_port_command.main(words[1:])
    from dshealthd import commands

    return commands.main(words)
