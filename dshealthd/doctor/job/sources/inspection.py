"""What the DeepSpeed of the user's interpreter says about a configuration.

The interpreter is the user's program: it runs without a GPU, in a process that is killed at its
deadline, and not as root: as the owner of its environment, or as nobody, except where none but root
can reach it.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dshealthd.core import documents
from dshealthd.core.child import environment, how_ended
from dshealthd.linux.privileges import NOBODY

PROGRAM = Path(__file__).with_name("inspect_deepspeed.py")
DEADLINE = 60.0
"""Seconds; importing torch takes 2 to 10, or a minute from a cold network file system."""
MAX_ANSWER = 4 << 20
_LAST = 2048
_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")


@dataclass(frozen=True)
class Inspection:
    """The answer of `inspect_deepspeed`."""

    version: str = ""
    problem: str = ""
    """Why DeepSpeed could not be queried; the rest is then empty."""
    document: Any = None
    """The configuration parsed as Hjson, if it is not JSON."""
    syntax: str = ""
    """Why it is not Hjson either."""
    errors: Sequence[Mapping[str, Any]] = ()
    """Each with `kind`, `path` and `text`."""
    unread: Sequence[str] | None = None
    """Keys without effect; None if unknown."""
    looked_up: Mapping[str, list[str]] = field(default_factory=dict)
    """Keys that DeepSpeed looks up, by block; those of the top level under the empty path."""
    models: Mapping[str, list[str]] = field(default_factory=dict)
    """Keys of the blocks that DeepSpeed validates, by class."""
    settings: Mapping[str, Any] | None = None
    """The settings as DeepSpeed understood them; None if it refuses the configuration."""
    warnings: Sequence[str] = ()


def inspect(python: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the inspection with an interpreter; return its JSON answer, or why not as `problem`.

    Has no timeout of its own: call it in a process that is killed, with its group, at a deadline.
    """
    program_of_user = shutil.which(python)
    if program_of_user is None:
        return {"problem": f"{python} is not a program"}
    python = os.path.abspath(program_of_user)  # it runs in another directory
    errors = os.memfd_create("stderr", os.MFD_CLOEXEC)
    variables = {**_variables(), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    rights: dict[str, Any] = {}
    user = _owner(python) if os.geteuid() == 0 else None
    if user is not None:
        rights = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        variables["HOME"] = user.pw_dir
    try:
        process = subprocess.Popen(  # noqa: S603 - the interpreter that the user names
            [python, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            cwd="/",
            **rights,
        )
    except OSError as error:
        why = f"{python} cannot be started: {error.strerror}"
        if user is not None:
            why = (
                f"{python} cannot be started as {user.pw_name}: {error.strerror}; users may write "
                "what it imports, so root does not run it: run the doctor as the user of the job"
            )
        return {"problem": why}
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101 - as above
    try:
        with process.stdin as stream:
            stream.write(documents.dumps(request).encode())
    except BrokenPipeError:
        pass  # it ended before reading all: its exit status says more
    data = process.stdout.read(MAX_ANSWER + 1)
    if len(data) > MAX_ANSWER:
        process.kill()
        process.wait()
        return {"problem": f"{python} answered with more than {MAX_ANSWER} bytes"}
    process.wait()
    try:
        found = json.loads(data)
    except (ValueError, ArithmeticError, RecursionError):
        found = None
    if not isinstance(found, dict):
        said = _last_line(errors)
        ended = how_ended(process.returncode)
        return {"problem": f"{python} {ended} without an answer{f': {said}' if said else ''}"}
    return found


def from_json(document: Mapping[str, Any]) -> Inspection:
    """Return the inspection in a JSON document; missing keys keep their defaults."""
    names = Inspection.__dataclass_fields__.keys() & document.keys()
    return Inspection(**{name: document[name] for name in names if document[name] is not None})


def _variables() -> dict[str, str]:
    if os.geteuid() != 0:
        return environment()
    return {name: value for name in _INHERITED if (value := os.environ.get(name)) is not None}


def _owner(python: str) -> pwd.struct_passwd | None:
    """Return whose rights an interpreter gets that root names: its environment's owner's.

    Those of nobody if that is root: which of the files that it imports others may write is not
    known before it has run. None if its environment lies in a directory that is closed to others.
    """
    absolute = os.path.abspath(python)
    for path in (absolute, os.path.dirname(os.path.dirname(absolute))):
        try:
            uid = os.lstat(path).st_uid
        except OSError:
            continue
        if uid:
            try:
                return pwd.getpwuid(uid)
            except KeyError:
                return _without_entry(uid)
    return None if _is_closed(absolute) else _without_entry(NOBODY.uid)


def _is_closed(path: str) -> bool:
    """Return whether none but root can reach a path, so that nobody else can write there."""
    for directory in Path(path).parents:
        try:
            status = os.stat(directory)
        except OSError:
            continue
        if status.st_uid == 0 and not status.st_mode & 0o011:
            return True
    return False


def _without_entry(uid: int) -> pwd.struct_passwd:
    name = "nobody" if uid == NOBODY.uid else str(uid)
    return pwd.struct_passwd((name, "x", uid, NOBODY.gid, "", "/", ""))


def _last_line(errors: int) -> str:
    """Return the last line of the interpreter's errors, which are in a memory file."""
    size = os.fstat(errors).st_size
    lines = os.pread(errors, _LAST, max(0, size - _LAST)).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
