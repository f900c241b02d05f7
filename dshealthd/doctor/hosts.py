"""The examination of other nodes over SSH, in parallel, each with a deadline.

BatchMode: ssh never prompts for a password or a host key. The answer is another machine's text: it
is bounded, checked, and made safe before it is printed.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dshealthd.core.text import printable
from dshealthd.doctor.check import Outcome
from dshealthd.doctor.processes import Pool
from dshealthd.doctor.report import NodeReport, parse_node
from dshealthd.probe.members.hostlist import HostlistError, expand
from dshealthd.probe.members.membership import MembershipError, load
from dshealthd.probe.options import MembershipOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dshealthd.doctor.processes import Ended

ALLOCATION = "slurm"
MAX_ANSWER = 8 << 20
"""Maximum bytes of one node's answer; a report has about 50 KiB."""
_SSH_FAILED = 255
"""Exit status of ssh(1) itself."""
_NOT_FOUND = 127
"""Exit status of a shell that does not find the program."""


class HostsError(Exception):
    """The nodes of `--hosts` are unknown; the message says why."""


def names(text: str) -> tuple[str, ...]:
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
        message = f"--hosts: {error}"
        raise HostsError(message) from error


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


def ask(
    hosts: Sequence[str],
    ssh: Sequence[str],
    remote: Sequence[str],
    seconds: float,
    progress: Callable[[int, int, Sequence[str]], object],
) -> list[NodeReport]:
    """Return each node's report over SSH, in the order of the hosts, each within `seconds`."""
    found: dict[str, NodeReport] = {}
    pool = Pool()
    try:
        for host in hosts:
            call = functools.partial(run, command(ssh, host, remote, seconds))
            pool.start(host, call, seconds)
        for ended in pool.ended(on_tick=lambda: progress(len(found), len(hosts), pool.names)):
            found[ended.name] = _report(ended, seconds)
    finally:
        pool.close()
    return [found[host] for host in hosts]


def run(arguments: Sequence[str], script: str = "") -> tuple[int, str, str]:
    """Run a program, such as ssh; return its status, its output and the end of its errors."""
    with subprocess.Popen(  # noqa: S603 - a list of arguments, and no shell here
        arguments,
        stdin=subprocess.PIPE if script else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        if script and process.stdin:
            process.stdin.write(script.encode())
            process.stdin.close()
        output = process.stdout.read(MAX_ANSWER + 1) if process.stdout else b""
        if len(output) > MAX_ANSWER:
            process.kill()
        errors = process.stderr.read(1 << 16) if process.stderr else b""
    return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


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
        return NodeReport(host, problem=text, severity=Outcome.UNKNOWN)
    try:
        document: Any = json.loads(output)
        return parse_node(document, host)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = last_line(errors) if not output else f"{type(error).__name__}: {error}"
        text = f"sent an unreadable report (exit status {code}): {printable(why[:300])}"
        return NodeReport(host, problem=text, severity=Outcome.UNKNOWN)
