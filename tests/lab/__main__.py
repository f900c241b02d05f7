"""`python -m tests.lab`: bring a lab up, show it, and take it down at Ctrl-C or SIGTERM.

Or clean up after labs that were killed.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from tests.lab import Lab, records
from tests.lab.lab import COLLECTORS


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--nodes", type=int, default=8, help="how many nodes (%(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="simulated GPUs of each (%(default)s)")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration to lay over the lab's own on every node",
    )
    parser.add_argument(
        "--collectors",
        nargs="*",
        default=COLLECTORS,
        metavar="NAME",
        help="collectors that run (%(default)s)",
    )
    parser.add_argument("--interval", default="1s", help="how often they do (%(default)s)")
    parser.add_argument(
        "--directory", type=Path, help="where files go and stay (a temporary one that is removed)"
    )
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="addresses of 127.0.0.0/8 even where namespaces are permitted",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove what killed labs left (with --directory, the one there), and end",
    )
    options = parser.parse_args()
    directory = options.directory.absolute() if options.directory else None
    if options.clean:
        print("\n".join(records.clean(directory)) or "nothing is left of any lab")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which a shell has ignored in what it starts in the background
    lab = Lab(
        directory,
        options.nodes,
        gpus=options.gpus,
        config=options.config.read_text(encoding="utf-8") if options.config else "",
        collectors=options.collectors,
        interval=options.interval,
        namespaces=not options.loopback,
        progress=lambda text: print(text, flush=True),
    )
    with contextlib.suppress(KeyboardInterrupt), lab:
        print(f"\n{'node':10} {'page':28} {'agent':>8}  enter it")
        for node in lab.nodes:
            enter = f"nsenter --target {node.station.pid} --all" if node.station.pid else "-"
            print(
                f"{node.name:10} http://{node.address}:{node.agent.port:<5}/ "
                f"{node.agent.pid:>12}  {enter}"
            )
        if lab.services.pid:
            print(
                f"services   {lab.services.address} (the switch) {'':>12}  nsenter --target "
                f"{lab.services.pid} --all"
            )
        print(f"\nfiles in {lab.directory}; Ctrl-C ends the lab", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
