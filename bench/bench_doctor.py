"""`doctor` on eight simulated H100: with an agent, without one, with NVML hung, with a dead path,
and over eight hosts, all alive or two of them dead, beside `ds_report` and
`torch.utils.collect_env`.

Whole commands, their interpreter's start included; seconds. The hosts are this machine, reached
through a program that stands for ssh: the two dead ones never answer.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import frozen
from tests.agents import running
from tests.nvml.simulator import Simulator

TURNS = 20
SLOW_TURNS = 5
"""Turns of what waits for a deadline, whose times hardly differ."""
HOST_TIMEOUT = 15
ROOT = Path(__file__).parents[1]


def timed(
    command: Sequence[str], turns: int, environment: dict[str, str]
) -> list[tuple[float, float]]:
    """Return the seconds that a command took each time, and those of CPU; its output is dropped."""
    # Installed packages have their bytecode, and so has a checkout after the first turn.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(turns + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run(
            command, capture_output=True, check=False, env={**kept, **environment}, cwd=ROOT
        )
        passed = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((passed, cpu))
    return times[1:]


def row(name: str, times: list[tuple[float, float]]) -> str:
    """Return a row: p50 and p95 by the nearest rank, and the median of the CPU time."""
    walls = sorted(wall for wall, _ in times)
    p50, p95 = (walls[min(len(walls) - 1, int(share * len(walls)))] for share in (0.5, 0.95))
    cpu = sorted(cpu for _, cpu in times)[len(times) // 2]
    return f"| {name} | {len(times)} | {p50:.2f} | {p95:.2f} | {cpu:.2f} |"


@contextlib.contextmanager
def dead_path(base: Path) -> Iterator[Path]:
    """Give a directory whose file system hangs."""
    base.mkdir()
    with frozen.mounted(base) as mount:
        mount.freeze()
        yield mount.directory


def stand_in_for_ssh(base: Path) -> Path:
    """Return a program that runs the command here; hosts called dead never answer."""
    client = base / "ssh"
    client.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n'
        'case "$2" in dead*) exec sleep 600;; esac\neval "exec $3"\n'
    )
    client.chmod(0o755)
    program = base / "dshealthd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dshealthd "$@"\n')
    program.chmod(0o755)
    return client


def main() -> None:
    """Print the table, or the rows that are named on the command line."""
    wanted = sys.argv[1:] or ["agent", "alone", "hung", "path", "hosts", "others"]
    print("| what | turns | p50 | p95 | CPU |\n| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        gpus = Simulator(base / "simulator")
        gpus.pci_sysfs(base / "sys")
        paths = ("--path.sysfs", str(base / "sys"), "--path.state", str(base / "state"))
        doctor = [sys.executable, "-m", "dshealthd", "doctor", *paths]
        alone = [*doctor, "--no-agent"]
        environment = gpus.environment()
        if "agent" in wanted:
            with running(base, environment=environment, flags=paths[:2]) as agent:
                agent.wait(lambda _: agent.status()["ready"], 60)
                asked = [*doctor, "--web.listen-address", f"127.0.0.1:{agent.port}"]
                print(row("doctor, from the agent", timed(asked, TURNS, environment)), flush=True)
        if "alone" in wanted:
            print(row("doctor, without an agent", timed(alone, TURNS, environment)), flush=True)
        if "hung" in wanted:
            gpus.fault("hang")
            hung = timed(alone, SLOW_TURNS, environment)
            print(row("doctor, without an agent, NVML hung", hung), flush=True)
            gpus.clear_faults()
        if "path" in wanted:
            with dead_path(base / "path") as path:
                dead = timed([*alone, "--path", str(path)], SLOW_TURNS, environment)
            print(row("doctor, without an agent, a dead path", dead), flush=True)
        if "hosts" in wanted:
            client = stand_in_for_ssh(base)
            two_dead = f", 2 of them dead, deadline {HOST_TIMEOUT} s"
            for names, text in (("node[1-8]", ""), ("node[1-6],dead[1-2]", two_dead)):
                hosts = [
                    *(*doctor, "--hosts", names, "--host-timeout", str(HOST_TIMEOUT)),
                    *("--ssh", str(client), "--remote-command", str(base / "dshealthd")),
                ]
                fleet = timed(hosts, SLOW_TURNS, environment)
                print(row(f"doctor, 8 hosts over SSH{text}", fleet), flush=True)
        if "others" in wanted:
            report = [str(Path(sys.executable).with_name("ds_report"))]
            print(row("ds_report", timed(report, SLOW_TURNS, environment)), flush=True)
            collected = timed(
                [sys.executable, "-m", "torch.utils.collect_env"], SLOW_TURNS, environment
            )
            print(row("torch.utils.collect_env", collected), flush=True)


if __name__ == "__main__":
    main()
