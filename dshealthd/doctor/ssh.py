"""The examination of other nodes over SSH, in parallel, each with a deadline.

BatchMode: ssh never prompts for a password or a host key. The answer is another machine's text: it
is bounded, checked, and made safe before it is printed.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshealthd.core import documents
from dshealthd.core.text import printable
from dshealthd.doctor.report import NodeReport, parse_node
from dshealthd.findings.finding import State
from dshealthd.linux.forked import Emit, Ended, Pool
from dshealthd.probe.members.hostlist import HostlistError, MembershipError, expand
from dshealthd.probe.members.membership import load
from dshealthd.probe.options import MembershipOptions

ALLOCATION = "slurm"
MAX_ANSWER = 1 << 20
"""Maximum bytes of one node's answer; a report has about 50 KiB."""
_SSH_FAILED = 255
"""Exit status of ssh(1) itself."""
_NOT_FOUND = 127
"""Exit status of a shell that does not find the program."""
CONNECT = 5
"""Seconds for a connection: its request is sent at 0, 1, 3 and 7 s, and two may be lost."""
DEADLINE = 15.0
"""Seconds for all hosts together."""
_MARK = "--gpus--"
_SCRIPT = f"echo {_MARK}; ls /proc/driver/nvidia/gpus 2>/dev/null"
_OPTIONS = ("-n", "-x", "-a", "-o", "ConnectionAttempts=1", "-o", "ControlMaster=no")
"""In addition to those of every call: nothing is read, forwarded, or left behind for others."""


class HostsError(Exception):
    """The nodes of `--hosts` are unknown; the message says why."""


def host_names(text: str) -> tuple[str, ...]:
    """Return the nodes of `--hosts`: `@FILE`, `slurm`, or a Slurm host list."""
    if text.startswith("@"):
        try:
            return load(MembershipOptions(hostfile=Path(text[1:]))).names
        except MembershipError as error:
            raise HostsError("\n".join(error.errors)) from error
    if text == ALLOCATION:
        text = os.environ.get("SLURM_JOB_NODELIST", "")
        if not text:
            message = "--hosts slurm: SLURM_JOB_NODELIST is not set; run it inside an allocation"
            raise HostsError(message)
    try:
        return expand(text)
    except HostlistError as error:
        raise HostsError(f"--hosts: {error}") from error


def command(ssh: Sequence[str], host: str, remote: Sequence[str], seconds: float) -> list[str]:
    """Return the SSH command that runs a program on another node."""
    return [
        *ssh,
        "-o", "BatchMode=yes",
        "-o", f"ConnectTimeout={max(1, int(seconds))}",
        "-o", "ClearAllForwardings=yes",
        "-T",
        "--", host, shlex.join(remote),
    ]  # fmt: skip


def examine_nodes(
    hosts: Sequence[str],
    ssh: Sequence[str],
    remote: Sequence[str],
    seconds: float,
    progress: Callable[[int, int, Sequence[str]], object],
) -> list[NodeReport]:
    """Return each node's report over SSH, in the order of the hosts, each within `seconds`."""
    commands = {host: command(ssh, host, remote, seconds) for host in hosts}
    found: dict[str, NodeReport] = {}
    for ended in _all(commands, seconds, lambda running: progress(len(found), len(hosts), running)):
        found[ended.name] = _report(ended, seconds)
    return [found[host] for host in hosts]


def _all(
    commands: Mapping[str, Sequence[str]],
    seconds: float,
    on_tick: Callable[[Sequence[str]], object] = lambda _running: None,
) -> Iterator[Ended]:
    """Run commands in parallel, each with a deadline; yield each as it ends, by its host."""
    pool = Pool()
    try:
        for host, arguments in commands.items():
            pool.start(host, functools.partial(run, arguments=arguments), seconds)
        yield from pool.ended(on_tick=lambda: on_tick(pool.names))
    finally:
        pool.close()


