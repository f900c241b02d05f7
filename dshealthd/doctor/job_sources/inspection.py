"""What the DeepSpeed of the user's interpreter says of a configuration.

The interpreter is the user's program: it runs as the owner of its environment where doctor runs as
root, without a GPU, in a process that is killed at its deadline.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dshealthd.core.child import environment, how_ended

PROGRAM = Path(__file__).with_name("inspect_deepspeed.py")
DEADLINE = 60.0
"""Seconds; importing torch takes 2 to 10, and a minute from a cold network file system."""
MAX_ANSWER = 4 << 20
_LAST = 2048
_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")


@dataclass(frozen=True)
class Inspection:
    """The answer of `inspect_deepspeed`."""

    version: str = ""
    problem: str = ""
    """Why DeepSpeed could not be asked; the rest is empty then."""
    document: Any = None
    """The configuration as Hjson, where it is no JSON."""
    syntax: str = ""
    """Why it is no Hjson either."""
    errors: tuple[Mapping[str, Any], ...] = ()
    """Each with `kind`, `path` and `text`."""
    batch: str = ""
    """What DeepSpeed says of batch sizes that do not add up."""
    unread: tuple[str, ...] | None = None
    """Keys without effect; None where that cannot be told."""
    looked_up: Mapping[str, list[str]] = field(default_factory=dict)
    """Keys that DeepSpeed asks for, by block; those of the top level under the empty path."""
    models: Mapping[str, list[str]] = field(default_factory=dict)
    """Keys of the blocks that are checked, by class."""
    settings: Mapping[str, Any] | None = None
    """What DeepSpeed understood; None where it refuses the configuration."""
    warnings: tuple[str, ...] = ()
    estimate: Mapping[str, Any] = field(default_factory=dict)


def inspect(python: str, request: Mapping[str, Any], program: Path = PROGRAM) -> dict[str, Any]:
    """Inspect DeepSpeed by an interpreter; return its answer's JSON, or `problem` why there is
    none.

    Waits without end: for a process that is killed at its deadline, and its group with it.
    """
    program_of_user = shutil.which(python)
    if program_of_user is None:
        return {"problem": f"{python} is no program"}
    python = os.path.abspath(program_of_user)  # it starts in another directory
    errors = os.memfd_create("stderr", os.MFD_CLOEXEC)
    variables = {**_variables(), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    rights: dict[str, Any] = {}
    if (user := _owner(python)) is not None:
        rights = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        variables = {
            name: value for name, value in variables.items() if name not in {"HOME", "USER"}
        }
        variables["HOME"] = user.pw_dir
    try:
        process = subprocess.Popen(  # noqa: S603 - the interpreter that the user names
            [python, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            cwd="/",
            **rights,
        )
    except OSError as error:
        return {"problem": f"{python} cannot be started: {error.strerror}"}
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101 - as above
    try:
        with process.stdin as stream:
            stream.write(json.dumps(request).encode())
    except BrokenPipeError:
        pass  # it ended before it has read: its status says more
    data = process.stdout.read(MAX_ANSWER + 1)
    if len(data) > MAX_ANSWER:
        process.kill()
        process.wait()
        return {"problem": f"{python} answered with more than {MAX_ANSWER} bytes"}
    process.wait()
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        said = _last_line(errors)
        ended = how_ended(process.returncode)
        return {"problem": f"{python} {ended} without an answer{f': {said}' if said else ''}"}
    return found


def from_json(document: Mapping[str, Any]) -> Inspection:
    """Return the inspection of a JSON document; keys that are missing keep their defaults."""
    known: dict[str, Any] = {}
    for name in Inspection.__dataclass_fields__:
        if document.get(name) is not None:
            value = document[name]
            known[name] = tuple(value) if isinstance(value, list) and name != "document" else value
    return Inspection(**known)


def _variables() -> dict[str, str]:
    """Return the environment of the interpreter whose DeepSpeed is inspected."""
    if os.geteuid() != 0:
        return environment()
    return {name: value for name in _INHERITED if (value := os.environ.get(name)) is not None}


def _owner(python: str) -> pwd.struct_passwd | None:
    """Return whose the interpreter's environment is, where root would run another's program."""
    if os.geteuid() != 0:
        return None
    place = os.path.abspath(python)
    for path in (place, os.path.dirname(os.path.dirname(place))):
        try:
            uid = os.lstat(path).st_uid
        except OSError:
            continue
        if uid:
            try:
                return pwd.getpwuid(uid)
            except KeyError:
                return pwd.struct_passwd((str(uid), "x", uid, 65534, "", "/", ""))
    return None


def _last_line(errors: int) -> str:
    """Return the last line that the inspecting interpreter wrote to a memory file."""
    size = os.fstat(errors).st_size
    lines = os.pread(errors, _LAST, max(0, size - _LAST)).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
