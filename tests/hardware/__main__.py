"""`make test-hardware`: the checklist of docs/hardware.md, as far as one command can go through it.

Reads only, but for the probe's collectives, which it announces and runs on idle GPUs alone.

Exit status: 0 all that ran is as expected, on at least one GPU; 1 something is not; 2 wrong usage
or configuration; 3 no GPU here, so that nothing was shown.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dshealthd import __version__
from dshealthd.core.options import ConfigError
from dshealthd.probe.cli.local import interpreter
from dshealthd.probe.members.local_membership import hostname
from tests.hardware import checks, collectives
from tests.hardware.item import Item, State, not_run
from tests.hardware.node import Node, look, objection

OK, UNEXPECTED, USAGE, NO_GPU = 0, 1, 2, 3
NONE = (
    "No NVIDIA GPU on this node: neither the PCI bus nor NVML shows one. Nothing was run, and this "
    "says nothing of any hardware."
)
UNKNOWN = (
    "Whether this node has an NVIDIA GPU is unknown, as the PCI bus or NVML cannot be read. "
    "Nothing was run, and this says nothing of any hardware."
)
PAUSE = 2.0
"""Seconds after which busy GPUs are looked at again: the agent's own round, or the one before, may
just have ended.
"""
SYSTEM = Path("/etc/dshealthd/dshealthd.toml")
"""Where packages put the agent's configuration."""


def main() -> int:
    """Go through the checklist, print it with a block for the documentation, return the status."""
    options = _parser().parse_args()
    file = options.file or (SYSTEM if SYSTEM.exists() else None)
    started = time.monotonic()
    try:
        node = look(file)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE
    if not node.up and not node.on_bus:
        faults = node.faults("gpu_bus", "gpu")
        print(UNKNOWN if faults else NONE)
        print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
        return NO_GPU
    items = []
    for number, item in enumerate(_items(options, node, file), 1):
        print(item.line(number), flush=True)
        items.append(item)
    seconds = time.monotonic() - started
    print(f"\nFor docs/hardware.md ({seconds:.0f} s):\n\n{_block(options, node, items)}")
    return UNEXPECTED if any(item.state is State.UNEXPECTED for item in items) else OK


def _items(options: argparse.Namespace, node: Node, file: Path | None) -> Iterator[Item]:
    """Yield the items, each as it is done with: first what only reads."""
    python = options.python or interpreter(node.loaded)
    yield checks.gpus_by_name(checks.here, "here")
    yield checks.torch(checks.here, "here", python)
    yield checks.devices(node)
    yield checks.calls(node)
    yield checks.others(node)
    yield checks.links(node)
    yield checks.adapters(node)
    yield checks.doctor(file, (), ())
    yield checks.running_job(node)
    nodes = (hostname(), options.peer)
    if options.peer:
        there = checks.on(options.peer, options.ssh)
        yield checks.gpus_by_name(there, "peer")
        yield checks.torch(there, "peer", python)
        remote = ["--ssh", options.ssh, "--remote-command", options.remote_command]
        yield checks.doctor(file, nodes, remote)
    against = "left out by --read-only" if options.read_only else _busy(file)
    if not against:
        _announce(len(node.up), options.peer)
    yield collectives.within(file, python, against)
    if options.peer:
        # Anew: the first one took a while, and a training may have started.
        against = against or _busy(file)
        yield collectives.between(file, nodes, len(node.up), against)
    else:
        yield not_run(collectives.BETWEEN, "make test-hardware PEER=HOST", "no --peer was named")
    yield from checks.by_hand()


def _busy(file: Path | None) -> str:
    """Return why no collective may run now, once GPUs had some seconds to become idle."""
    reason = objection(look(file))
    if reason:
        time.sleep(PAUSE)
        reason = objection(look(file))
    return reason


def _announce(gpus: int, peer: str) -> None:
    """Say what is going to use the GPUs."""
    where = f"all {gpus} idle GPUs of this node"
    if peer:
        where += f", then over this node and {peer}, by their agents, where these are idle too"
    print(
        f"--- Next: all-reduces of up to 64 MiB and matrix products on {where}. They keep GPUs "
        "busy for some seconds; to import torch may take a minute. Ctrl-C ends them; --read-only "
        "leaves them out.",
        flush=True,
    )


def _block(options: argparse.Namespace, node: Node, items: list[Item]) -> str:
    """Return what is pasted into the documentation; it names no host."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    peer = " PEER=…" if options.peer else ""
    system = f"Linux {platform.release()}, driver {node.driver or 'unknown'}"
    lines = [
        (
            f"### {day}: "
            f"{items[0].text if items[0].state is State.EXPECTED else f'{len(node.up)} GPUs'}"
        ),
        "",
        f"`make test-hardware{peer}`, dshealthd {__version__}, {system}.",
        "",
        "| | item | result | found, or why not |",
        "|---|---|---|---|",
        *(item.row(number) for number, item in enumerate(items, 1)),
    ]
    text = "\n".join(lines)
    for name, stand_in in ((options.peer, "peer"), (hostname(), "here")):
        text = re.sub(rf"\b{re.escape(name)}\b", stand_in, text) if name else text
    return text


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "make test-hardware", description=__doc__, formatter_class=form
    )
    add = parser.add_argument
    add("--peer", default="", metavar="HOST", help="second node, over SSH and by its agent")
    add("--python", metavar="PATH", help="interpreter that has torch, on both nodes")
    where = f"configuration of the agents (default: {SYSTEM}, where there is one)"
    add("--config.file", dest="file", type=Path, metavar="FILE", help=where)
    add("--read-only", action="store_true", help="run no collective")
    add("--ssh", default="ssh", metavar="PROGRAM", help="SSH client (%(default)s)")
    peers = "dshealthd on the peer (%(default)s)"
    add("--remote-command", default="dshealthd", metavar="PROGRAM", help=peers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
