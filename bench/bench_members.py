"""What one node's probes cost among many members.

CPU, connections and descriptors, against the same among two.

    python -m bench.bench_members [--members 1000] [--epochs 12] [--period 10]

The node that is measured is a process of its own; all others run the same probes in one further
process, each on an address of its own of
127.0.0.0/8. Rounds are light ones, with a shared key. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.processes import table
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.snapshot import Snapshot
from dshealthd.probe.options import MembershipOptions, PeerOptions, ProbeOptions
from dshealthd.probe.service import ProbeService
from tests.probe.peering import KEY, secret

PORT = 10062
WARM_UP = 2
"""Epochs before the measurement: names are looked up, and first connections made."""


def names(count: int) -> tuple[str, ...]:
    """Return the members: their addresses."""
    return tuple(f"127.1.{number // 250}.{number % 250 + 1}" for number in range(count))


def service(directory: Path, members: tuple[str, ...], name: str, period: float) -> ProbeService:
    """Return the probes of one member."""
    options = ProbeOptions(
        period=Duration(period),
        members=MembershipOptions(nodes=members, name=name),
        peer=PeerOptions(listen_address=f"{name}:{PORT}", key_file=directory / "key"),
    )
    return ProbeService(
        options,
        host=Host(),
        state=None,
        snapshot=Snapshot(time.monotonic, time.time),
        monotonic=time.monotonic,
        wall=time.time,
        summary=dict,
    )


async def run(services: list[ProbeService], period: float, epochs: int) -> None:
    """Run probes; print how it stands after the warm-up and at the end."""
    for one in services:
        one.start()
        await asyncio.sleep(0)
    for wait in (WARM_UP, epochs):
        await asyncio.sleep(wait * period)
        values: dict[str, float] = {}
        for sample in services[0].samples():
            if sample.metric.name.startswith(("dshealthd_probe_peer", "dshealthd_probe_rounds")):
                name = sample.metric.name.removeprefix("dshealthd_probe_")
                values[name] = values.get(name, 0.0) + sample.value
                if sample.labels[-1:] == ("ok",) and name == "rounds_total":
                    values["ok"] = values.get("ok", 0.0) + sample.value
        values["cpu"] = time.process_time()
        values["descriptors"] = len(os.listdir("/proc/self/fd"))
        print(json.dumps(values), flush=True)
    await asyncio.gather(*(one.close() for one in services))


def measure(count: int, period: float, epochs: int) -> list[str]:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        secret(Path(folder), "key", KEY)
        command = [
            sys.executable,
            "-m",
            "bench.bench_members",
            "--members",
            str(count),
            "--period",
            str(period),
            "--folder",
            folder,
        ]
        with (
            subprocess.Popen(
                [*command, "--epochs", str(epochs + 2), "--role", "others"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as others,
            subprocess.Popen(
                [*command, "--epochs", str(epochs), "--role", "one"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as one,
        ):
            out, _ = one.communicate()
            others.terminate()
    before, after = (json.loads(line) for line in out.splitlines())
    seconds = epochs * period
    used = after["cpu"] - before["cpu"]
    opened = "peer_client_connections_opened_total"
    return [
        f"{count:,}",
        f"{after['ok'] - before['ok']:.0f} of {epochs}",
        f"{1000 * used / seconds:.2f}",
        f"{after['peer_connections'] + after['peer_client_connections']:.0f}",
        f"{(after[opened] - before[opened]) / seconds:.2f}",
        f"{after['descriptors']:.0f}",
    ]


def main() -> None:
    """Print the table, or be one of its processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--period", type=float, default=10.0)
    parser.add_argument("--role", choices=("one", "others"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        members = names(arguments.members)
        own = members[:1] if arguments.role == "one" else members[1:]
        services = [service(arguments.folder, members, name, arguments.period) for name in own]
        asyncio.run(run(services, arguments.period, arguments.epochs))
        return
    rows = [measure(count, arguments.period, arguments.epochs) for count in (2, arguments.members)]
    print(
        table(
            [
                "members",
                "rounds that went well",
                "CPU ms a second",
                "connections",
                "opened a second",
                "descriptors",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
