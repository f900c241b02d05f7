"""The row of the dashboard *Jobs* about collectives.

NCCL's RAS reports on ranks, its Inspector on bandwidth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import GREEN, ORANGE, graph, number
from grafana.queries import ROWS, SERIES, most, worst, worst_line, worst_of
from grafana.tables import JOB_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

JOB = "cluster, training_job"
OPERATION = "cluster, training_job, operation, size, message"
LARGE = '@jobs,message=~"16MiB-.*|256MiB-"'
LEGEND = "{{training_job}} {{operation}} {{size}} ranks {{message}}"


def panels() -> list[dashboard.Panel]:
    """Return the panels about the collectives of training jobs."""
    place = "cluster, training_job, rank, host, gpu"
    bandwidth = "dshealthd_job_nccl_bus_bandwidth_bytes_per_second{@jobs}"
    of_gpu = f"min by ({OPERATION}, node, uuid) ({bandwidth})"
    return [
        rows(
            "Ranks in trouble",
            f"""Ranks that RAS reports as dead, unresponsive or with an error, at most eight per job
            and {ROWS} in all. Host is an address on NCCL's bootstrap network.""",
            [
                JOB_COLUMN,
                Column("Rank", "rank", width=60),
                Column("Host", "host"),
                Column("GPU", "gpu", width=60),
                Column("Trouble", "trouble"),
                Column(
                    expr=most(
                        "max", f"{place}, trouble", "dshealthd_job_nccl_rank_trouble_info{@jobs}"
                    )
                ),
            ],
        ),
        rows(
            "Ranks behind",
            f"""Number of operations by which a rank lags behind the others of a stalled
            communicator: at most {ROWS} ranks. The rank has not launched the operation in which the
            others wait.""",
            [
                JOB_COLUMN,
                Column("Rank", "rank", width=60),
                Column("Host", "host"),
                Column("GPU", "gpu", width=60),
                Column("Operation", "operation"),
                Column(
                    "Behind",
                    expr=most(
                        "max",
                        f"{place}, operation",
                        "dshealthd_job_nccl_rank_operations_behind{@jobs}",
                    ),
                    width=80,
                ),
            ],
            sort=("Behind", True),
        ),
        rows(
            "RAS queries",
            f"""Result of the last query of each job's RAS. Only the node of rank 0 queries it. At
            most {ROWS} jobs; if elsewhere is the only state of a job, no agent can see its rank
            0.""",
            [
                JOB_COLUMN,
                Column("State", "state"),
                Column(
                    "Nodes",
                    expr=most("count", f"{JOB}, state", "dshealthd_job_nccl_ras_state{@jobs} == 1"),
                    width=80,
                ),
            ],
        ),
        graph(
            "Answers without progress",
            f"""RAS answers in a row in which no rank had launched anything since the previous one:
            the {SERIES} jobs with most. By itself this does not prove a hang.""",
            worst_line("max", JOB, "dshealthd_job_nccl_answers_without_progress{@jobs}"),
        ),
        graph(
            "Bus bandwidth of a job's own operations",
            f"""Measured by NCCL's Inspector, if the job writes its files: the slowest GPU of each
            operation, communicator size and message size class; the {SERIES} lowest for messages of
            16 MiB and more. It includes waiting for late ranks.""",
            (
                worst(
                    "min",
                    OPERATION,
                    f"dshealthd_job_nccl_bus_bandwidth_bytes_per_second{{{LARGE}}}",
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
                worst_of(
                    f"""{of_gpu} / on ({OPERATION}) group_left () quantile by ({OPERATION}) (0.5,
                    {bandwidth})""",
                    f"{OPERATION}, node, uuid",
                    lowest=True,
                ),
                "{{training_job}} {{node}} {{uuid}} {{operation}} {{message}}",
            ),
            unit="percentunit",
        ),
        graph(
            "Time of a job's own operations",
            f"""The longest mean time of an operation on any GPU, by operation, communicator size
            and message size class: the {SERIES} longest.""",
            (worst("max", OPERATION, "dshealthd_job_nccl_operation_seconds{@jobs}"), LEGEND),
            unit="s",
        ),
        number(
            "Inspector files ignored",
            """Files of NCCL's Inspector that are too old, belong to another user, are not regular
            files or are too large.""",
            'sum(dshealthd_nccl_inspector_files{@fleet,state!~"taken|elsewhere"})',
            steps=((None, GREEN), (1, ORANGE)),
        ),
    ]
