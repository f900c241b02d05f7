"""A small cluster with simulated GPUs, a real Prometheus and a real Alertmanager.

Break something, and see the page arrive.

Nothing of this machine is touched: the nodes are network namespaces, the GPUs a simulated driver,
and all is gone at the end. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.lab.catalogue import FAULTS, WITHOUT_PROBES
from tests.lab.forward import forwarded
from tests.lab.paging import Paging
from tests.lab.receiver import Notification
from tests.lab.servers import Server
from tests.lab.station import NotPermitted

PAGE_SECONDS, OVER_SECONDS = 180.0, 300.0
SLACK = "slack"
PERIOD = 2.0
"""Seconds from one round of the probes to the next."""


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


class Demo:
    """The lab, and what has been told of the fault in force."""

    def __init__(self, directory: Path, nodes: int, gpus: int) -> None:
        """Prepare."""
        self._directory = directory
        self.paging = Paging(
            directory,
            nodes,
            gpus=gpus,
            progress=say,
            show=self._show,
            adapt=self._write_texts,
            period=PERIOD if nodes > 1 else None,
            training=True,
            itself=True,
        )
        self._began = time.monotonic()
        self._waits_for = ""
        self._came = threading.Event()
        self.ways: dict[str, str] = {}
        """NAME:PORT in the lab, as targets are called: the HOST:PORT here that leads there."""

    def _write_texts(self, config: dict[str, Any]) -> None:
        """Have Alertmanager write its pages and tickets out, as it would to Slack, beside the
        webhooks.
        """
        address = self._directory / "slack-url"
        address.write_text(f"{self.paging.receiver.url}/{SLACK}", encoding="ascii")
        found = {receiver["name"]: receiver for receiver in config["receivers"]}
        for name in ("dshealthd-page", "dshealthd-ticket"):
            found[name]["slack_configs"] = [
                entry | {"api_url_file": str(address)}
                for entry in found[f"{name}-slack"]["slack_configs"]
            ]

    def _show(self, notification: Notification) -> None:
        """Print what Alertmanager wrote; called by the receiver."""
        if notification.receiver != SLACK:
            return
        (message,) = notification.document["attachments"]
        kind = {"danger": "PAGE", "warning": "TICKET"}.get(message["color"], "OVER")
        say(f"{kind}, {notification.received - self._began:.1f} s later")
        width = 110
        print(f"\n  ┌{'─' * width}")
        text = message["text"]
        for inside, outside in self.ways.items():  # runbooks' links
            text = text.replace(f"//{inside}/", f"//{outside}/")
        for line in (message["title"], "", *text.strip().splitlines()):
            indent = "  │ " + " " * (len(line) - len(line.lstrip()))
            print(
                textwrap.fill(
                    line.strip(), width, initial_indent=indent, subsequent_indent=f"{indent}    "
                )
                or "  │"
            )
        print(f"  └{'─' * width}\n", flush=True)
        if kind == self._waits_for:
            self._came.set()

    def wait(self, kind: str, seconds: float) -> bool:
        """Wait for a message of this kind from now on."""
        self._began, self._waits_for = time.monotonic(), kind
        self._came.clear()
        return self._came.wait(seconds)

    def play(self, name: str, *, attended: bool) -> bool:
        """Show a fault, its page and its end; return whether both came in time."""
        nodes = self.paging.lab.nodes
        # The first one stays, unless it is alone: it serves the fleet page, which shows the fault.
        fault, node = FAULTS[name], random.choice(nodes[1:] or nodes)
        kind = fault.receiver.upper()
        with fault.inject(self.paging, node):
            if not self.wait(kind, PAGE_SECONDS):
                say(f"no {kind.lower()} within {PAGE_SECONDS:g} s\n{self.paging.pending()}")
                return False
            if attended:
                input("Enter undoes the fault ")
        if not self.wait("OVER", OVER_SECONDS):
            say(f"not over within {OVER_SECONDS:g} s\n{self.paging.pending()}")
            return False
        return True

    def menu(self) -> None:
        """Ask for faults until there is no more."""
        names = WITHOUT_PROBES
        while True:
            print()
            for number, name in enumerate(names, start=1):
                print(f"  {number:2}  {FAULTS[name].title}")
            answer = input("\nWhich fault? (a number; q ends) ").strip()
            if answer in {"q", "quit", "exit"}:
                return
            if answer in names:
                self.play(answer, attended=True)
            elif answer.isdecimal() and 1 <= int(answer) <= len(names):
                self.play(names[int(answer) - 1], attended=True)
            else:
                print(f"{answer!r} is none of these: type a number from 1 to {len(names)}, or q")


def addresses(demo: Demo, stack: contextlib.ExitStack) -> None:
    """Print where to look, from this machine."""
    lab = demo.paging
    prometheus, alertmanager = lab.prometheus, lab.alertmanager
    first = lab.lab.nodes[0]
    places = (
        [("fleet", first.station, first.agent.port, "/fleet")] if len(lab.lab.nodes) > 1 else []
    )
    places += [(node.name, node.station, node.agent.port, "/") for node in lab.lab.nodes]
    # Debian's Prometheus has its old pages alone, and none where only the program was unpacked; its
    # Alertmanager has none.
    pages = (
        (prometheus, ("/alerts", "/classic/alerts"), "/api/v1/alerts"),
        (alertmanager, ("/#/alerts",), "/api/v2/alerts"),
    )
    for name, (server, usual, other) in zip(("Prometheus", "Alertmanager"), pages, strict=True):
        path = next((page for page in usual if shown(server, page)), other)
        places.append((name, server.station, server.port, path))
    print()
    for name, station, port, path in places:
        way = stack.enter_context(forwarded(station, port))
        demo.ways[f"{name}:{port}"] = way
        print(f"  {name:13} http://{way}{path}")
    print("\n  DshealthdWatchdog fires all the time: that it arrives shows that the chain works.")
    print(flush=True)


def shown(server: Server, path: str) -> bool:
    """Tell whether a server has a page there, which is more than a line of text."""
    try:
        answer = server.ask(path.partition("#")[0])
    except (RuntimeError, OSError):
        return False
    return isinstance(answer, str) and "<script" in answer


def main() -> int:
    """Run the demonstration; status 0, or 1 where a page did not come or could not."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fault",
        choices=WITHOUT_PROBES,
        metavar="NAME",
        help=f"inject one, show its page and its end: {', '.join(WITHOUT_PROBES)}",
    )
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (%(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="simulated GPUs of each (%(default)s)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.suppress(KeyboardInterrupt, EOFError), contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="dshealthd-demo-")))
        demo = Demo(directory, options.nodes, options.gpus)
        try:
            stack.enter_context(demo.paging)
        except NotPermitted as error:
            say(f"not permitted here, nothing is shown: {error}")
            return 1
        addresses(demo, stack)
        say("waiting for Prometheus' first round of all rules, half a minute at most")
        demo.paging.until_watched()
        if options.fault is not None:
            return 0 if demo.play(options.fault, attended=False) else 1
        demo.menu()
    return 0


if __name__ == "__main__":
    sys.exit(main())
