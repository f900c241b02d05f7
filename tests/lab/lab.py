"""Several nodes on this machine, on a network of their own, each with an agent."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self, TypeVar

from tests.agents import Scrape
from tests.lab.node import INTERFACE, Node, profile
from tests.lab.shaper import Shaper
from tests.lab.station import Loopback, Namespaces, NotPermitted, Station
from tests.waiting import until

T = TypeVar("T")

COLLECTORS = ("gpu", "gpu_bus", "memory", "network", "tcp")
BRIDGE = "lan"
NETWORK = ipaddress.IPv4Network("10.61.0.0/16")
SERVICES = NETWORK.broadcast_address - 1
ALL_NODES = "nodes.lab"
"""A name with the address of every node."""


class Lab:
    """A switch, and nodes with agents; a context manager that starts and ends them.

    `services` is the machine with the switch, for what is not a node (Prometheus, a receiver of
    alerts); it reaches every node, and every node it.
    """

    services: Station
    scrape_seconds = 20.0
    """How long `scrapes` waits for a node's answer."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 8,
        *,
        gpus: int = 8,
        config: str | Callable[[Node], str] = "",
        collectors: Sequence[str] = COLLECTORS,
        interval: str = "1s",
        namespaces: bool = True,
        start: bool = True,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare a lab in `directory`.

        `config` is laid over the lab's own, which runs `collectors` every `interval`; without
        `start` the agents are left to `Node.start`. Without `namespaces` the nodes are addresses of
        127.0.0.0/8: members are addresses, as names cannot be given, no fault of the network is
        possible, and every agent sees this machine's processes, interfaces and memory.
        """
        self.nodes: list[Node] = []
        self._number, self._gpus, self._config = nodes, gpus, config
        self._profile = profile(collectors, interval)
        self._namespaces, self._start, self.progress = namespaces, start, progress
        self.directory = directory
        self._stations: list[Station] = []
        self._shapers: dict[tuple[str, str], Shaper] = {}
        self._pool = ThreadPoolExecutor(nodes + 1, thread_name_prefix="lab")
        self._rules = 0

    def __enter__(self) -> Self:
        """Start everything; what has been started is ended again when something fails.

        NotPermitted where namespaces are not.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._make_stations()
            for number, station in enumerate(self._stations[1:], start=1):
                self.nodes.append(
                    Node(number, station, self, gpus=self._gpus, profile=self._profile)
                )
            self._write_hostfiles()
            for node in self.nodes:
                node.config(self._config if isinstance(self._config, str) else self._config(node))
            if self._start:
                self._start_agents()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self.close()

    def close(self) -> None:
        """End every agent and machine, and forget them. The directory stays."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._pool.shutdown)
            for station in self._stations:
                stack.callback(station.close)
            self._each(Node.stop)
        self.nodes, self._stations = [], []

    def scrapes(self, seconds: float | None = None) -> dict[str, Scrape]:
        """Return /metrics of every node that answers in time, by name."""
        limit = self.scrape_seconds if seconds is None else seconds

        def scrape(node: Node) -> Scrape | None:
            try:
                return node.scrape(limit) if node.runs else None
            except OSError:
                return None

        return {
            node.name: found
            for node, found in zip(self.nodes, self._each(scrape), strict=True)
            if found is not None
        }

    def wait(
        self, predicate: Callable[[Mapping[str, Scrape]], object], seconds: float = 60.0
    ) -> dict[str, Scrape]:
        """Return the first scrapes, by node, for which the predicate holds.

        Nodes that do not answer are left out of them.
        """
        found: dict[str, Scrape] = {}

        def right() -> object:
            nonlocal found
            return predicate(found := self.scrapes())

        until(right, lambda: self.told(found), seconds)
        return found

    def told(self, found: Mapping[str, Scrape]) -> str:
        """Return what is said of nodes that do not tell what is waited for."""
        logs = [f"{node.name}: {line}" for node in self.nodes for line in node.log_tail()]
        return "\n".join([f"{len(found)} of {len(self.nodes)} nodes answer", *logs])

    @contextlib.contextmanager
    def injected(self, what: str) -> Iterator[None]:
        """Say when a fault begins and ends."""
        self.progress(f"fault: {what}")
        yield
        self.progress(f"fault over: {what}")

    def shaper(self, station: Station, device: str) -> Shaper:
        """Return what limits the rate at which a station sends on an interface."""
        return self._shapers.setdefault((station.name, device), Shaper(station, device))

    @contextlib.contextmanager
    def rules(
        self, station: Station, family: str, chains: Mapping[str, Sequence[str]]
    ) -> Iterator[None]:
        """Have nftables rules in force on a station, by hook.

        In a table of their own, so that each fault is undone alone.
        """
        self._rules += 1
        table = f"{family} fault_{self._rules}"
        text = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; policy accept;\n"
            + "".join(f"{rule}\n" for rule in rules)
            + "}\n"
            for hook, rules in chains.items()
        )
        station.tool("nft", "-f", "-", text=f"table {table} {{\n{text}}}\n")
        try:
            yield
        finally:
            station.tool("nft", "delete", "table", *table.split())

    def _each(self, function: Callable[[Node], T]) -> list[T]:
        """Call a function for every node at once.

        The first of the errors is raised after all have ended.
        """
        return self._await_all([self._pool.submit(function, node) for node in self.nodes])

    @staticmethod
    def _await_all(futures: Sequence[Future[T]]) -> list[T]:
        wait(futures)
        return [future.result() for future in futures]

    def _make_stations(self) -> None:
        started = time.monotonic()
        if self._namespaces:
            self._make_network()
        else:
            # Others for every lab of this machine.
            block = ipaddress.IPv4Address("127.64.0.0") + (os.getpid() % (1 << 13)) * 256
            self._stations += [
                Loopback(name, str(block + number + 1), self._folder(name))
                for number, name in enumerate(self._names())
            ]
        self.services = self._stations[0]
        passed = time.monotonic() - started
        self.progress(f"network: {self._number} machines and a switch in {passed:.1f} s")

    def _make_network(self) -> None:
        for tool in ("ip", "tc", "nft"):
            if shutil.which(tool) is None:
                message = f"{tool} is not installed"
                raise NotPermitted(message)
        addresses = [SERVICES, *(NETWORK[number + 1] for number in range(self._number))]
        names = self._names()
        known = "".join(
            f"{address} {name}{'' if address == SERVICES else f' {ALL_NODES}'}\n"
            for address, name in zip(addresses, names, strict=True)
        )
        texts = {
            "hosts": f"127.0.0.1 localhost\n::1 localhost\n{known}",
            "resolv.conf": f"nameserver {SERVICES}\n",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        }
        machines: list[Namespaces] = []
        for address, name in zip(addresses, names, strict=True):
            folder = self._folder(name)
            for file, text in texts.items():
                (folder / file).write_text(text, encoding="ascii")
            files = {f"/etc/{file}": folder / file for file in texts}
            machines.append(Namespaces(name, str(address), folder, files))
        self._stations += machines
        # All of them, so that what one of them lacks finds none of the others half made.
        self._await_all([self._pool.submit(machine.open) for machine in machines])
        switch, *others = machines
        width = NETWORK.prefixlen
        links = [
            f"link add {BRIDGE} type bridge",
            f"link set {BRIDGE} up",
            f"addr add {switch.address}/{width} dev {BRIDGE}",
        ]
        with contextlib.ExitStack() as stack:
            namespaces = []
            for machine in others:
                namespace = os.open(f"/proc/{machine.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, namespace)
                namespaces.append(namespace)
                peer = f"peer name {INTERFACE} netns /proc/self/fd/{namespace}"
                links += [
                    f"link add {machine.name} type veth {peer}",
                    f"link set {machine.name} master {BRIDGE} up",
                ]
            switch.tool("ip", "-batch", "-", text="\n".join(links), descriptors=namespaces)
        # So that every query is told at once that there is no name server.
        limit = Path("/proc/sys/net/ipv4/icmp_ratelimit")
        switch.inside(lambda: limit.write_text("0", encoding="ascii"))
        for machine in others:
            commands = (
                f"addr add {machine.address}/{width} dev {INTERFACE}\nlink set {INTERFACE} up"
            )
            machine.tool("ip", "-batch", "-", text=commands)

    def _names(self) -> list[str]:
        return ["services", *(f"node-{number + 1}" for number in range(self._number))]

    def _folder(self, name: str) -> Path:
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        return folder

    def _write_hostfiles(self) -> None:
        text = "".join(f"{node.member} slots={self._gpus}\n" for node in self.nodes)
        for place in (self.directory / "hostfile", *(node.hostfile for node in self.nodes)):
            place.write_text(text, encoding="ascii")

    def _start_agents(self) -> None:
        started = time.monotonic()
        for node in self.nodes:
            node.begin()
        for number, node in enumerate(self.nodes, start=1):
            node.finish()
            passed = time.monotonic() - started
            self.progress(f"agents: {number} of {len(self.nodes)} serve after {passed:.1f} s")
