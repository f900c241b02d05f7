"""From a fault in a node to its alert: what the agent exports, well and with the fault, played
through the shipped rules.

`dshealthd metrics` on a machine of moved roots, simulated GPUs and real processes, once before and
once with the fault; an hour of the one and hours of the other go through promtool.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dshealthd.config import registry
from tests.agents import LABEL, SERIES, Scrape
from tests.lab.node import toml
from tests.nvml.simulator import Simulator
from tests.symptoms.promtool import asking, got, pruned

WELL = 60
"""Minutes without the fault."""
Text = str
"""One scrape."""


@dataclass
class Machine:
    """A node whose sources are this machine's, but for what a test lays over them."""

    directory: Path
    collectors: Sequence[str]
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Of collectors, by name."""
    gpus: int = 4
    command: tuple[str, ...] = ()
    """What the agent is started with, as a namespace of its own."""

    def __post_init__(self) -> None:
        self.simulator = Simulator(self.directory / "simulator", gpus=self.gpus)
        self.sysfs = self.directory / "sys"
        (self.sysfs / "bus/pci/devices").mkdir(parents=True)
        self.simulator.pci_sysfs(self.sysfs)
        self.procfs = self.directory / "proc"
        self.laid_over: dict[str, str] = {}

    def lay_over(self, file: str, text: str) -> None:
        """Have a file of /proc say something else."""
        self.laid_over[file] = text

    def scrape(self) -> Text:
        """Return what a scrape of this machine's agent shows now."""
        tables = {
            name: {"enabled": name in self.collectors, **self.options.get(name, {})}
            for name in registry.all_collectors()
        }
        config = self.directory / "dshealthd.toml"
        roots = {"sysfs": str(self.sysfs), "state": str(self.directory / "state")}
        if self.laid_over:
            roots["procfs"] = str(self._procfs())
        config.write_text(toml({"collectors": tables, "path": roots}), encoding="utf-8")
        command = [*self.command, sys.executable, "-P", "-m", "dshealthd", "metrics"]
        done = subprocess.run(
            [*command, "--config.file", str(config)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=os.environ | self.simulator.environment(),
        )
        return done.stdout

    def _procfs(self) -> Path:
        """Return a /proc that is this machine's but for what is laid over."""
        for file, text in self.laid_over.items():
            place, source = self.procfs, Path("/proc")
            place.mkdir(exist_ok=True)
            *folders, name = file.split("/")
            for folder in folders:
                _mirror(source, place, folder)
                place, source = place / folder, source / folder
                place.mkdir(exist_ok=True)
            _mirror(source, place, name)
            (place / name).write_text(text, encoding="ascii")
        return self.procfs


def _mirror(source: Path, place: Path, without: str) -> None:
    """Link what a folder of /proc holds, but one entry; what is there already stays."""
    for entry in os.listdir(source):
        if entry != without and not os.path.lexists(place / entry):
            (place / entry).symlink_to(source / entry)
    if (place / without).is_symlink():
        (place / without).unlink()


@contextlib.contextmanager
def rank(job: str, number: int, *code: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that looks like a rank of a job, and that has run `code` when it is given."""
    environment = {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": job,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29599",
        **variables,
    }
    program = "\n".join([*code, "print('ready', flush=True)", "input()"])
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.communicate("\n", timeout=60)


def fires(
    alert: str,
    nodes: Mapping[str, tuple[Text, Text]],
    directory: Path,
    *,
    hours: int = 1,
    job: str = "",
) -> tuple[bool, bool]:
    """Tell whether an alert fires in the hour before the fault, and in the hours with it.

    `nodes` are the scrapes of each node, by name, before and with the fault; where a `job` is
    named, the jobs of others on this machine are left out.
    """
    minutes = WELL + 60 * hours
    now = time.time()
    series: dict[str, str] = {}
    for name, texts in nodes.items():
        target = (
            f'cluster="c", exporter="dshealthd", job="dshealthd", instance="{name}:10061", '
            f'node="{name}"'
        )
        series[f"up{{{target}}}"] = f"1x{minutes}"
        # What a busy machine is found to have must not stand for what the nodes find of a fault.
        own = f'finding="{alert.removeprefix("Dshealthd")}"'
        is_told = any(own in text for text in texts)
        well, ill = (_samples(text, target, job, now) for text in texts)
        for found in () if is_told else (well, ill):
            for key in [key for key in found if key.startswith("dshealthd_finding{")]:
                del found[key]
        for key in well.keys() | ill.keys():
            before = f"{well[key]:.17g}x{WELL - 1}" if key in well else f"_x{WELL}"
            after = f"{ill[key]:.17g}x{minutes - WELL}" if key in ill else "stale"
            series[key] = f"{before} {after}"
    query = f'ALERTS{{alertname="{alert}", alertstate="firing"}}'
    told: list[bool] = []
    for until, span in ((WELL - 1, WELL), (minutes, 60 * hours)):
        expression = f"group(max_over_time({query}[{span}m]))"
        rows = [{"series": key, "values": values} for key, values in series.items()]
        scene = asking(expression, f"{until}m", rows)
        file = directory / "chain.json"
        document = {"evaluation_interval": "1m", "tests": [scene]}
        file.write_text(json.dumps(document), encoding="utf-8")
        (directory / "rules").mkdir(exist_ok=True)
        fired = got(pruned(file, directory / "rules"))
        assert fired in {"", "{} 1E+00"}
        told.append(bool(fired))
    return told[0], told[1]


def played(
    alert: str, told: tuple[Mapping[str, Scrape], Mapping[str, Scrape]], directory: Path
) -> tuple[bool, bool]:
    """Return what `fires` does of the scrapes of a lab's nodes before and with a fault.

    A node that did not answer with the fault is taken as it was before.
    """
    well, ill = told
    nodes = {name: (scrape.text, ill.get(name, scrape).text) for name, scrape in well.items()}
    return fires(alert, nodes, directory)


def _samples(text: Text, target: str, job: str, now: float) -> dict[str, float]:
    """Return the samples of a scrape with the labels that Prometheus gives them.

    Times are those of a clock that began WELL minutes before the scrape.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else SERIES.fullmatch(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        pairs = dict(LABEL.findall(labels or ""))
        if "job" in pairs:
            pairs["training_job"] = pairs.pop("job")
            if job and pairs["training_job"] not in ("", job):
                continue
        written = ", ".join([target, *(f'{key}="{said}"' for key, said in sorted(pairs.items()))])
        number = float(value)
        if number != number:  # noqa: PLR0124 - a NaN, which promtool cannot be given
            continue
        found[f"{name}{{{written}}}"] = (
            number - now + 60 * WELL if name.endswith("_timestamp_seconds") else number
        )
    return found
