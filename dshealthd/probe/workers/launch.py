"""Checks that nobody else can write to a Python environment, then becomes its interpreter.

Run as `python -I launch.py PARENT_PID CONTROL PYTHON PROGRAM` by the agent's own interpreter, in a
separate process because the environment may be on a hung file system. The agent is about to run
this code with its own rights, so only root and the agent's user may be able to write to it: the
interpreter with every folder and link on its path, the standard library, and the packages installed
beside it. Otherwise a packet on the control socket says what is wrong:
`{"failed": "writable", "detail": …}`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator

MAX_NAMED = 3
"""Problems that the message names; the rest are counted."""
MAX_LINKS = 40
FLAGS = ("-I", "-B", "-W", "ignore")
"""Interpreter flags: ignore the environment, user site and current folder, write no bytecode, and
suppress warnings, which are for the training's own users.
"""
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 1, 38, 47, 4
"""Of linux/prctl.h."""


def objection(path: str, status: os.stat_result, *, on_the_way: bool = False) -> str:
    """Return why others can change an environment's file, folder or link; empty if they cannot.
    `on_the_way`: a folder in which only one known entry matters; in a sticky one such as /tmp
    nobody else can replace that entry.
    """
    if status.st_uid not in {0, os.geteuid()}:
        return f"{path} belongs to user {status.st_uid}"
    # A link's own mode is always 0777 and means nothing. In a sticky folder only an entry's owner
    # can replace it.
    if stat.S_ISLNK(status.st_mode) or (on_the_way and status.st_mode & stat.S_ISVTX):
        return ""
    if status.st_mode & stat.S_IWOTH:
        return f"{path} is writable by everyone"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in {0, os.getegid()}:
        return f"{path} is writable by group {status.st_gid}"
    return ""


def way(path: str) -> Iterator[str]:
    """Yield objections to a file and to each folder and link on its path. Raises OSError."""
    seen: set[str] = set()
    pending = [part for part in os.path.abspath(path).split("/") if part]
    at, links = "/", 0
    while pending:
        at = os.path.join(at, pending.pop(0))
        # Check every step with lstat: whoever can replace a link decides where it leads.
        status = os.lstat(at)
        if at not in seen:
            seen.add(at)
            found = objection(at, status, on_the_way=bool(pending) and stat.S_ISDIR(status.st_mode))
            if found:
                yield found
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, "too many links", path)
            target = os.path.normpath(os.path.join(os.path.dirname(at), os.readlink(at)))
            pending = [part for part in target.split("/") if part] + pending
            # Start again at the root: the target's own path has to be safe too.
            at = "/"


def tree(root: str) -> Iterator[str]:
    """Yield objections to everything in an environment's folder; follow links that lead out."""
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                found = objection(entry.path, entry.stat(follow_symlinks=False))
                if found:
                    yield found
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif (
                    entry.is_symlink()
                    and not f"{os.path.realpath(entry.path)}/".startswith(f"{root}/")
                    and os.path.exists(entry.path)
                ):
                    yield from way(entry.path)


def prefixes(python: str) -> list[str]:
    """Return the prefixes of library and packages: a virtual environment and its base."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    found = []
    configuration = os.path.join(folder, "pyvenv.cfg")
    if os.path.exists(configuration):
        found.append(folder)
        with open(configuration, encoding="utf-8") as lines:
            home = next(
                (
                    line.partition("=")[2].strip()
                    for line in lines
                    if line.partition("=")[0].strip() == "home"
                ),
                "",
            )
        if home:
            found.append(os.path.dirname(home))
    found.append(os.path.dirname(os.path.dirname(os.path.realpath(python))))
    if "/usr" in found:
        found.append("/usr/local")  # where Debian's Python keeps what pip installs
    return list(dict.fromkeys(map(os.path.realpath, found)))


def libraries(prefix: str) -> list[str]:
    """Return the folders of a training environment from which a worker imports."""
    found = []
    for lib in ("lib", "lib64"):
        folder = os.path.join(prefix, lib)
        if os.path.isdir(folder) and not os.path.islink(folder):
            found += [
                os.path.join(folder, name)
                for name in sorted(os.listdir(folder))
                if name.startswith("python3")
            ]
    return [path for path in found if os.path.isdir(path) and not os.path.islink(path)]


def check(python: str) -> tuple[list[str], list[str]]:
    """Return the objections to an environment, and the folders checked. Raises OSError."""
    objections = list(way(python))
    roots: list[str] = []
    for prefix in prefixes(python):
        configuration = os.path.join(prefix, "pyvenv.cfg")
        if os.path.exists(configuration):
            objections += way(configuration)
        for root in libraries(prefix):
            objections += way(root)
            objections += tree(root)
            roots.append(root)
    return list(dict.fromkeys(objections)), roots


def refusal(python: str, objections: list[str]) -> str:
    """Return what the agent is told of an environment that others can change."""
    rest = len(objections) - MAX_NAMED
    detail = "; ".join(objections[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
    return f"others can change {python}: {detail}"


def main(agent: int, control: int, python: str, program: str) -> None:
    """Check the Python environment and become the interpreter of the fork server."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != agent:
        os._exit(1)
    # Drop privileges before the environment's interpreter runs.
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    try:
        objections, roots = check(python)
        if not objections:
            os.set_inheritable(control, True)  # noqa: FBT003 - positional only
            os.execv(  # noqa: S606 - no shell is meant
                python, [python, *FLAGS, program, "parent", os.pathsep.join(roots), str(control)]
            )
        answer = {"failed": "writable", "detail": refusal(python, objections)}
    except OSError as error:
        answer = {"failed": "no_python", "detail": f"{python}: {error}"}
    with socket.socket(fileno=control) as channel:
        channel.send(json.dumps(answer, allow_nan=False).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
