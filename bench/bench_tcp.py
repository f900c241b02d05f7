"""CPU time of counting TCP sockets with 0, 10,000 and 30,000 of them in TIME_WAIT, v4 and v6, one
in a hundred on a rendezvous port.

    python -m bench.bench_tcp [--rounds 21] [--cold]

In one run, turn by turn, in a network namespace of its own (needs root and a compiler): the
collectors `tcp` and `rendezvous` as the agent runs them, every 15 s, which of many sockets asks for
the ports in TIME_WAIT every 15 s; a round of theirs that asks; what such a round asks for in C
(`tcp_floor.c`); `ss` with the filter for the rendezvous ports, which tells less; node_exporter's
tcpstat alone, by the scheduler's account of its CPU, which tells nothing of ports. Then what is
done less often or instead: the collector `tcp_limits` (every 30 s), `loopback`, and the files of
`/proc/net` where netlink is refused. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.processes import Server, node_exporter, table
from dshealthd.collectors.loopback import Loopback
from dshealthd.collectors.rendezvous import RendezvousPorts
from dshealthd.collectors.tcp import Tcp
from dshealthd.collectors.tcp_limits import TcpLimits
from dshealthd.core.collector import Collector, Context
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, attempt
from dshealthd.linux.tcp_sockets import HOLD

SOURCE = Path(__file__).with_name("tcp_floor.c")
INTERVAL = 5.0
FIRST, LAST = 29500, 29600
_MEMORY = bytearray(os.urandom(1 << 20) * 128)
COUNTS = (0, 10_000, 30_000)
OURS, WHOLE, FLOOR, SS, THEIRS = (
    "dshealthd tcp + rendezvous, one round",
    "one round that asks for all",
    "the same in C",
    "ss, rendezvous ports only",
    "node_exporter tcpstat",
)


class Agent:
    """Collectors as the agent runs them."""

    def __init__(
        self, kinds: list[type[Collector]], interval: float = INTERVAL, procfs: Path = Path("/proc")
    ) -> None:
        self.now, self.interval = 0.0, interval
        self.context = Context(host=Host(procfs=procfs), monotonic=lambda: self.now, wall=time.time)
        self.collectors = [kind(kind.Options(), self.context) for kind in kinds]
        self.values: dict[tuple[str, ...], float] = {}
        self.failed = ""

    def collect(self, rounds: int = 1) -> float:
        """Return the CPU milliseconds of a round, as a mean of so many.

        The collectors believe that an interval passes before each.
        """
        before = time.process_time()
        for _ in range(rounds):
            self.now += self.interval
            self.context.sweep += 1
            results = [attempt(collector, time.monotonic) for collector in self.collectors]
        spent = 1e3 * (time.process_time() - before) / rounds
        self.failed = next(
            (result.detail for result in results if result.outcome is not CollectionOutcome.OK), ""
        )
        self.values = {
            (metric.name, *labels): value
            for result in results
            for metric, labels, value in result.samples
        }
        return spent


class Floor:
    """The C program, which counts once for each line it is sent."""

    def __init__(self, program: Path) -> None:
        command = [str(program), "count", str(FIRST), str(LAST)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.found: tuple[int, int] = (0, 0)

    def count(self) -> float:
        """Return the CPU milliseconds that the program says it took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        spent, total, in_range = self.process.stdout.readline().split()
        self.found = int(total), int(in_range)
        return float(spent)

    def close(self) -> None:
        """End the program."""
        self.process.communicate()


def by_ss() -> float:
    """Return the CPU milliseconds of `ss` from its start to its end."""
    process = subprocess.Popen(
        ["ss", "-tanH", f"( sport >= {FIRST} and sport <= {LAST} )"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def scrape(server: Server) -> float:
    """Return the CPU milliseconds that one scrape costs the server."""
    before = server.cpu()
    server.scrape()
    return 1e3 * (server.cpu() - before)


def measure(program: Path, elsewhere: Path, rounds: int, *, cold: bool) -> None:
    """Make sockets, measure turn by turn, and print."""
    ours, whole, files = (
        Agent([Tcp, RendezvousPorts]),
        Agent([Tcp, RendezvousPorts], interval=HOLD),
        Agent([Tcp, RendezvousPorts], procfs=elsewhere),
    )
    limits, loopback = Agent([TcpLimits], interval=30.0), Agent([Loopback])
    rows: dict[str, list[object]] = {}
    compared: list[list[object]] = []
    made = 0
    with node_exporter(
        "--collector.disable-defaults", "--collector.tcpstat", "--web.disable-exporter-metrics"
    ) as server:
        floor = Floor(program)
        ways: dict[str, Callable[[], float]] = {
            OURS: lambda: ours.collect(int(HOLD / INTERVAL)),
            WHOLE: whole.collect,
            FLOOR: floor.count,
            SS: by_ss,
            THEIRS: lambda: scrape(server),
            "dshealthd tcp_limits (every 30 s)": limits.collect,
            "dshealthd loopback": loopback.collect,
            "dshealthd tcp + rendezvous from /proc/net": files.collect,
        }
        for count in COUNTS:
            subprocess.run([program, "make", str(count - made), str(FIRST)], check=True)
            made = count
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, call in ways.items():
                    if cold:
                        bytes(_MEMORY[::64])
                    else:
                        call()
                    times[way].append(call())
            medians = {way: median(values) for way, values in times.items()}
            for way, value in medians.items():
                failed = files.failed if way.endswith("/proc/net") else ""
                rows.setdefault(way, [way]).append("refused: too many" if failed else value)
            ratios = (
                medians[WHOLE] / medians[FLOOR],
                medians[OURS] / medians[THEIRS],
                medians[OURS] / medians[SS],
            )
            seen = [
                ours.values["dshealthd_tcp_sockets", "time_wait"],
                ours.values["dshealthd_rendezvous_sockets", "time_wait"],
            ]
            compared.append([count, *ratios, *map(int, seen), *floor.found])
        floor.close()
    print(f"CPU ms a round, median of {rounds} rounds, caches {'cold' if cold else 'warm'}\n")
    print(table(["in TIME_WAIT", *map(str, COUNTS)], list(rows.values())))
    head = [
        "in TIME_WAIT",
        "round / C",
        "ours / node_exporter",
        "ours / ss",
        "we count",
        "in the range",
        "C counts",
        "in the range",
    ]
    print(table(head, compared))


def main() -> None:
    """Go into a network namespace, then measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--cold",
        action="store_true",
        help="empty the caches before each measurement, instead of a round that does not count",
    )
    parser.add_argument(
        "--inside", action="store_true", help="already in a network namespace of its own"
    )
    options = parser.parse_args()
    if not options.inside:
        os.execvp(
            "unshare",
            [
                "unshare",
                "--net",
                sys.executable,
                "-m",
                "bench.bench_tcp",
                "--inside",
                *sys.argv[1:],
            ],
        )
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/proc/sys/net/ipv4/tcp_tw_reuse").write_text("0", encoding="ascii")
    with tempfile.TemporaryDirectory() as directory:
        program, elsewhere = Path(directory, "tcp_floor"), Path(directory, "proc")
        subprocess.run(["cc", "-O2", "-o", program, SOURCE], check=True)
        elsewhere.mkdir()
        for name in ("net", "uptime"):
            (elsewhere / name).symlink_to(f"/proc/{name}")
        measure(program, elsewhere, options.rounds, cold=options.cold)


if __name__ == "__main__":
    main()
