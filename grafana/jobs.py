"""The dashboard *Jobs*: which training jobs run, which are hung or slow, and which rank causes
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import alerts, collectives, hangs, steps
from grafana.board import Board, Row, Source, choice, cluster, data_source
from grafana.panels import GREEN, ORANGE, RED, number
from grafana.queries import ROWS, most
from grafana.tables import JOB_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.panels import Steps

NO_JOBS = "no jobs"
JOB = "cluster, training_job"
ALERTS = ('@alerts,training_job=~"$training"',)
"""The alerts of a job: what Prometheus judges, and what nodes find."""
ANY: Steps = ((None, GREEN), (1, RED))


def board(source: Source) -> Board:
    """Return the dashboard *Jobs*."""
    return Board(
        uid="dshealthd-jobs",
        title="dshealthd / Jobs",
        description="Training jobs: what runs, what is hung, and which rank the others wait for.",
        variables=[
            data_source(),
            cluster(),
            choice(
                "training",
                "Training job",
                "label_values({__name__=~'dshealthd_job_(run_)?info',@fleet}, training_job)",
                description="The job's name, the same on all its nodes: the scheduler's number, or "
                "a digest of where its ranks meet.",
                several=True,
                everything=".+",
            ),
        ],
        rows=[
            Row(title="Which jobs need me now", panels=_now(source)),
            Row(title="What is hung, and why", panels=hangs.panels()),
            Row(title="Steps", panels=steps.panels(source)),
            Row(title="Loss and memory", panels=steps.health()),
            Row(title="Collectives", panels=collectives.panels(), closed=True),
            Row(title="Environment", panels=_environment(), closed=True),
        ],
        alerts=ALERTS,
    )


def _now(source: Source) -> list[dashboard.Panel]:
    heard = f"count by ({JOB}) (dshealthd_job_step{{@jobs}})"
    shown = f"and on ({JOB}) topk({ROWS}, {heard})"
    times = "dshealthd_job_step_seconds{@jobs}"
    return [
        number(
            "Jobs",
            "Training jobs with ranks on any node, whether or not they send heartbeats.",
            f"""count(count by ({JOB}) (dshealthd_job_run_info{{@jobs}} or
            dshealthd_job_info{{@jobs}}))""",
            unknown=NO_JOBS,
        ),
        number(
            "Jobs hung",
            """Jobs in which every rank has been silent for longer than usual. “no rules”:
            Prometheus evaluates no rules.""",
            f"count(dshealthd:job:hang{{@of_jobs}}) or 0 * {alerts.RULES_LOADED}",
            steps=ANY,
            unknown="no rules",
        ),
        number(
            "Ranks followed",
            """Share of the ranks that send heartbeats; of a job with processes on GPUs, of the
            ranks that have one.""",
            """sum(dshealthd_job_followed_ranks{@jobs,by="heartbeat"}) /
            sum(dshealthd_job_followed_ranks{@jobs})""",
            unit="percentunit",
            unknown=NO_JOBS,
        ),
        number(
            "Ranks overdue",
            """Ranks that have been silent for longer than is usual for them. A rank whose usual
            silence is not known yet is not counted.""",
            "sum(dshealthd_job_overdue_seconds{@jobs} > bool 0)",
            steps=((None, GREEN), (1, ORANGE)),
            unknown="unknown",
        ),
        number(
            "Ranks with non-finite loss",
            """Ranks whose last known loss is NaN or infinite; ranks without a known loss are not
            counted.""",
            "count(dshealthd_job_loss_finite{@jobs}) - sum(dshealthd_job_loss_finite{@jobs})",
            steps=ANY,
            unknown="unknown",
        ),
        number(
            "Ranks left out",
            "Ranks and runs that nodes do not export because they exceed the collectors' limits.",
            """(sum(dshealthd_heartbeat_ranks_left_out{@fleet}) or vector(0)) +
            sum(dshealthd_job_runs_left_out{@fleet})""",
            steps=((None, GREEN), (1, ORANGE)),
            unknown="unknown",
        ),
        alerts.firing(source, *ALERTS, title="Firing alerts of jobs", size=(12, 10)),
        rows(
            "Jobs that send heartbeats",
            f"""Ranks, nodes and step of each job, and the longest silence of a rank; the {ROWS}
            jobs with the most ranks. “Median” is the median of the ranks' step times, “Slowest” the
            longest.""",
            [
                JOB_COLUMN,
                Column("Ranks", expr=f"{heard} {shown}", width=70),
                Column(
                    "Nodes",
                    expr=f"""count by ({JOB}) (count by ({JOB}, node) (dshealthd_job_step{{@jobs}}))
                    {shown}""",
                    width=70,
                ),
                Column("Step", expr=f"min by ({JOB}) (dshealthd_job_step{{@jobs}}) {shown}"),
                Column("Median", expr=f"quantile by ({JOB}) (0.5, {times}) {shown}", unit="s"),
                Column("Slowest", expr=f"max by ({JOB}) ({times}) {shown}", unit="s"),
                Column(
                    "Silent for",
                    expr=f"""time() - min by ({JOB})
                    (dshealthd_job_heartbeat_timestamp_seconds{{@jobs}}) {shown}""",
                    unit="s",
                ),
            ],
            sort=("Silent for", True),
            unknown="unknown",
            size=(12, 10),
        ),
    ]


def _environment() -> list[dashboard.Panel]:
    run = "cluster, training_job, run"
    largest = most("sum", run, "dshealthd_job_ranks{@jobs}")
    return [
        rows(
            "Environment problems",
            f"""Ranks' variables that name something missing, are out of range or differ between
            ranks; the number of affected ranks on the node, and the lowest of them. At most
            {ROWS}.""",
            [
                JOB_COLUMN,
                Column("Node", "node"),
                Column("Lowest rank", "rank", width=90),
                Column("Variable", "variable"),
                Column("Problem", "problem"),
                Column(
                    "Ranks",
                    expr=most(
                        "max",
                        "cluster, training_job, node, rank, variable, problem",
                        "dshealthd_job_environment_problems{@jobs}",
                    ),
                    width=70,
                ),
            ],
            size=(12, 8),
        ),
        rows(
            "Runs",
            f"""Ranks on all nodes that agree on their meeting point and world size; the world size;
            orphaned ranks, whose starting process is gone. At most {ROWS}.""",
            [
                JOB_COLUMN,
                Column("Run", "run"),
                Column("Ranks", expr=largest, width=80),
                Column(
                    "Of",
                    expr=f"""max by ({run}) (dshealthd_job_world_size{{@jobs}}) and on ({run})
                    {largest}""",
                    width=80,
                ),
                Column(
                    "Port",
                    expr=f"""max by ({run}) (dshealthd_job_master_port{{@jobs}}) and on ({run})
                    {largest}""",
                    width=80,
                ),
                Column(
                    "Orphaned",
                    expr=f"""sum by ({run}) (dshealthd_job_orphaned_ranks{{@jobs}}) and on ({run})
                    {largest}""",
                    steps=((None, GREEN), (1, ORANGE)),
                    width=90,
                ),
            ],
            sort=("Ranks", True),
            unknown="unknown",
            size=(12, 8),
        ),
    ]
