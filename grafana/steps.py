"""The rows of the dashboard *Jobs* about steps.

They show ranks' progress and speed, what ranks wait for, their loss and their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import job_link, node_link, series_link
from grafana.panels import GREEN, ORANGE, RED, graph
from grafana.queries import ROWS, SERIES, worst
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.board import Source

JOB = "cluster, training_job"
NODE = "cluster, training_job, node, role"
RANK = "cluster, training_job, node, rank"
LEGEND = "{{training_job}} {{rank}} {{node}}"


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels about time."""
    seconds = f"max by ({RANK}) (dshealthd_job_step_seconds{{@jobs}})"
    ratio = (
        f"{seconds} / on ({JOB}) group_left () quantile by ({JOB}) (0.5, "
        f"dshealthd_job_step_seconds{{@jobs}})"
    )
    rate = f"max by ({JOB}) (60 * rate(dshealthd_job_step{{@jobs}}[$__rate_interval]))"
    waiting = f"""max by ({RANK}) (dshealthd_job_step_wait_seconds{{@jobs}})
        / max by ({RANK}) (dshealthd_job_step_wait_seconds{{@jobs}} +
        dshealthd_job_step_work_seconds{{@jobs}})"""
    spent = "dshealthd_job_time_seconds{@jobs}"
    limits = source.limits
    return [
        graph(
            "Steps per minute",
            f"Rate of each job's fastest rank: the {SERIES} slowest jobs. 0 while a job is hung, "
            "evaluates or saves.",
            (worst(rate, JOB, lowest=True), "{{training_job}}"),
            unit="none",
        ),
        graph(
            "Step time of jobs",
            "Time from the end of a step to the end of the next: the median of a job's ranks, for "
            f"the {SERIES} slowest jobs.",
            (
                worst(f"quantile by ({JOB}) (0.5, dshealthd_job_step_seconds{{@jobs}})", JOB),
                "{{training_job}}",
            ),
            unit="s",
        ),
        graph(
            "Step time of ranks against their job's median",
            f"""The {SERIES} ranks that differ most. Ranks of one job wait for one another, so their
            step times are alike whichever is slow; a rank that differs is in a group of its
            own.""",
            (worst(ratio, RANK, f"abs({ratio} - 1)"), LEGEND),
            unit="none",
            minimum=None,
            link=series_link(),
        ),
        graph(
            "Own work against the peers",
            f"""Of the slowest rank of each node: its step without its wait for other ranks, against
            ranks of its role. The {SERIES} slowest, and from which ratio on a rank is slow, which
            depends on how much those of its job differ.""",
            (
                worst(f"max by ({NODE}) (dshealthd:job:work_ratio{{@of_jobs}})", NODE),
                "{{training_job}} {{node}} {{role}}",
            ),
            (
                worst(f"min by ({JOB}) (dshealthd:job:work_ratio:limit{{@of_jobs}})", JOB),
                "{{training_job}} limit",
            ),
            unit="none",
            minimum=None,
            link=series_link(),
        ),
        graph(
            "Waiting for other ranks",
            f"""Share of its step that a rank waits for others, in collectives, sends and receives:
            the {SERIES} that wait least. The others wait for one that hardly waits.""",
            (worst(waiting, RANK, lowest=True), LEGEND),
            unit="percentunit",
            link=series_link(),
        ),
        graph(
            "Waiting for input",
            "Share of its step time that a rank spends before its next forward pass, on data or "
            f"logging: the {SERIES} highest. Dashed: the alert's threshold.",
            (
                worst(
                    (
                        f"max by ({RANK}) (dshealthd_job_input_seconds{{@jobs}} / "
                        f"dshealthd_job_step_seconds{{@jobs}})"
                    ),
                    RANK,
                ),
                LEGEND,
            ),
            unit="percentunit",
            steps=((None, GREEN), (limits["input_ratio"], ORANGE)),
            link=series_link(),
        ),
        graph(
            "Where the time of ranks went",
            """Shares of the time of all ranks since their start: own work, waiting for others,
            input, marked pauses, hangs, starts and restarts, steps made again, and what
            was not measured.""",
            (f"sum by (spent) ({spent}) / on () group_left () sum({spent})", "{{spent}}"),
            unit="percentunit",
            stacked=True,
            maximum=1,
        ),
        graph(
            "Ranks at different steps",
            f"Steps between the first and the last rank of a job: the {SERIES} jobs with most.",
            (
                worst(
                    f"max by ({JOB}) (dshealthd_job_step{{@jobs}}) - min by ({JOB}) "
                    f"(dshealthd_job_step{{@jobs}})",
                    JOB,
                ),
                "{{training_job}}",
            ),
            unit="none",
        ),
    ]


def health() -> list[dashboard.Panel]:
    """Return the panels about loss and memory."""
    reserved = 'dshealthd_job_memory_bytes{@jobs,type="reserved"}'
    return [
        rows(
            "Ranks with NaN or infinite loss",
            (
                "Ranks whose last known loss is NaN or infinite, and the number of such losses: at "
                f"most {ROWS}."
            ),
            [
                Column(title="Job", label="training_job", link=job_link()),
                Column(title="Node", label="node", link=node_link()),
                Column(title="Rank", label="rank", width=60),
                Column(
                    title="Losses",
                    expr=f"""topk({ROWS}, max by ({RANK})
                        (dshealthd_job_nonfinite_losses_total{{@jobs}}) and on ({RANK})
                        dshealthd_job_loss_finite{{@jobs}} == 0)""",
                    steps=((1, RED),),
                ),
            ],
            size=(8, 8),
        ),
        graph(
            "Loss scale",
            f"Loss scale of mixed precision: the lowest of a job's ranks, for the {SERIES} jobs "
            "with the lowest. It falls with each overflow.",
            (
                worst(f"min by ({JOB}) (dshealthd_job_loss_scale{{@jobs}})", JOB, lowest=True),
                "{{training_job}}",
            ),
            unit="none",
            minimum=None,
        ),
        graph(
            "Skipped steps",
            f"Steps per minute that were skipped because gradients overflowed: the {SERIES} "
            "jobs with most.",
            (
                worst(
                    f"max by ({JOB}) (60 * "
                    f"rate(dshealthd_job_skipped_steps_total{{@jobs}}[$__rate_interval]))",
                    JOB,
                ),
                "{{training_job}}",
            ),
            unit="none",
        ),
        graph(
            "Gradient norm",
            f"The highest of a job's ranks, if the training computes it: the {SERIES} jobs "
            "with the highest.",
            (
                worst(f"max by ({JOB}) (dshealthd_job_gradient_norm{{@jobs}})", JOB),
                "{{training_job}}",
            ),
            unit="none",
        ),
        graph(
            "Memory of ranks",
            f"GPU memory reserved by torch's allocator: the {SERIES} ranks with most. "
            "Tensors use a part of it.",
            (worst(f"max by ({RANK}) ({reserved})", RANK), LEGEND),
            unit="bytes",
            link=series_link(),
        ),
        graph(
            "Memory of ranks against their job's median",
            f"The {SERIES} ranks that reserve the most in comparison: a sign of unevenly split "
            "layers or batches, or of a leak.",
            (
                worst(
                    f"max by ({RANK}) ({reserved}) / on ({JOB}) group_left () quantile by "
                    f"({JOB}) (0.5, {reserved})",
                    RANK,
                ),
                LEGEND,
            ),
            unit="none",
            link=series_link(),
        ),
    ]
