"""The pods of a manifest have as many processes as GPUs, shared memory, and can meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job.sources.rendezvous import rendezvous
from dshealthd.findings.finding import State
from dshealthd.jobs.environment import is_loopback, natural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.manifest import PodTemplate
    from dshealthd.doctor.job.sources.source import Source

_MPI = ("mpirun", "mpiexec")


def _manifest(_context: JobContext, source: Source[tuple[PodTemplate, ...]]) -> Iterator[Result]:
    if source.value is None:
        yield unknown(f"{source.name}: {source.problem}", component=source.name)
        return
    pods = source.value
    found = [*(one for pod in pods for one in _pod(pod)), *_together(pods)]
    yield from found
    if not found:
        gpus = sum(pod.count * pod.gpus for pod in pods)
        count = plural(sum(pod.count for pod in pods), "pod")
        yield ok(f"{source.name}: {count} with {plural(gpus, 'GPU')}")


def _pod(pod: PodTemplate) -> Iterator[Result]:
    command = pod.command
    inner = (command.find("torchrun") or command.find("deepspeed")) if command else None
    is_image_alone = not pod.words or pod.words[0].startswith("-")
    text = pod.processes
    if inner is not None:
        text = inner.options.get("nproc-per-node", inner.options.get("num-gpus", text))
        default = "" if inner.is_partial or inner.program == "deepspeed" else "1"
        text = text or default
    elif not text and (is_image_alone or (command is not None and command.program == "python")):
        text = "1"  # as the operator starts the program, once in each pod
    processes = natural(text)
    where = f"{pod.kind} {pod.job}, {pod.name}"
    if pod.gpus and processes and processes != pod.gpus:
        has_more = processes > pod.gpus
        effect = (
            "ranks without a GPU fail with `invalid device ordinal`" if has_more else "idle GPUs"
        )
        yield Result(
            State.CRITICAL if has_more else State.WARNING,
            f"{where}: {plural(processes, 'process', 'processes')} in a pod with"
            f" {plural(pod.gpus, 'GPU')}: {effect}",
            value=str(processes),
            limit=str(pod.gpus),
            component=pod.name,
        )
    address = pod.variables.get("MASTER_ADDR", "")
    host, dot, _ = address.partition(".")
    if pod.kind == "JobSet" and dot and not host.startswith(f"{pod.job}-"):
        yield critical(
            f"{where}: MASTER_ADDR={address[:80]} is no pod of this JobSet, whose names begin with"
            f" {pod.job}-",
            value=address[:80],
            limit=f"{pod.job}-JOB-INDEX-INDEX.{pod.job}",
            component="MASTER_ADDR",
        )
    elif pod.count > 1 and command is not None:
        meeting = rendezvous(command, pod.variables)
        if is_loopback(meeting.address) and (inner is None or inner.number("nnodes") != 1):
            yield critical(
                f"{where}: {meeting.address} ({meeting.source}) is each pod's own loopback, but"
                f" there are {pod.count} of them",
                value=meeting.address,
                component="MASTER_ADDR",
            )


def _together(pods: tuple[PodTemplate, ...]) -> Iterator[Result]:
    """Yield where the pods of a job do not fit each other."""
    if without := [pod.name for pod in pods if pod.gpus > 1 and not pod.has_shared_memory]:
        yield warning(
            f"{pods[0].kind} {pods[0].job}, {', '.join(without)}: nothing is mounted at /dev/shm:"
            " it has the 64 MB of container runtimes: too few for NCCL between GPUs of a pod and"
            " for workers of data loaders",
            remedy="kubectl explain pod.spec.volumes.emptyDir  # medium: Memory, at /dev/shm",
            component=without[0],
        )
    workers = [pod for pod in pods if pod.gpus]
    count = sum(pod.count for pod in workers)
    for pod in pods:
        command = pod.command
        inner = command.find("torchrun") if command else None
        nodes = inner.number("nnodes") if inner else None
        if pod in workers and nodes is not None and nodes > 1 and nodes != count:
            yield critical(
                f"{pod.kind} {pod.job}: torchrun waits for {plural(nodes, 'node')}, but"
                f" {plural(count, 'pod has', 'pods have')} GPUs",
                value=str(nodes),
                limit=str(count),
                component=pod.name,
            )
            return
        slots = natural(pod.processes)
        wanted = _after(pod, "-np", "-n", "--np")
        if slots and wanted and wanted > slots * count:
            yield critical(
                f"{pod.kind} {pod.job}: mpirun -np {wanted}, but"
                f" {plural(count, 'worker has', 'workers have')} {slots * count} slots",
                value=str(wanted),
                limit=str(slots * count),
                source="slotsPerWorker",
                component=pod.name,
            )


def _after(pod: PodTemplate, *options: str) -> int | None:
    """Return the number after one of these options of mpirun; None if there is none."""
    words = [word for text in pod.words for word in text.split()]
    if not any(word.rpartition("/")[2] in _MPI for word in words):
        return None
    at = next((at for at, word in enumerate(words[:-1]) if word in options), None)
    return None if at is None else natural(words[at + 1])


MANIFEST = check_of(
    lambda job: job.manifest,
    "no manifest is given (FILE)",
    "device-ordinal",
    "manifest",
    "Pods have a process for each GPU, shared memory, and can meet",
    _manifest,
)
