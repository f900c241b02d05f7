"""The series of a training job on a node of the fleet in `fleet.py`.

Its ranks there, and what becomes of them on a sick node.
"""

from __future__ import annotations

from typing import NamedTuple

JOBS = 100
"""Jobs of the fleet; a node has ranks of one."""
RANKS = 8
"""Ranks of a job on a node."""


class Series(NamedTuple):
    """A series of one node; its value while the node is well, and what it has become then."""

    name: str
    labels: dict[str, str]
    before: float
    after: float


def series(node: int, *, sick: bool) -> list[Series]:
    """Return the series of the job on a node. On a sick one a rank is stopped, and the loss of
    others is NaN.
    """
    job = f"slurm-{node % JOBS}"
    run = {"training_job": job, "run": f"{node % JOBS:012x}"}
    operation = {"operation": "AllReduce", "size": "16", "nodes": "2", "message": "256MiB-"}
    found = [
        _steady("job_info", 1, training_job=job, launcher="torch", world_size="16"),
        _steady("job_run_info", 1, **run, launcher="torchrun"),
        _steady("job_world_size", 16, **run),
        _steady("job_master_port", 29500, **run),
        _steady("job_ranks", RANKS, **run),
        _steady("job_followed_ranks", RANKS, training_job=job, by="heartbeat"),
        _steady("job_orphaned_ranks", 0, **run),
        _steady("job_attempts", 2, training_job=job),
        _steady("job_time_seconds", 8e4, training_job=job, spent="work"),
        _steady("job_time_seconds", 3e3, training_job=job, spent="wait"),
        _steady("job_runs_left_out", 0),
        _steady("heartbeat_ranks_left_out", 0),
        _steady("job_nccl_ras_state", 1, training_job=job, state="answered"),
        _steady("job_nccl_answers_without_progress", 3 * sick, training_job=job),
        _steady(
            "job_hang", float(sick), training_job=job, **{"class": "process" if sick else "none"}
        ),
        _steady("nccl_inspector_files", 1, state="stale"),
        _steady("job_node_role_ranks", RANKS, training_job=job, role=""),
        _steady("job_node_slowest_rank", RANKS * node, training_job=job, role="", over="30s"),
        *(
            _steady(f"job_node_work_{name}", value, training_job=job, role="", over="30s", of=of)
            for name, of, value in (
                ("seconds", "usual", 0.7 + 0.1 * sick),
                ("seconds", "slow", 0.7 + 0.1 * sick),
                ("variance", "between", 1e-4),
                ("variance", "within", 4e-6),
            )
        ),
    ]
    for number in range(RANKS):
        rank = {"training_job": job, "rank": str(RANKS * node + number)}
        found += [
            _steady("job_step", 4000, **rank),
            _steady("job_step_seconds", 0.8 + 0.01 * number, **rank),
            _steady("job_heartbeat_timestamp_seconds", 1.7e9, **rank),
            _steady("job_phase", 1, **rank, phase="training"),
            _steady("job_stage", 1, **rank, stage="backward"),
            _steady("job_input_seconds", 0.01, **rank),
            _steady("job_step_work_seconds", 0.3, **rank),
            _steady("job_step_wait_seconds", 0.1, **rank, role="", source="host"),
            _steady("job_step_work_seconds", 0.7 + 0.1 * sick, **rank, role="", source="host"),
            _steady("job_loss_finite", float(not (sick and number)), **rank),
            _steady("job_finite_loss_step", 3990, **rank),
            *([_steady("job_nonfinite_loss_step", 3991, **rank)] if sick and number else []),
            _steady("job_skipped_steps_total", 5, **rank),
            _steady("job_loss_scale", 65536, **rank),
            _steady("job_gradient_norm", 1.5, **rank),
            _steady("job_memory_bytes", 60e9, **rank, type="reserved"),
            _steady("job_overdue_seconds", 40.0 * sick, **rank),
            _steady(
                "job_nccl_bus_bandwidth_bytes_per_second",
                350e9,
                training_job=job,
                uuid=f"GPU-{number}",
                **operation,
            ),
            _steady(
                "job_nccl_operation_seconds",
                0.004,
                training_job=job,
                uuid=f"GPU-{number}",
                **operation,
            ),
        ]
    return found + (_sick(job, str(RANKS * node + 1)) if sick else [])


def _sick(job: str, rank: str) -> list[Series]:
    """Return what a job has only where something is wrong with it."""
    place = {"training_job": job, "rank": rank, "host": "10.0.0.2", "gpu": "1"}
    return [
        _steady(
            "job_hang_culprit_info",
            1,
            training_job=job,
            rank=rank,
            **{"class": "process"},
            reason="stopped",
        ),
        _steady(
            "job_rank_ended_timestamp_seconds", 1.7e9, training_job=job, rank=rank, how="killed"
        ),
        _steady(
            "job_environment_problems",
            2,
            training_job=job,
            run="0",
            rank=rank,
            variable="NCCL_ALGO",
            problem="differs",
        ),
        _steady("job_gpus_waiting", 1, training_job=job),
        _steady(
            "finding",
            1,
            finding="JobFailed",
            symptom="child-failed",
            component="job",
            part=job,
            reason="was killed (SIGKILL)",
            severity="warning",
            training_job=job,
        ),
        _steady("job_nccl_rank_trouble_info", 1, **place, trouble="unresponsive"),
        _steady("job_nccl_rank_operations_behind", 1, **place, operation="AllReduce"),
    ]


def _steady(name: str, value: float, **labels: str) -> Series:
    return Series(f"dshealthd_{name}", labels, value, value)
