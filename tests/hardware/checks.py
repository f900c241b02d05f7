"""Items that only read: versions, devices and links against what other tools say, and the
doctor.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dshealthd.collectors import infiniband, nvlink
from dshealthd.doctor.ssh import command as over_ssh
from dshealthd.http.client import Access, local
from dshealthd.http.exchange import Unreachable
from tests.agents import Scrape
from tests.hardware import programs
from tests.hardware.item import Item, not_run, ran
from tests.hardware.node import ON_GPUS, Node

QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
TORCH = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version())"
DOCTOR = 120.0
"""Seconds for the doctor, on all nodes at once."""
_WARNING = 1
"""Exit status of the doctor up to which nothing is wrong or unknown."""


def here(arguments: Sequence[str]) -> list[str]:
    """Return a command as this node runs it."""
    return list(arguments)


def on(peer: str, ssh: str) -> Callable[[Sequence[str]], list[str]]:
    """Return what makes a command one for another node, over SSH."""
    return lambda arguments: over_ssh([ssh], peer, arguments, programs.SECONDS / 2)


def gpus_by_name(where: Callable[[Sequence[str]], list[str]], place: str) -> Item:
    """Name GPUs and driver as nvidia-smi does."""
    title, command = f"GPUs and driver, {place}", shlex.join(where(QUERY))
    answer = programs.run(where(QUERY))
    if answer.failure:
        return not_run(title, command, answer.failure)
    models = Counter(line.strip() for line in answer.output.splitlines() if line.strip())
    if not models:
        return not_run(title, command, "nvidia-smi named no GPU")
    return ran(title, command, "; ".join(f"{count} x {model}" for model, count in models.items()))


def torch(where: Callable[[Sequence[str]], list[str]], place: str, python: str) -> Item:
    """Name torch, and the CUDA and NCCL that it comes with."""
    title, arguments = f"torch, CUDA, NCCL, {place}", where((python, "-c", TORCH))
    answer = programs.run(arguments, 2 * programs.SECONDS)
    if answer.failure:
        why = f"{answer.failure} (--python names the training environment's)"
        return not_run(title, shlex.join(arguments), why)
    return ran(title, shlex.join(arguments), answer.output)


def devices(node: Node) -> Item:
    """Compare the GPUs of NVML with the PCI bus and with nvidia-smi."""
    title, command = "every GPU is there and up", "dshealthd metrics | grep -E 'gpu_up|gpus_'"
    listed = programs.run(("nvidia-smi", "-L"))
    counted = len([line for line in listed.output.splitlines() if line.startswith("GPU ")])
    smi = f"not known to nvidia-smi ({listed.failure})" if listed.failure else str(counted)
    up, bus = node.up, node.on_bus
    wrong = [f"{up.count(False)} of NVML's GPUs are not up"] if False in up else []
    # Some systems have GPUs and no PCI bus that shows them.
    if bus is None or (bus and bus != len(up)):
        wrong.append(f"the PCI bus has {'an unknown number of' if bus is None else bus} GPUs")
    if not listed.failure and counted != len(up):
        wrong.append("nvidia-smi lists another number than NVML")
    elif listed.hung:
        wrong.append("nvidia-smi hung")
    text = f"NVML {len(up)}, PCI bus {bus}, nvidia-smi -L: {smi}"
    return ran(title, command, text, "; ".join(wrong))


def calls(node: Node) -> Item:
    """Tell how long a sweep of the driver's calls took, and what failed in it."""
    title, command = "NVML answers all calls", "dshealthd metrics | grep collector_"
    times = ", ".join(
        f"{name} {result.duration * 1000:.0f} ms"
        for name in ON_GPUS
        if node.available(name) and (result := node.result(name)) is not None
    )
    return ran(title, command, f"the first sweep took: {times}", "; ".join(node.faults(*ON_GPUS)))


def others(node: Node) -> Item:
    """Tell which other sources could not be read."""
    title, command = "all other sources are read", "dshealthd metrics | grep collector_up"
    names = [one.name for one in node.snapshot if one.name not in ON_GPUS]
    count = sum(map(node.available, names))
    return ran(title, command, f"{count} collectors", "; ".join(node.faults(*names)))


def links(node: Node) -> Item:
    """Compare the NVLinks of the GPUs with each other."""
    title, command = "NVLinks are up", "dshealthd metrics | grep nvlinks_up; nvidia-smi nvlink -s"
    up = {one.labels[0]: int(one.value) for one in node.samples(nvlink.LINKS_UP)}
    if not up:
        return not_run(title, command, "NVML tells of no NVLink")
    text = ", ".join(f"GPU {name}: {count} up" for name, count in up.items())
    return ran(title, command, text, "GPUs differ" if len(set(up.values())) > 1 else "")


