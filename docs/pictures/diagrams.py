"""Draws the diagrams of the documentation: `python docs/pictures/diagrams.py [--check]`.

Plain SVG without scripts or fonts from elsewhere, light or dark as the reader's system is.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
HEADER = "<!-- Made by docs/pictures/diagrams.py; do not edit. -->\n"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.small { font-size: 11.5px; fill: #59636e; }
rect { fill: #f6f8fa; stroke: #8c959f; rx: 6px; }
.agent { fill: #ddf4ff; stroke: #0969da; }
.result { fill: #dafbe1; stroke: #1a7f37; }
path { fill: none; stroke: #59636e; marker-end: url(#head); }
#head path { fill: #59636e; stroke: none; marker-end: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; }
  rect { fill: #151b23; stroke: #656c76; }
  .agent { fill: #0c2d4d; stroke: #4493f8; } .result { fill: #12361f; stroke: #3fb950; }
  path { stroke: #9198a1; } #head path { fill: #9198a1; }
}
"""
LINE = 16
"""Pixels from one line of text to the next."""


@dataclass(frozen=True, slots=True)
class Box:
    """A titled rectangle; positions and sizes in pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    kind: str = ""

    def svg(self) -> str:
        """Draw it."""
        middle = self.x + self.width / 2
        top = self.y + (self.height - LINE * len(self.lines)) / 2 + 4
        texts = [f'<text class="title" x="{middle:g}" y="{top:g}">{escape(self.title)}</text>']
        texts += [
            f'<text class="small" x="{middle:g}" y="{top + LINE * number:g}">{escape(line)}</text>'
            for number, line in enumerate(self.lines, 1)
        ]
        shape = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        return "\n".join([f'<rect class="{self.kind}" {shape}/>', *texts])


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line through points, with a text beside its first part."""

    points: tuple[tuple[int, int], ...]
    text: str = ""

    def svg(self) -> str:
        """Draw it."""
        line = f'<path d="M{" L".join(f"{x},{y}" for x, y in self.points)}"/>'
        (x1, y1), (x2, y2) = self.points[:2]
        place = f'x="{(x1 + x2) / 2:g}" y="{(y1 + y2) / 2 - 6:g}"'
        return line + (
            f'<text class="small" {place}>{escape(self.text)}</text>' if self.text else ""
        )


def picture(width: int, height: int, title: str, parts: tuple[Box | Arrow, ...]) -> str:
    """Return an SVG document."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' text-anchor="middle" width="{width}" '
        f'height="{height}">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"'
        ' markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>\n'
    )
    return HEADER + head + "\n".join(part.svg() for part in parts) + "\n</svg>\n"


def processes() -> str:
    """Draw the processes of one node."""
    workers = (
        ("device worker", ("libnvidia-ml", "calls that hang in the driver")),
        ("fabric worker", ("InfiniBand sysfs", "adapters whose firmware hangs")),
        ("storage worker", ("checkpoint and NVMe paths", "file systems that hang")),
        ("jobs, logs", ("NCCL RAS, logs of jobs", "one worker process each")),
    )
    boxes = [
        Box(20 + 225 * number, 190, 205, 74, title, lines)
        for number, (title, lines) in enumerate(workers)
    ]
    arrows = [
        Arrow(((455, 116), (455, 150), (box.x + 102, 150), (box.x + 102, 188))) for box in boxes
    ]
    about = ("one event loop, no privileges needed", "imports neither pynvml nor torch")
    return picture(
        920,
        400,
        "The processes of dshealthd on one node",
        (
            Box(325, 40, 260, 76, "dshealthd run (the agent)", about, "agent"),
            Box(20, 40, 205, 76, "Prometheus, people", ("/metrics, page, /api/v1/status",)),
            Arrow(((225, 78), (323, 78)), "HTTP"),
            Box(695, 40, 205, 76, "agents of other nodes", ("signed or mutual TLS",)),
            Arrow(((695, 78), (587, 78)), "peer API"),
            *arrows,
            *boxes,
            Box(
                20,
                306,
                430,
                74,
                "probe workers, one per GPU and round",
                ("small collectives by the interpreter of your training", "killed as a group"),
            ),
            Box(
                470,
                306,
                430,
                74,
                "training ranks, not ours",
                (
                    "heartbeats: sealed memory that the agent reads;",
                    "without it: /proc alone, nothing to install",
                ),
            ),
            Arrow(((455, 116), (455, 150), (10, 150), (10, 343), (18, 343))),
            Arrow(((455, 116), (455, 150), (910, 150), (910, 343), (902, 343))),
        ),
    )


def flow() -> str:
    """Draw how a fault becomes a page."""
    rows = (
        (20, "node", ("GPU, fabric, kernel,", "memory, disks, sockets")),
        (120, "peers", ("echoes, collectives,", "between all nodes")),
        (220, "jobs", ("/proc, heartbeats,", "NCCL RAS, logs")),
    )
    middles = (
        (20, "collectors", ("own interval and deadline", "samples / n.a. / error")),
        (120, "probe verdicts", ("against the usual,", "suspects confirmed")),
        (220, "job state", ("hung or slow,", "culprit and cause")),
    )
    parts: list[Box | Arrow] = []
    for (y, left, lefts), (_, middle, middles_) in zip(rows, middles, strict=True):
        parts += [
            Box(20, y, 150, 74, left, lefts),
            Box(210, y, 180, 74, middle, middles_, "agent"),
            Arrow(((170, y + 37), (208, y + 37))),
            Arrow(((390, y + 37), (408, y + 37), (408, 157), (428, 157))),
        ]
    parts += [
        Box(430, 120, 120, 74, "snapshot", ("a scrape reads it,", "no hardware"), "agent"),
        Box(590, 20, 150, 74, "findings", ("this node, this moment",), "agent"),
        Box(780, 20, 220, 74, "page, status, doctor", ("Slurm, Kubernetes, NVRx",), "result"),
        Box(590, 190, 150, 74, "Prometheus", ("alert rules: history,", "the whole fleet")),
        Box(
            780,
            190,
            220,
            74,
            "one page to a phone",
            ("node, GPU or link; why;", "first step; runbook"),
            "result",
        ),
        Arrow(((550, 157), (570, 157), (570, 57), (588, 57))),
        Arrow(((550, 157), (570, 157), (570, 227), (588, 227))),
        Arrow(((740, 57), (778, 57))),
        Arrow(((740, 227), (778, 227))),
    ]
    return picture(1020, 315, "From a fault to a page", tuple(parts))


def main(arguments: list[str] | None = None) -> int:
    """Write the diagrams, or compare them; status 1 when one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args(arguments).check
    status = 0
    for name, text in (("processes.svg", processes()), ("flow.svg", flow())):
        file = HERE / name
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text("utf-8") != text:
            print(f"{file} is out of date: run ./dev generate", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