def run(_emit: Emit, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run a program, such as ssh; return its status, its output and its errors, of each at most one
    byte more than an answer may have; who sends more is ended.
    """
    with (
        subprocess.Popen(  # noqa: S603 - a list of arguments, and no shell here
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
        selectors.DefaultSelector() as streams,
    ):
        # Both at once: a program whose errors are not read hangs before its output ends.
        said = {"output": b"", "errors": b""}
        for name, stream in zip(said, (process.stdout, process.stderr), strict=True):
            if stream:
                streams.register(stream, selectors.EVENT_READ, name)
        while streams.get_map():
            for ready, _ in streams.select():
                piece = os.read(ready.fd, MAX_ANSWER)
                said[ready.data] = (said[ready.data] + piece)[: MAX_ANSWER + 1]
                if len(said[ready.data]) > MAX_ANSWER:
                    process.kill()
                if not piece:
                    streams.unregister(ready.fileobj)
    output, errors = (text.decode(errors="replace") for text in said.values())
    return process.returncode, output, errors


def last_line(text: str) -> str:
    """Return the last non-empty line of ssh's output, made safe."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1][:300]) if lines else "no message"


def _report(ended: Ended, seconds: float) -> NodeReport:
    host = ended.name
    if ended.hung:
        return NodeReport(host, problem=f"no answer over SSH within {seconds:g} s")
    if ended.problem:
        return NodeReport(host, problem=f"SSH could not be run: {ended.problem}")
    code, output, errors = ended.value
    if code == _SSH_FAILED and not output:
        return NodeReport(host, problem=f"not reachable over SSH: {last_line(errors)}")
    if code == _NOT_FOUND:
        text = f"dshealthd is not in the PATH there (--remote-command): {last_line(errors)}"
        return NodeReport(host, problem=text, severity=State.UNKNOWN)
    try:
        document: Any = json.loads(output)
        return parse_node(document, host)
    except documents.MISSHAPEN as error:
        why = last_line(errors) if not output else f"{type(error).__name__}: {error}"
        text = f"sent an unreadable report (exit status {code}): {printable(why[:300])}"
        return NodeReport(host, problem=text, severity=State.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one host."""

    problem: str = ""
    """Why it could not be reached."""
    gpus: int | None = None
    """GPUs known to its driver; None if no NVIDIA driver is loaded."""


def query(hosts: Sequence[str], ssh: str, options: Sequence[str] = ()) -> dict[str, Answer]:
    """Query hosts in parallel over SSH, and return their answers by name.

    `ssh` is the program and `options` are its options. A name is never taken for an option. A call
    that has not answered by the deadline is killed.
    """
    end = time.monotonic() + DEADLINE
    program = [ssh, *_OPTIONS, *options]
    commands = {name: command(program, name, ("sh", "-c", _SCRIPT), CONNECT) for name in hosts}
    found = dict.fromkeys(hosts, Answer(f"not queried within {DEADLINE:g} s"))
    for ended in _all(commands, DEADLINE):
        found[ended.name] = Answer(ended.problem) if ended.problem else _answer(*ended.value)
        if time.monotonic() >= end:
            break
    return found


def remedy(name: str, problem: str) -> str:
    """Return the command that fixes or investigates why a host cannot be reached over SSH."""
    if "host key" in problem.lower():
        return f"ssh-keyscan -H {name} >> ~/.ssh/known_hosts"
    if "Permission denied" in problem:
        return f"ssh-copy-id {name}"
    if "resolve" in problem:
        return f"getent hosts {name}"
    return f"ssh -v -o BatchMode=yes -o ConnectTimeout={CONNECT} {name} true"


def _answer(code: int, output: str, errors: str) -> Answer:
    _, mark, gpus = output.partition(f"{_MARK}\n")  # a login shell may print, too
    if mark:
        return Answer("", len(gpus.split()) or None)
    return Answer(last_line(errors) if errors.strip() else f"ssh ended with status {code}")
