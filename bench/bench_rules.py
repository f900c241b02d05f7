"""The shipped rules over a large fleet.

What a round of each group takes, what Prometheus needs, and how many series a node has.

One agent with eight simulated GPUs runs; what it answers is served for every node of the fleet, so
that values move as real ones do. `--tier verdict` serves what the shipped rules read, `--rules`
takes those of another commit: `git archive COMMIT deploy/prometheus | tar -x -C DIRECTORY`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import selectors
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.processes import table
from dshealthd.core.exposition import Tier
from tests.lab.paging import Paging
from tests.lab.servers import PROMETHEUS, Server, prometheus
from tests.lab.station import Loopback

REFRESH = 5.0
"""Seconds between two looks at the agent."""
MOST_MEMORY = 8 << 30
"""Bytes of Prometheus at which the benchmark gives up."""
SLOWEST = 8
AIM = 1 / 3
"""Share of its interval that a group may take."""


def serve(bodies: Connection[bytes, Any], listener: socket.socket) -> None:
    """Answer every request on the socket with the body that came last.

    In a process of its own, until the other end is closed.
    """
    answer = b""
    ready = selectors.DefaultSelector()
    ready.register(bodies.fileno(), selectors.EVENT_READ)
    ready.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj == bodies.fileno():
                try:
                    body = bodies.recv_bytes()
                except EOFError:
                    return
                answer = (
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; "
                    b"version=0.0.4\r\nContent-Length: %d\r\n\r\n%b"
                ) % (len(body), body)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                client.settimeout(10)  # of an answer that is longer than the socket's buffer
                ready.register(client, selectors.EVENT_READ)
            else:
                assert isinstance(key.fileobj, socket.socket)
                asked = False
                with contextlib.suppress(OSError):  # who waited for too long is gone
                    asked = bool(key.fileobj.recv(1 << 16))  # a request comes whole
                    if asked:
                        key.fileobj.sendall(answer)
                if not asked:
                    ready.unregister(key.fileobj)
                    key.fileobj.close()


def targets(nodes: int, port: int, file: Path) -> None:
    """Write the fleet: an address of the loopback network for each node, 32 nodes to a leaf."""
    groups = [
        {
            "targets": [f"127.{8 + n // 65536}.{n // 256 % 256}.{n % 256}:{port}"],
            "labels": {"node": f"node-{n}", "leaf": f"leaf-{n // 32}"},
        }
        for n in range(1, nodes + 1)
    ]
    file.write_text(json.dumps(groups), encoding="ascii")


def value(server: Server, expression: str) -> float:
    """Return the value of a query with one result."""
    (found,) = server.query(expression)
    return float(found["value"][1])


def groups(server: Server) -> list[dict[str, Any]]:
    """Return the rule groups, with what their last round took."""
    found: list[dict[str, Any]] = server.ask("/api/v1/rules")["data"]["groups"]
    return found


def own(server: Server) -> dict[str, float]:
    """Return what Prometheus says of itself: the unlabeled samples of its own /metrics."""
    lines = (
        line.rpartition(" ")
        for line in server.ask("/metrics").splitlines()
        if not line.startswith("#")
    )
    return {name: float(number) for name, _, number in lines if "{" not in name}


def measure(lab: Paging, options: argparse.Namespace, directory: Path) -> None:
    """Run Prometheus over the fleet for a while, and print the tables."""
    node = lab.lab.nodes[0]
    receiving, sending = multiprocessing.Pipe(duplex=False)
    with socket.create_server(("", 0), backlog=2048) as listener:
        server_process = multiprocessing.Process(
            target=serve, args=(receiving, listener), daemon=True
        )
        server_process.start()
        port = listener.getsockname()[1]
    receiving.close()
    file = directory / "fleet.json"
    targets(options.nodes, port, file)
    station = Loopback("services", "127.0.0.1", directory)
    longest: dict[str, list[float]] = {}
    with prometheus(
        station,
        directory / "fleet",
        {"file_sd_configs": [{"files": [str(file)]}]},
        scrape=options.scrape,
        files=options.rules,
    ) as server:
        end, cpu = time.monotonic() + options.seconds, 0.0
        warm = end - options.seconds / 2
        while time.monotonic() < end:
            sending.send_bytes(node.get(f"/metrics?tier={options.tier}").encode())
            time.sleep(REFRESH)
            if own(server)["process_resident_memory_bytes"] > MOST_MEMORY:
                sys.exit(f"Prometheus takes more than {MOST_MEMORY >> 30} GiB")
            if time.monotonic() > warm:
                cpu = cpu or own(server)["process_cpu_seconds_total"]
                for group in groups(server):
                    longest.setdefault(f"{Path(group['file']).name} {group['name']}", []).append(
                        group["evaluationTime"]
                    )
        found = {f"{Path(group['file']).name} {group['name']}": group for group in groups(server)}
        rows: list[list[object]] = []
        for name, group in found.items():
            times = longest[name]
            rows.append(
                [
                    name,
                    f"{group['interval']:g} s",
                    len(group["rules"]),
                    sum(times) / len(times),
                    max(times),
                    max(times) / group["interval"],
                ]
            )
        print(
            table(
                ["group", "interval", "rules", "mean s", "longest s", "share of the interval"], rows
            )
        )
        single = sorted(
            (
                (rule["evaluationTime"], rule["name"])
                for group in found.values()
                for rule in group["rules"]
            ),
            reverse=True,
        )
        print(
            table(
                ["slowest rules", "last s"], [[name, seconds] for seconds, name in single[:SLOWEST]]
            )
        )
        itself = own(server)
        spent = (itself["process_cpu_seconds_total"] - cpu) / (options.seconds / 2)
        up = value(server, 'count(up{exporter="dshealthd"} == 1)')
        series = value(server, 'max(scrape_samples_scraped{exporter="dshealthd"})')
        rules = sum(len(group["rules"]) for group in found.values())
        rows = [
            ["nodes scraped", f"{up:.0f} of {options.nodes}"],
            ["series of a node", f"{series:.0f}"],
            ["series in all", f"{itself['prometheus_tsdb_head_series']:.0f}"],
            ["rules", rules],
            [
                "all groups due in one 5 s round take",
                f"{sum(max(longest[n]) for n, g in found.items() if g['interval'] <= 5):.2f} s",
            ],
            ["memory (RSS)", f"{itself['process_resident_memory_bytes'] / 2**30:.2f} GiB"],
            [
                "CPU",
                (
                    f"{spent:.2f} cores, of which rules "
                    f"{sum(sum(v) / len(v) / found[n]['interval'] for n, v in longest.items()):.2f}"
                ),
            ],
            ["rounds missed", f"{missed(server):.0f}"],
            [
                "alerts that fire or are pending",
                ", ".join(f"{name} {count:.0f}" for name, count in alerts(server).items()),
            ],
        ]
        print(table(["", ""], rows))
        share = max(max(times) / found[name]["interval"] for name, times in longest.items())
        print(f"The longest round takes {share:.2f} of its interval; the aim is {AIM:.2f}.")
    sending.close()
    server_process.join(10)


def alerts(server: Server) -> dict[str, float]:
    """Return how many alerts of each name there are."""
    return {
        entry["metric"]["alertname"]: float(entry["value"][1])
        for entry in server.query("count by (alertname) (ALERTS)")
    }


def missed(server: Server) -> float:
    """Return how many rounds of rules were left out as the one before had not ended."""
    lines = server.ask("/metrics").splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("prometheus_rule_group_iterations_missed_total")
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="how many nodes (%(default)s)")
    parser.add_argument(
        "--tier", choices=[*Tier], default=Tier.ALL, help="what is scraped (%(default)s)"
    )
    parser.add_argument("--rules", type=Path, default=PROMETHEUS, help="rule files (%(default)s)")
    parser.add_argument("--scrape", default="15s", help="how often each is scraped (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=240.0,
        help="how long; the second half counts (%(default)s)",
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        metavar="N",
        help="priority of all processes, below 0 (root) on a machine that does other work, too",
    )
    options = parser.parse_args()
    os.nice(options.nice)
    # A connection for each node, at both ends.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as directory, Paging(Path(directory), 1, gpus=8) as lab:
        measure(lab, options, Path(directory))


if __name__ == "__main__":
    main()