def adapters(node: Node) -> Item:
    """Compare the InfiniBand ports with ibstat."""
    title = "InfiniBand ports are up"
    command = "dshealthd metrics | grep infiniband_port_up; ibstat -l"
    ports = {one.labels[:2]: one.value == 1 for one in node.samples(infiniband.UP)}
    answer = programs.run(("ibstat", "-l"))
    if not ports and answer.failure:
        return not_run(title, command, f"no port in /sys/class/infiniband, and {answer.failure}")
    known, named = {device for device, _ in ports}, set(answer.output.split())
    wrong = [f"{device} port {port} is down" for (device, port), up in ports.items() if not up]
    if not answer.failure and named != known:
        wrong.append(f"ibstat lists {', '.join(sorted(named)) or 'none'}")
    seen = f"{len(ports)} ports of {', '.join(sorted(known)) or 'no adapter'}"
    compared = f"not compared with ibstat: {answer.failure}" if answer.failure else "as ibstat"
    return ran(title, command, f"{seen} ({compared})", "; ".join(wrong))


def doctor(file: Path | None, nodes: Sequence[str], remote: Sequence[str]) -> Item:
    """Have the doctor examine this node, or both and compare them; it asks no training anything."""
    title = "the doctor finds nothing" + (", on both nodes" if nodes else "")
    # The check `collectives` would ask running trainings by NCCL's RAS.
    words = ["doctor", "--json", "--skip", "collectives", *configured(file)]
    words += ["--hosts", ",".join(nodes), *remote] if nodes else []
    command = shlex.join(["dshealthd", *words])
    answer = programs.run([sys.executable, "-m", "dshealthd", *words], DOCTOR)
    try:
        document = json.loads(answer.output)
        nodes_asked = document["nodes"]
        unheard = [f"{one['node']}: {one['problem']}" for one in nodes_asked if one["problem"]]
        found = _findings(document)
    except (ValueError, KeyError, TypeError):
        return not_run(title, command, answer.failure or "it printed no report")
    if unheard:  # a matter of SSH and keys, not of hardware
        return not_run(title, command, "; ".join(unheard))
    text = "; ".join(found) or "nothing"
    return ran(title, command, text, "" if answer.status <= _WARNING else document["verdict"])


def _findings(document: dict[str, Any]) -> list[str]:
    checks = [check for one in document["nodes"] for check in one["checks"]] + document["across"]
    bad = [check for check in checks if check["outcome"] != "ok"]
    return [
        f"{check['check']} {outcome}: {check['results'][0]['text']}"
        for outcome in ("critical", "unknown", "warning")
        for check in bad
        if check["outcome"] == outcome
    ]


def running_job(node: Node) -> Item:
    """Tell what the agent of this node hears from NCCL of a training that runs; asks the agent
    alone.
    """
    title = "NCCL's RAS of a training"
    command = "dshealthd metrics | grep dshealthd_job_nccl_  # with a training on both nodes"
    try:
        scrape = Scrape(local(node.loaded, Access()).get("/metrics").decode(), 0.0)
    except Unreachable as error:
        return not_run(title, command, f"it is read from this node's agent alone: {error}")
    states = [
        dict(labels)["state"]
        for labels, value in scrape.series.get("dshealthd_job_nccl_ras_state", {}).items()
        if value == 1
    ]
    asked = [state for state in states if state != "elsewhere"]
    if not asked:
        return not_run(title, command, "the agent sees no training whose rank 0 is on this node")
    idle = scrape.all("dshealthd_job_nccl_answers_without_progress")
    wrong = "" if set(asked) == {"answered"} and not any(idle) else "not each job answers and moves"
    shown = ", ".join(map(str, map(int, idle))) or "not known yet"
    text = f"ras_state {', '.join(asked)}; answers_without_progress {shown}"
    return ran(title, command, text, wrong)


def configured(file: Path | None) -> list[str]:
    """Return the flag that names the configuration."""
    return [] if file is None else ["--config.file", str(file)]


BY_HAND = (
    ("a stopped rank is named", ("kill -STOP PID; sleep 45; dshealthd metrics | grep "
                                 "rank_trouble_info; kill -CONT PID")),
    ("a killed rank is named", ("kill -KILL PID; dshealthd metrics | grep rank_trouble_info; "
                                "dshealthd evidence")),
    ("CUDA graphs: no false page", ("dshealthd metrics | grep rank_operations_behind  # while "
                                    "they run")),
)  # fmt: skip


def by_hand() -> list[Item]:
    """Return what stays with a person: it stops or ends ranks of a training made for it."""
    why = "by hand only, on a training made for it: this command ends and stops nothing"
    return [not_run(title, command, why) for title, command in BY_HAND]
