"""What members that lie can make real agents say, over the real peer API.

    python -m bench.bench_liars [--minutes 10] [--cases 4:1 8:2] [--credentials key tls]

The strategies of `probe_liars` against the probes of real agents: each on an address of its own of
127.0.0.0/8, with its schedule, its listener, its credentials and its verdicts as they are shipped.
Only the collectives are played (see `liar.PlayedWorkers`), as two cores have no fabric to time;
echoes are real, and judged as shipped. What is usual is learnt in a minute of epochs of a second;
the lies are told at the shipped period. An accusation is wrong where an honest agent names what
neither a liar nor the cut link of `slander` has a share in. All cases run at once, in a process
each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.liar import Liar, PlayedService, PlayedWorkers, cut
from bench.processes import free_port, table
from dshealthd.collectors import gpu_bus, gpu_processes
from dshealthd.core.host import Host
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, Result
from dshealthd.core.snapshot import Snapshot
from dshealthd.probe.options import (
    MembershipOptions,
    PeerOptions,
    ProbeOptions,
)
from tests.web import certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GPUS = 2
LEARNING = 70
"""Epochs of a second in which the agents learn what is usual."""
STRATEGIES = ("honest", "frame", "poison", "silence", "slander")
PAIRS = ("honest", "collude", "poison", "silence", "slander")
COUNTED = ("dshealthd_probe_rounds_total", "dshealthd_probe_skips_total")
LOOK = 0.25
"""Seconds between two looks at whom the agents accuse."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which takes moments."""
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)


def names(count: int) -> tuple[str, ...]:
    """Return the members: their addresses."""
    return tuple(f"127.2.0.{number + 1}" for number in range(count))


def credentials(directory: Path, kind: str, members: Sequence[str]) -> None:
    """Make a shared key, or an authority and a certificate for each member."""
    if kind == "key":
        (directory / "key").write_text("0123456789abcdef" * 4, encoding="ascii")
        (directory / "key").chmod(0o600)
        return
    certificates.authority(directory, "ca")
    for name in members:
        certificates.certificate(directory, name, "ca", f"URI:spiffe://bench/{name}")


def peers(directory: Path, kind: str, name: str, port: int) -> PeerOptions:
    """Return how a member talks to the others."""
    address = f"{name}:{port}"
    if kind == "key":
        return PeerOptions(listen_address=address, key_file=directory / "key")
    return PeerOptions(
        listen_address=address,
        tls_cert_file=directory / f"{name}.pem",
        tls_key_file=directory / f"{name}.key",
        tls_ca_file=directory / "ca.pem",
        tls_name="spiffe://bench/{node}",
    )


def idle_gpus() -> Snapshot:
    """Return what the collectors of a node with idle GPUs say, for as long as a case takes."""
    snapshot = Snapshot(time.monotonic, time.time)
    for collector in ("gpu_processes", "gpu_bus"):
        snapshot.expect(collector, 86400.0)
    found = tuple(gpu_processes.PROCESSES(0.0, str(gpu), f"GPU-{gpu}") for gpu in range(GPUS))
    snapshot.put("gpu_processes", Result(CollectionOutcome.OK, found))
    snapshot.put("gpu_bus", Result(CollectionOutcome.OK, (gpu_bus.EXPECTED(float(GPUS)),)))
    return snapshot


class Cluster:
    """Agents in one event loop, the first of which lie."""

    def __init__(
        self, directory: Path, kind: str, count: int, liars: int, strategy: str, period: float
    ) -> None:
        self.directory = directory
        self.members = names(count)
        self.strategy = strategy
        self.liars: dict[str, Liar] = {}
        self.services: dict[str, PlayedService] = {}
        port = free_port()
        slander = strategy == "slander"
        victims = self.members[liars : liars + 1 + slander]
        self.cut = victims if slander else ()
        """The ends of a link that is cut."""
        for number, name in enumerate(self.members):
            state = directory / f"state-{name}"
            state.mkdir(exist_ok=True)
            service = PlayedService(
                ProbeOptions(
                    period=Duration(period),
                    members=MembershipOptions(nodes=self.members, name=name),
                    peer=peers(directory, kind, name, port),
                ),
                host=Host(),
                state=state,
                snapshot=idle_gpus(),
                monotonic=time.monotonic,
                wall=time.time,
                summary=dict,
            )
            liar = Liar(service, name, strategy, victims) if number < liars else None
            if liar is not None:
                self.liars[name] = liar
            service.play(PlayedWorkers(number, liar.spoils) if liar else PlayedWorkers(number))
            self.services[name] = service

    async def play(self, seconds: float) -> dict[str, Any]:
        """Run for so long; return what came of it."""
        for service in self.services.values():
            service.start()
        await until(lambda: all(service.running for service in self.services.values()))
        for name in self.cut:
            cut(self.services[name], next(other for other in self.cut if other != name))
        tasks = []
        for name, liar in self.liars.items():
            liar.begin()
            tasks.append(asyncio.create_task(liar.lead(), name=f"lies of {name}"))
        wrong: set[tuple[str, ...]] = set()
        right: set[tuple[str, ...]] = set()
        faults: set[tuple[str, ...]] = set()
        begin = time.monotonic()
        end = begin + seconds
        while time.monotonic() < end:
            await asyncio.sleep(LOOK)
            for name, service in self.services.items():
                if name in self.liars and self.strategy != "honest":
                    continue
                for suspect in service.suspects():
                    named = (name, suspect["kind"], suspect["component"], suspect["reason"])
                    if suspect["component"] == "--".join(sorted(self.cut)):
                        faults.add(named)
                    elif self._concerns_a_liar(suspect["component"]):
                        right.add(named)
                    elif named not in wrong:
                        wrong.add(named)
                        print(f"{time.monotonic() - begin:.0f} s: {named}, as of", file=sys.stderr)
                        print(evidence(service), file=sys.stderr, flush=True)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        defects = [repr(one) for one in ended if isinstance(one, Exception)]
        rounds: Counter[str] = Counter()
        for name, service in self.services.items():
            for sample in () if name in self.liars else service.samples():
                if sample.metric.name in COUNTED:
                    rounds[" ".join(sample.labels)] += int(sample.value)
            if service.running is not None:
                written = service.running.baselines.document()
                (self.directory / f"state-{name}" / "probe-baselines.json").write_bytes(written)
        await asyncio.gather(*(service.close() for service in self.services.values()))
        return {
            "lies": sum(liar.lies for liar in self.liars.values()),
            "forged": sum(liar.forged for liar in self.liars.values()),
            "right": sorted(right),
            "wrong": sorted(wrong),
            "faults": sorted(faults),
            "rounds": rounds,
            "defects": defects,
        }

    def _concerns_a_liar(self, component: str) -> bool:
        return self.strategy != "honest" and any(
            part.partition("/")[0] in self.liars
            for part in component.replace("->", "--").split("--")
        )


