"""The row of the dashboard *Jobs* about collectives.

NCCL's RAS reports on ranks, its Inspector on bandwidth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import job_link, series_link
from grafana.panels import GREEN, ORANGE, graph, number
from grafana.queries import ROWS, SERIES, worst
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

JOB = "cluster, training_job"
OPERATION = "cluster, training_job, operation, size, message"
LEGEND = "{{training_job}} {{operation}} {{size}} ranks {{message}}"


def panels() -> list[dashboard.Panel]:
    """Return the panels."""
    place = "cluster, training_job, rank, host, gpu"
    bandwidth = "dshealthd_job_nccl_bus_bandwidth_bytes_per_second{@jobs}"
    of_gpu = f"min by ({OPERATION}, node, uuid) ({bandwidth})"
    return [
        rows(
            "Ranks in trouble",
            f"""Ranks that RAS reports as dead, unresponsive or with an error, at most eight per job
            and {ROWS} in all. Host is an address on NCCL's bootstrap network.""",
            [
                Column(title="Job", label="training_job", link=job_link()),
                Column(title="Rank", label="rank", width=60),
                Column(title="Host", label="host"),
                Column(title="GPU", label="gpu", width=60),
                Column(title="Trouble", label="trouble"),
                Column(
                    title="",
                    expr=(
                        f"topk({ROWS}, max by ({place}, trouble) "
                        f"(dshealthd_job_nccl_rank_trouble_info{{@jobs}}))"
                    ),
                ),
            ],
            size=(8, 8),
        ),
        rows(
            "Ranks behind",
            f"""Number of operations by which a rank lags behind the others of a stalled
            communicator: at most {ROWS} ranks. The rank has not launched the operation in which the
            others wait.""",
            [
                Column(title="Job", label="training_job", link=job_link()),
                Column(title="Rank", label="rank", width=60),
                Column(title="Host", label="host"),
                Column(title="GPU", label="gpu", width=60),
                Column(title="Operation", label="operation"),
                Column(
                    title="Behind",
                    expr=(
                        f"topk({ROWS}, max by ({place}, operation) "
                        f"(dshealthd_job_nccl_rank_operations_behind{{@jobs}}))"
                    ),
                    width=80,
                ),
            ],
            sort=("Behind", True),
            size=(8, 8),
        ),
        rows(
            "RAS queries",
            f"""Result of the last query of each job's RAS. Only the node of rank 0 queries it. At
            most {ROWS} jobs; if elsewhere is the only state of a job, no agent can see its rank
            0.""",
            [
                Column(title="Job", label="training_job", link=job_link()),
                Column(title="State", label="state"),
                Column(
                    title="Nodes",
                    expr=(
                        f"topk({ROWS}, count by ({JOB}, state) "
                        f"(dshealthd_job_nccl_ras_state{{@jobs}} == 1))"
                    ),
                    width=80,
                ),
            ],
            size=(8, 8),
        ),
        graph(
            "Answers without progress",
            f"""RAS answers in a row in which no rank had launched anything since the previous one:
            the {SERIES} jobs with most. By itself this does not prove a hang.""",
            (
                worst(
                    f"max by ({JOB}) (dshealthd_job_nccl_answers_without_progress{{@jobs}})", JOB
                ),
                "{{training_job}}",
            ),
            unit="none",
        ),
        graph(
            "Bus bandwidth of a job's own operations",
            f"""Measured by NCCL's Inspector, if the job writes its files: the slowest GPU of each
            operation, communicator size and message size class; the {SERIES} lowest for messages of
            16 MiB and more. It includes waiting for late ranks.""",
            (
                worst(
                    f"min by ({OPERATION}) "
                    f"(dshealthd_job_nccl_bus_bandwidth_bytes_per_second{{@jobs,"
                    f'message=~"16MiB-.*|256MiB-"}})',
                    OPERATION,
                    lowest=True,
                ),
                LEGEND,
            ),
            unit="Bps",
        ),
        graph(
            "Bus bandwidth of GPUs against their job's median",
            f"The {SERIES} lowest ratios to the median of the job's GPUs in the same operation.",
            (
                worst(
                    f"{of_gpu} / on ({OPERATION}) group_left () quantile by ({OPERATION}) "
                    f"(0.5, {bandwidth})",
                    f"{OPERATION}, node, uuid",
                    lowest=True,
                ),
                "{{training_job}} {{node}} {{uuid}} {{operation}} {{message}}",
            ),
            unit="percentunit",
            link=series_link(),
        ),
        graph(
            "Time of a job's own operations",
            "The longest mean time of an operation on any GPU, by operation, communicator size and "
            f"message size class: the {SERIES} longest.",
            (
                worst(
                    f"max by ({OPERATION}) (dshealthd_job_nccl_operation_seconds{{@jobs}})",
                    OPERATION,
                ),
                LEGEND,
            ),
            unit="s",
        ),
        number(
            "Inspector files ignored",
            "Files of NCCL's Inspector that are too old, belong to another user, are not regular "
            "files or are too large.",
            'sum(dshealthd_nccl_inspector_files{@fleet,state!~"taken|elsewhere"})',
            steps=((None, GREEN), (1, ORANGE)),
            unknown="no GPUs",
        ),
    ]
