"""Checks of a job, run on what a user would name on the command line."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dshealthd.doctor.check import Result
from dshealthd.doctor.job.arguments import parse
from dshealthd.doctor.job.checks import CHECKS
from dshealthd.doctor.job.context import JobContext, add_arguments, context
from dshealthd.doctor.job.sources import deepspeed_config, inspection, slurm_script
from dshealthd.doctor.job.sources.source import Source
from dshealthd.findings.finding import State

OK, WARNING, UNKNOWN, CRITICAL = State
NAME = "ds_config.json"
_MANY = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); import inspect_deepspeed as program;"
    " print(json.dumps([program.answer(request) for request in json.load(sys.stdin)]))"
)


def asked(
    *arguments: str, launch: str = "", environment: Mapping[str, str] = os.environ
) -> JobContext:
    """Return what the checks are given for a command line, in a shell with these variables.

    `launch` is the command behind `--`, as a shell splits it.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--job", *map(str, arguments), *(["--", *shlex.split(launch)] if launch else [])]
    return context(parse(parser, words), environment)


def asked_of_script(
    directory: Path, text: str, *arguments: str, environment: Mapping[str, str] = os.environ
) -> JobContext:
    """Return what the checks are given for a script of bash, written to `job.sh`."""
    file = directory / "job.sh"
    file.write_text(f"#!/bin/bash\n{text}\n")
    return asked(str(file), *arguments, environment=environment)


def job_of_script(files: Mapping[str, str]) -> JobContext:
    """Return the job of a script, the file `job` among these, without its environment."""
    beside = defaultdict(str, {f"{at}{name}": files[name] for name in files for at in ("", "./")})
    parsed = slurm_script.parse(files["job"], {}, beside.__getitem__)
    return JobContext(script=Source("job", parsed))


def results(name: str, given: JobContext) -> list[Result]:
    """Return what a check finds; its results must be more than none."""
    (check,) = (check for check in CHECKS if check.name == name)
    found = list(check.run(given))
    assert found, name
    for result in found:
        assert result.text.isprintable()
        assert "\n" not in result.remedy
    return found


def faults(name: str, given: JobContext) -> list[Result]:
    """Return what a check warns of."""
    return [one for one in results(name, given) if one.outcome in {WARNING, CRITICAL}]


def outcomes(name: str, given: JobContext) -> list[State]:
    """Return how a check judges."""
    return [result.outcome for result in results(name, given)]


def inspect_many(requests: Sequence[dict[str, Any]]) -> list[inspection.Inspection]:
    """Have the installed DeepSpeed answer requests one after the other, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", _MANY, str(inspection.PROGRAM.parent)],
        input=json.dumps(requests).encode(),
        capture_output=True,
        check=True,
        timeout=250,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        cwd="/",
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    return [inspection.from_json(answer) for answer in answers]


def with_config(
    document: dict[str, Any], inspected: inspection.Inspection | None = None, **more: Any
) -> JobContext:
    """Return a job with a configuration, and what DeepSpeed says of it."""
    parsed = deepspeed_config.parse(json.dumps(document))
    source = None if inspected is None else Source(sys.executable, inspected)
    return JobContext(config=Source(NAME, parsed), inspected=source, python=sys.executable, **more)


def texts(found: Iterable[Result]) -> str:
    """Return the texts of results, a line each."""
    return "\n".join(result.text for result in found)


def runs_as_nobody(program: str) -> bool:
    """Return whether nobody can run a program; root only."""
    try:
        subprocess.run([program, "-c", ""], user=65534, group=65534, extra_groups=[], check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def environment_after(remedy: str, variables: dict[str, str]) -> dict[str, str]:
    """Return what a shell with these variables has once the remedy was pasted into it."""
    done = subprocess.run(
        ["sh", "-euc", f"{remedy}\nenv -0"],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return dict(pair.partition("=")[::2] for pair in done.stdout.split("\0") if pair)
