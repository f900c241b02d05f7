"""The fleet page of a thousand nodes: one agent asks the others, all with real peer servers.

`python -m bench.bench_fleet --nodes 1000`. The servers are in a process of their own, each on an
address of 127.0.0.0/8; what the agent that asks takes is measured in this one: seconds until all
answers are there, CPU, and how much its memory grows. In a cluster the servers have a machine each;
here they share one. "of plain asyncio" is that CPU divided by what asyncio's streams take, right
after, for a frame to each of the same servers and one back, neither signed nor verified.

With `--realtime` (root) both processes preempt all other work for the second that it takes: the
seconds are then those of a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from dshealthd.fleet.view import AT_ONCE, Fleet
from dshealthd.probe.members.membership import Member, Membership
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.protocol import Hello, new_challenge, to_frame
from dshealthd.probe.peers.server import PeerServer
from tests.probe.peering import KEY, secret

PORT = 28461
LOST = {"slug": "gpu-lost", "severity": "critical", "part": "GPU 3", "summary": "A GPU is lost"}
JOB = {"job": "slurm-4711", "state": "training", "ranks": 8, "loss": "finite", "step": 48210}
ANSWER: dict[str, Any] = {
    "version": "0.1.0",
    "verdict": "critical",
    "problems": 1,
    "unreadable": 0,
    "findings": [LOST],
    "jobs": [JOB],
}


def names(count: int) -> tuple[str, ...]:
    """Return the members: addresses, as nothing else resolves here."""
    return tuple(f"127.2.{number // 250}.{number % 250 + 1}" for number in range(count))


def membership(members: tuple[str, ...]) -> Membership:
    """Return the members with forty to a leaf."""
    leaves = {name: f"leaf-{number // 40}" for number, name in enumerate(members)}
    return Membership(tuple(map(Member, members)), leaves, "bench")


async def answer(_sender: str, _body: dict[str, Any]) -> dict[str, Any]:
    """Answer as a node with a finding and a job."""
    return ANSWER


def serve(members: tuple[str, ...], key: Path, ready: Event) -> None:
    """Serve all members but the first until the process is ended."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (16384, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    known = membership(members)

    async def run() -> None:
        for name in members[1:]:
            options = PeerOptions(
                listen_address=f"{name}:{PORT}", key_file=key, off_file=None, check_addresses=False
            )
            await PeerServer(options, name, lambda: known.names, {"summary": answer}).start()
        ready.set()
        await asyncio.Event().wait()

    asyncio.run(run())


def memory() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def realtime(pids: tuple[int, ...]) -> Iterator[None]:
    """Have these processes preempt all others for a while; PermissionError."""
    for pid in pids:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for pid in pids:
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


async def yardstick(members: tuple[str, ...]) -> float:
    """Return seconds of CPU that plain asyncio takes to have a frame of every other member.

    Without a signature, and so without an answer: the challenges are what a stranger gets too.
    """
    left = iter(members[1:])

    async def work() -> None:
        for name in left:
            reader, writer = await asyncio.open_connection(name, PORT, local_addr=(members[0], 0))
            writer.write(to_frame(bytes(Hello(members[0], name, new_challenge()))))
            await reader.readexactly(4 + 32)
            writer.close()

    cpu = time.process_time()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return time.process_time() - cpu


async def look(members: tuple[str, ...], key: Path, preempting: tuple[int, ...]) -> dict[str, Any]:
    """Ask all, and return what it took; `preempting` are processes that run at once."""
    known = membership(members)
    options = PeerOptions(listen_address=f"{members[0]}:{PORT}", key_file=key, off_file=None)
    client = PeerClient(options, members[0], lambda name: (name, PORT))

    async def ask(name: str, deadline: float) -> dict[str, Any]:
        return await client.call(name, "summary", {}, deadline)

    fleet = Fleet(lambda: known, lambda: (members[0], ANSWER), list, ask, time.monotonic, time.time)
    before, cpu = memory(), time.process_time()
    with realtime(preempting):
        began = time.monotonic()
        fleet.document()
        first = time.monotonic() - began
        await fleet.settled()
        seconds = time.monotonic() - began
    await asyncio.sleep(1.0)
    began_document = time.perf_counter()
    body = fleet.document()
    made = time.perf_counter() - began_document
    view = json.loads(body)
    cpu, grown = time.process_time() - cpu, memory() - before
    result = {
        "nodes": len(members),
        "answered": sum(node["state"] == "critical" for node in view["nodes"]),
        "page answers in ms": round(first * 1e3, 1),
        "all answers in s": round(seconds, 2),
        "CPU s": round(cpu, 2),
        "of plain asyncio": round(cpu / await yardstick(members), 2),
        "document ms": round(made * 1e3, 1),
        "document KiB": len(body) >> 10,
        "memory grows MiB": round(grown / 2**20, 1),
    }
    await client.close()
    await fleet.close()
    return result


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000, metavar="N")
    parser.add_argument("--realtime", action="store_true")
    arguments = parser.parse_args()
    members = names(arguments.nodes)
    with tempfile.TemporaryDirectory() as directory:
        key = secret(Path(directory), "key", KEY)
        ready = multiprocessing.Event()
        server = multiprocessing.Process(target=serve, args=(members, key, ready), daemon=True)
        server.start()
        assert ready.wait(180)
        try:
            preempting = (os.getpid(), server.pid or 0) if arguments.realtime else ()
            print(json.dumps(asyncio.run(look(members, key, preempting))))
        finally:
            server.kill()
            server.join()


if __name__ == "__main__":
    main()
