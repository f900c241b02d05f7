"""Heartbeats of training processes on this node, as samples.

Steps, step times, loss and memory of each rank, as the ranks themselves report them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, Fault, Sample, counter, gauge
from dshealthd.jobs.environment import launched_by
from dshealthd.jobs.heartbeats.reader import PERIOD
from dshealthd.jobs.own_work import SCALES, compare_ranks, level
from dshealthd.jobs.service import Jobs
from dshealthd.jobs.shares import MAX_RANKS, Claim, share_places
from dshealthd.training.message import Message, Phase, StepStage, WaitSource

if TYPE_CHECKING:
    from dshealthd.jobs.heartbeats.identity import Identity
    from dshealthd.jobs.heartbeats.sender import Sender

_RANK = ("training_job", "rank")
INFO = gauge(
    "dshealthd_job_info",
    "1; the job's launcher, as in dshealthd_job_run_info, and its world size (empty if unknown).",
    *("training_job", "launcher", "world_size"),
)
STEP = gauge(
    "dshealthd_job_step",
    "Optimizer steps of a rank so far, including skipped ones; ranks of this node only.",
    *_RANK,
)
STEP_SECONDS = gauge(
    "dshealthd_job_step_seconds",
    "Time from the end of one step to the end of the next on the rank's host, without marked "
    "pauses: moving average over ten steps.",
    *_RANK,
)
HEARD = gauge(
    "dshealthd_job_heartbeat_timestamp_seconds",
    "Unix time of a rank's last heartbeat.",
    *_RANK,
)
PHASE = gauge(
    "dshealthd_job_phase",
    "1 for the rank's current phase: training, or a marked pause (evaluation, checkpoint, compile, "
    "other).",
    *_RANK,
    "phase",
)
STAGE = gauge(
    "dshealthd_job_stage",
    "1 for the stage of the rank's step on its host, at the last heartbeat: input (the next "
    "forward pass has not begun), forward, or backward (gradients, collectives, optimizer). "
    "Absent if unknown. The GPU may lag behind the host.",
    *_RANK,
    "stage",
)
INPUT_SECONDS = gauge(
    "dshealthd_job_input_seconds",
    "Time that a step of the rank waits for its input: moving average over ten steps, without "
    "steps with a marked pause and without waits for other ranks. With CUDA, the wait of the "
    "device, and only between steps.",
    *_RANK,
)
WAIT_SECONDS = gauge(
    "dshealthd_job_step_wait_seconds",
    "Time of a step in which the rank waited for other ranks, in collectives, sends and "
    "receives: mean over about 30 s. Absent if no wait is seen. role is empty, or the stage of "
    "a pipeline, which is the place in the group in which ranks send to each other; source is "
    "the clock: host, or device (CUDA events).",
    *_RANK,
    *("role", "source"),
)
WORK_SECONDS = gauge(
    "dshealthd_job_step_work_seconds",
    "The rest of the step: the rank's own work. Compare only ranks of the same role.",
    *WAIT_SECONDS.dimensions,
)
NODE_WORK_SECONDS = gauge(
    "dshealthd_job_node_work_seconds",
    "Own work per step (dshealthd_job_step_work_seconds) of this node's ranks of one role: "
    'of="slow" is exceeded by the slowest rank in six of eight windows; of="usual" is the '
    "median rank. over is the length of a window, or pauses (work and pauses, in 5m windows). "
    "Absent while no steps are made.",
    *("training_job", "role", "over", "of"),
)
NODE_VARIANCE = gauge(
    "dshealthd_job_node_work_variance",
    "Variance of the logarithm of dshealthd_job_node_work_seconds: between ranks (between), and "
    "of one rank's mean over its windows (within).",
    *("training_job", "role", "over", "of"),
)
SLOWEST = gauge(
    "dshealthd_job_node_slowest_rank",
    "Rank of this node that stands out most in dshealthd_job_node_work_seconds; the value is "
    "its rank number.",
    *("training_job", "role"),
)
NODE_RANKS = gauge(
    "dshealthd_job_node_role_ranks",
    "Ranks of this node that dshealthd_job_node_work_seconds compares.",
    *("training_job", "role"),
)
NODE_STEP_SECONDS = gauge(
    "dshealthd_job_node_step_seconds",
    "Mean step of the slowest rank in dshealthd_job_node_work_seconds, over its longest windows.",
    *("training_job", "role"),
)
NODE_HEARD = gauge(
    "dshealthd_job_node_heartbeat_timestamp_seconds",
    "Unix time of the last heartbeat of any rank of the job on this node.",
    "training_job",
)
LOSS_FINITE = gauge(
    "dshealthd_job_loss_finite",
    "1 if the rank's last known loss is finite, 0 if it is NaN or infinite.",
    *_RANK,
)
FINITE_STEP = gauge(
    "dshealthd_job_finite_loss_step",
    "Last step of the rank whose loss is known to be finite; 0 if none is.",
    *_RANK,
)
NONFINITE_STEP = gauge(
    "dshealthd_job_nonfinite_loss_step",
    "First step since then whose loss is known to be NaN or infinite; only while the last one is.",
    *_RANK,
)
SKIPPED = counter(
    "dshealthd_job_skipped_steps_total",
    "Steps that the rank skipped because its gradients overflowed.",
    *_RANK,
)
LOSS_SCALE = gauge(
    "dshealthd_job_loss_scale", "Loss scale of mixed precision.", "training_job", "rank"
)
NORM = gauge(
    "dshealthd_job_gradient_norm", "Norm of the gradients, if the training job computes it.", *_RANK
)
MEMORY = gauge(
    "dshealthd_job_memory_bytes",
    "Memory of the rank's CUDA device as counted by torch: used by tensors (allocated), held by "
    "its allocator (reserved), maximum so far (peak).",
    *_RANK,
    "type",
)
COMMUNICATION = counter(
    "dshealthd_job_communication_seconds_total",
    "Time in collectives, if DeepSpeed's comms logger measures it.",
    *_RANK,
)
REJECTED = counter(
    "dshealthd_heartbeats_rejected_total",
    "Pages of training processes without a valid heartbeat.",
)
UNIDENTIFIED = gauge(
    "dshealthd_heartbeat_processes_unidentified",
    "Processes with a heartbeat page and no series, by reason: they could not be identified, or "
    "began with a release of dshealthd whose heartbeats the agent cannot read (older_layout). "
    "dshealthd_processes_unseen counts processes that could not be searched for a page.",
    "reason",
)
LEFT_OUT = gauge(
    "dshealthd_heartbeat_ranks_left_out",
    "Ranks without series because there are more than 64.",
)


class Training(Collector):
    """Exports the heartbeats that the agent has read.

    If several processes report as one rank, the one that started last is shown: older ones are left
    over from an earlier run. Their children (data loaders inherit a rank's environment) do not
    count.
    """

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the last heartbeat of each rank."""
        jobs = self.context.service(Jobs, "heartbeats are read only while an agent runs")
        reader = jobs.heartbeats()
        yield REJECTED(reader.rejected)
        for reason, count in reader.unidentified.items():
            yield UNIDENTIFIED(count, reason)
        ranks = reader.ranks()
        yield LEFT_OUT(max(0, len(ranks) - MAX_RANKS))
        infos = set()
        heard: dict[str, float] = {}
        roles: dict[tuple[str, str], dict[int, Sender]] = {}
        for (job, rank), senders in share_places(ranks.items(), MAX_RANKS, _claim):
            who, sender = senders[-1]
            place = who.process.launch
            size = "" if place.world_size is None else str(place.world_size)
            infos.add((job, launched_by(who.process.environment, place), size))
            if sender.message is not None:
                message = sender.message
                yield from samples(message, sender.heard, job, str(rank))
                yield from work_and_wait(sender, job, str(rank))
                heard[job] = max(sender.heard, heard.get(job, 0.0))
                if message.work_seconds is not None:
                    roles.setdefault((job, role(message)), {})[rank] = sender
        for labels in infos:
            yield INFO(1, *labels)
        for job, at in heard.items():
            yield NODE_HEARD(at, job)
        for of, of_role in roles.items():
            yield from work(of_role, *of)


def _claim(entry: tuple[tuple[str, int], list[tuple[Identity, Sender]]]) -> Claim:
    (job, _), ((who, _), *_) = entry
    return who.process.user, job, who.process.start


def samples(message: Message, heard: float, job: str, rank: str) -> Iterator[Sample]:
    """Yield the known values of one heartbeat message."""
    yield STEP(message.step, job, rank)
    yield HEARD(heard, job, rank)
    yield PHASE(1, job, rank, Phase(message.phase).name.lower())
    if message.stage != StepStage.UNKNOWN:
        yield STAGE(1, job, rank, StepStage(message.stage).name.lower())
    if message.loss_finite is not None:
        yield LOSS_FINITE(float(message.loss_finite), job, rank)
        yield FINITE_STEP(message.finite_step, job, rank)
        if not message.loss_finite:
            yield NONFINITE_STEP(message.nonfinite_step, job, rank)
    for metric, value in (
        (STEP_SECONDS, message.mean_seconds),
        (INPUT_SECONDS, message.input_seconds),
        (SKIPPED, message.skipped),
        (LOSS_SCALE, message.loss_scale),
        (NORM, message.gradient_norm),
        (COMMUNICATION, message.communication_seconds),
    ):
        if value is not None:
            yield metric(value, job, rank)
    if message.memory is not None:
        for kind, size in message.memory._asdict().items():
            yield MEMORY(size, job, rank, kind)


def work_and_wait(sender: Sender, job: str, rank: str) -> Iterator[Sample]:
    """Yield own work and wait of a rank's step, which add up to it."""
    message = sender.message
    if message is None or message.mean_seconds is None:
        return
    found = sender.course.shares(level("30s", message.mean_seconds))
    if found is None and message.work_seconds is not None and message.wait_seconds is not None:
        found = message.work_seconds, message.wait_seconds  # of a training that has just begun
    if found is not None:
        labels = job, rank, role(message), WaitSource(message.wait_source).name.lower()
        yield WORK_SECONDS(found[0], *labels)
        yield WAIT_SECONDS(found[1], *labels)


def work(senders: Mapping[int, Sender], job: str, role: str) -> Iterator[Sample]:
    """Yield what rules compare between nodes: few series, however many ranks of a role there
    are.
    """
    known = [sender.message.mean_seconds for sender in senders.values() if sender.message]
    steps = [seconds for seconds in known if seconds is not None]
    if not steps:
        return
    step, now = statistics.median(steps), max(sender.looked for sender in senders.values())
    courses = {rank: sender.course for rank, sender in senders.items()}
    whole, standing = None, []
    for over in SCALES:
        size = level(over, step)
        # A rank that makes no steps has no speed: in a hung job nobody is slow.
        found = compare_ranks(courses, over, size, now - 2 * (step * 2**size + PERIOD))
        if found is None:
            continue
        yield NODE_WORK_SECONDS(found.slow, job, role, over, "slow")
        yield NODE_WORK_SECONDS(found.usual, job, role, over, "usual")
        yield NODE_VARIANCE(found.between, job, role, over, "between")
        yield NODE_VARIANCE(found.within, job, role, over, "within")
        whole = courses[found.rank].shares(size)
        standing.append((found.distance, found.rank))
    if whole is not None:
        yield NODE_STEP_SECONDS(sum(whole), job, role)
        yield SLOWEST(max(standing)[1], job, role)
    yield NODE_RANKS(len(senders), job, role)


def role(message: Message) -> str:
    """Return what a rank does beside others: only ranks of one role do the same work."""
    return "" if message.pipeline_stage is None else f"stage {message.pipeline_stage}"
