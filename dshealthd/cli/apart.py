"""The commands that have a parser of their own, by module and what they do.

`explain` needs no configuration, `doctor` has exit statuses of its own for bad usage too, and
`free-port` forks and execs, so that no log thread may run.
"""

from __future__ import annotations

APART: dict[str, tuple[str, str]] = {
    "doctor": (
        "dshealthd.doctor.command",
        "Check whether this node, or others, are fit to start a training job.",
    ),
    "explain": ("dshealthd.explain.command", "Name the cause of a job's failure from its logs."),
    "free-port": ("dshealthd.cli.free_port", "Print a free port for a rendezvous."),
}
"""Modules with `main` and `parser`, and texts for `--help`."""