def evidence(service: PlayedService) -> str:
    """Return the cases of an agent, for whoever looks into a wrong accusation."""
    assert service.running is not None
    detector = service.running.detector
    lines = []
    for track, (cause, reason) in detector._verdicts.items():  # noqa: SLF001 - what it has decided
        case = detector._history[track].investigation  # noqa: SLF001
        lines.append(f"  {track}: {cause}, {reason}")
        for entry in (*case.earlier, *case.measurements) if case else ():
            lines.append(f"    {entry.round.epoch} {entry.round.kind} with {entry.round.peer}: ")
            lines[-1] += f"{entry.ratio:.2f} {'bad' if entry.bad else 'good' if entry.good else ''}"
            lines[-1] += f"{' extra' if entry.round.extra else ''}{' led' * entry.round.led}"
    return "\n".join(lines)


def prepared(directory: Path, kind: str, count: int) -> None:
    """Make credentials, and have the agents of a healthy cluster learn what is usual."""
    directory.mkdir()
    credentials(directory, kind, names(count))
    cluster = Cluster(directory, kind, count, 0, "honest", 1.0)
    asyncio.run(cluster.play(float(LEARNING)))


def cases(sizes: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield nodes, liars and strategy of each case; sizes are as `4:1`."""
    for size in sizes:
        nodes, liars = map(int, size.split(":"))
        for strategy in STRATEGIES if liars == 1 else PAIRS:
            yield nodes, liars, strategy


def main() -> None:
    """Print the table, or be the process of one case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", nargs="+", default=["4:1", "8:2"], metavar="NODES:LIARS")
    parser.add_argument("--credentials", nargs="+", default=["key", "tls"], choices=["key", "tls"])
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES, "collude"])
    parser.add_argument("--logs", type=Path, help="where to keep what the agents say")
    parser.add_argument("--period", type=float, default=10.0)
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        directory, kind, nodes, liars, strategy = arguments.case
        cluster = Cluster(Path(directory), kind, int(nodes), int(liars), strategy, arguments.period)
        print(json.dumps(asyncio.run(cluster.play(60 * arguments.minutes))))
        return
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="liars-")))
        wanted = [case for case in cases(arguments.cases) if case[2] in arguments.strategies]
        started = []
        logs = arguments.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        for kind in arguments.credentials:
            for nodes in sorted({nodes for nodes, _, _ in wanted}):
                prepared(folder / f"{kind}-{nodes}", kind, nodes)
            for nodes, liars, strategy in wanted:
                place = folder / f"{kind}-{nodes}-{liars}-{strategy}"
                shutil.copytree(folder / f"{kind}-{nodes}", place)
                case = (kind, str(nodes), str(liars), strategy)
                command = [
                    *(sys.executable, "-m", "bench.bench_liars"),
                    *("--minutes", str(arguments.minutes), "--period", str(arguments.period)),
                    *("--case", str(place), *case),
                ]
                log = stack.enter_context((logs / f"{place.name}.log").open("w"))
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
                started.append((case, stack.enter_context(process)))
        for (kind, nodes_, liars_, strategy), process in started:
            out, _ = process.communicate()
            found = json.loads(out)
            print(json.dumps([kind, nodes_, liars_, strategy, found]), file=sys.stderr, flush=True)
            rounds = {what: count for what, count in found["rounds"].items() if " " in what}
            well = sum(count for what, count in rounds.items() if what.endswith(" ok"))
            which = sorted({" ".join(one[1:]) for one in found["wrong"]})
            rows.append(
                [
                    nodes_,
                    liars_,
                    strategy,
                    kind,
                    f"{well} of {sum(rounds.values())}",
                    f"{found['lies']:,}",
                    f"{found['forged']:,}",
                    f"{len(found['right'])}",
                    f"{len(found['wrong'])}",
                    ", ".join([*which[:4], *found["defects"]]) or "-",
                    f"{len(found['faults'])}" if strategy == "slander" else "-",
                ]
            )
    heading = [
        "nodes",
        "liars",
        "strategy",
        "credentials",
        "rounds of honest nodes that went well",
        "lies",
    ]
    heading += [
        "forged rounds",
        "accused with a liar in it",
        "accused wrongly",
        "which",
        "cut link named by",
    ]
    print(table(heading, rows))


if __name__ == "__main__":
    main()
