"""The row of the dashboard *Jobs* about collectives.

What NCCL's RAS tells of ranks, and its Inspector of bandwidth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import job_link, series_link
from grafana.panels import GREEN, ORANGE, graph, number
from grafana.queries import ROWS, SERIES, worst
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

JOB = "cluster, exported_job"
OPERATION = "cluster, exported_job, operation, size, message"
LEGEND = "{{exported_job}} {{operation}} {{size}} ranks {{message}}"


def panels() -> list[dashboard.Panel]:
    """Return the panels."""
    place = "cluster, exported_job, rank, host, gpu"
    bandwidth = "dshealthd_job_nccl_bus_bandwidth_bytes_per_second{@jobs}"
    of_gpu = f"min by ({OPERATION}, node, uuid) ({bandwidth})"
    return [
        rows(
            "Ranks in trouble",
            f"""Ranks that RAS calls dead or unresponsive, or that have an error, at most eight a job and {ROWS} in all. Host is an address
            on NCCL's bootstrap network.""",
            [
                Column(title="Job", label="exported_job", link=job_link()),
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
            f"""By how many operations a rank is behind the others of a communicator without progress: at most {ROWS}. It has not launched
            what they wait in.""",
            [
                Column(title="Job", label="exported_job", link=job_link()),
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
            "What RAS answers",
            f"""What became of the last query of each job's RAS: one node asks, that of rank 0. At most {ROWS} jobs; one that says
            elsewhere alone has no rank 0 that an agent can see.""",
            [
                Column(title="Job", label="exported_job", link=job_link()),
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
            f"""Answers of RAS in a row in which no rank had launched anything since the previous one: the {SERIES} jobs with most. Alone it
            proves no hang.""",
            (
                worst(
                    f"max by ({JOB}) (dshealthd_job_nccl_answers_without_progress{{@jobs}})", JOB
                ),
                "{{exported_job}}",
            ),
            unit="none",
        ),
        graph(
            "Bus bandwidth of a job's own operations",
            f"""As NCCL's Inspector measures it, where the job writes its files: the slowest GPU of each operation, size of communicator
            and class of messages; the {SERIES} lowest of messages of 16 MiB and more. It includes waiting for late ranks.""",
            (
                worst(
                    f"min by ({OPERATION}) "
                    f'(dshealthd_job_nccl_bus_bandwidth_bytes_per_second{{@jobs,message=~"16MiB-.*|256MiB-"}})',
                    OPERATION,
                    lowest=True,
                ),
                LEGEND,
            ),
            unit="Bps",
        ),
        graph(
            "Bus bandwidth of GPUs against their job's median",
            f"The {SERIES} lowest, each against the median of the job's GPUs in the same "
            "operation.",
            (
                worst(
                    f"{of_gpu} / on ({OPERATION}) group_left () quantile by ({OPERATION}) "
                    f"(0.5, {bandwidth})",
                    f"{OPERATION}, node, uuid",
                    lowest=True,
                ),
                "{{exported_job}} {{node}} {{uuid}} {{operation}} {{message}}",
            ),
            unit="percentunit",
            link=series_link(),
        ),
        graph(
            "Time of a job's own operations",
            "The longest mean time of an operation on a GPU, by operation, size of "
            f"communicator and class of messages: {SERIES}.",
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
            "Inspector files not taken",
            "Files of NCCL's Inspector that are too old, or are left alone: of another user, "
            "no plain file, too large.",
            'sum(dshealthd_nccl_inspector_files{@fleet,state!~"taken|elsewhere"})',
            steps=((None, GREEN), (1, ORANGE)),
            unknown="no GPUs",
        ),
    ]
