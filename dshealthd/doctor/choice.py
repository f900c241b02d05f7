"""The choice of checks to run, by `--only`, `--skip` and the configuration.

Job checks are imported only on request: importing them takes a tenth of the start-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dshealthd.core.options import ConfigError, unknown
from dshealthd.doctor import node
from dshealthd.doctor.options import DoctorOptions

if TYPE_CHECKING:
    import argparse

    from dshealthd.config.config import Config
    from dshealthd.doctor.check import Check


def choose_checks(options: argparse.Namespace, loaded: Config) -> list[Check[Any]]:
    """Return the requested checks; ConfigError names those that do not exist.

    With `--job` the job checks come first.
    """
    only = "--only and --skip"
    wanted = [name for name in options.only.split(",") if name]
    left_out = [name for name in options.skip.split(",") if name]
    given = (
        ("--only", wanted),
        ("--skip", left_out),
        ("doctor.skip", loaded.section(DoctorOptions).skip),
        ("doctor.accept", [one.check for one in loaded.section(DoctorOptions).accepted()]),
    )
    for source, names in given:
        if errors := [*not_checks(names)]:
            raise ConfigError(source, errors)
    of_nodes = {check.name for check in node.CHECKS}
    of_jobs: tuple[Check[Any], ...] = ()
    if with_jobs := options.job or options.listed:
        from dshealthd.doctor.job import checks as job

        of_jobs = job.CHECKS
    if not with_jobs and (
        errors := [
            f"{name}: this is a job check: add --job"
            for name in wanted
            if name not in of_nodes and not name.startswith("path ")
        ]
    ):
        raise ConfigError(only, errors)
    skipped = {*left_out, *(() if wanted else loaded.section(DoctorOptions).skip)}
    checks = [
        check
        for check in (*of_jobs, *node.CHECKS)
        if (not wanted or check.name in wanted) and check.name not in skipped
    ]
    if not checks and not options.paths:
        raise ConfigError(only, ["no check is left"])
    return checks


def not_checks(names: Iterable[str]) -> Iterator[str]:
    """Yield an error for each name that is no check's."""
    of_nodes = [check.name for check in node.CHECKS]
    strange = [name for name in names if name not in of_nodes and not name.startswith("path ")]
    if not strange:
        return
    from dshealthd.doctor.job import checks as job

    known = [*(check.name for check in job.CHECKS), *of_nodes]
    for name in strange:
        if name not in known:
            yield f"{name}: {unknown(name, known).replace('unknown key', 'no such check')}"


def of_the_job(
    options: argparse.Namespace, checks: Sequence[Check[Any]]
) -> list[tuple[Check[Any], Any]]:
    """Return the job checks with their context, read once; none without `--job`."""
    wanted = [check for check in checks if check not in node.CHECKS]
    if not wanted:
        return []
    from dshealthd.doctor.job import checks as job
    from dshealthd.doctor.job import context as job_context

    context = job_context.context(options)
    named = set(options.only.split(","))  # a check requested by name says why it cannot run
    concerned = job.applicable(context)
    applying = [check for check in wanted if check in concerned or check.name in named]
    return [(check, context) for check in applying or wanted[:1]]
