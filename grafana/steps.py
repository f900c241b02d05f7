"""The rows of the dashboard *Jobs* about steps.

They show ranks' progress and speed, what ranks wait for, their loss and their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import GREEN, ORANGE, RED, graph
from grafana.queries import ROWS, SERIES, worst, worst_line, worst_of
from grafana.tables import JOB_COLUMN, NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.board import Source

JOB = "cluster, training_job"
NODE = "cluster, training_job, node, role"
RANK = "cluster, training_job, node, rank"
LEGEND = "{{training_job}} {{rank}} {{node}}"


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels about the time of ranks' steps."""
    seconds = f"max by ({RANK}) (dshealthd_job_step_seconds{{@jobs}})"
    ratio = f"""{seconds} / on ({JOB}) group_left () quantile by ({JOB}) (0.5,
    dshealthd_job_step_seconds{{@jobs}})"""
    # Not `rate`: a job that resumes from a checkpoint goes back, which is no counter's reset.
    rate = f"""clamp_min(max by ({JOB})
    (60 * deriv(dshealthd_job_step{{@jobs}}[$__rate_interval])), 0)"""
    waiting = f"""max by ({RANK}) (dshealthd_job_step_wait_seconds{{@jobs}}) / max by ({RANK})
    (dshealthd_job_step_wait_seconds{{@jobs}} + dshealthd_job_step_work_seconds{{@jobs}})"""
    spent = "dshealthd_job_time_seconds{@jobs}"
    limits = source.limits
    return [
        graph(
            "Steps per minute",
            f"""Rate of each job's fastest rank: the {SERIES} slowest jobs. 0 while a job is hung,
            evaluates or saves.""",
            (worst_of(rate, JOB, lowest=True), "{{training_job}}"),
        ),
        graph(
            "Step time of jobs",
            f"""Time from the end of a step to the end of the next: the median of a job's ranks, for
            the {SERIES} slowest jobs.""",
            worst_line("quantile", JOB, "0.5, dshealthd_job_step_seconds{@jobs}"),
            unit="s",
        ),
        graph(
            "Step time of ranks against their job's median",
            f"""The {SERIES} ranks that differ most. Ranks of one job wait for one another, so their
            step times are alike whichever is slow; a rank that differs is in a group of its
            own.""",
            (worst_of(ratio, RANK, f"abs({ratio} - 1)"), LEGEND),
            minimum=None,
        ),
        graph(
            "Own work against the peers",
            f"""Of the slowest rank of each node: its step without its wait for other ranks, against
            ranks of its role. The {SERIES} slowest, and from which ratio on a rank is slow, which
            depends on how much those of its job differ.""",
            worst_line("max", NODE, "dshealthd:job:work_ratio{@of_jobs}"),
            (
                worst("min", JOB, "dshealthd:job:work_ratio:limit{@of_jobs}"),
                "{{training_job}} limit",
            ),
            minimum=None,
        ),
        graph(
            "Waiting for other ranks",
            f"""Share of its step that a rank waits for others, in collectives, sends and receives:
            the {SERIES} that wait least. The others wait for one that hardly waits.""",
            (worst_of(waiting, RANK, lowest=True), LEGEND),
            unit="percentunit",
        ),
        graph(
            "Waiting for input",
            f"""Share of its step time that a rank spends before its next forward pass, on data or
            logging: the {SERIES} highest. Dashed: the alert's threshold.""",
            (
                worst(
                    "max",
                    RANK,
                    "dshealthd_job_input_seconds{@jobs} / dshealthd_job_step_seconds{@jobs}",
                ),
                LEGEND,
            ),
            unit="percentunit",
            steps=((None, GREEN), (limits["input_ratio"], ORANGE)),
        ),
        graph(
            "Where the time of ranks went",
            """Shares of the time of all ranks since their start: own work, waiting for others,
            input, marked pauses, hangs, starts and restarts, steps made again, and what was not
            measured.""",
            (f"sum by (spent) ({spent}) / on () group_left () sum({spent})", "{{spent}}"),
            unit="percentunit",
            stacked=True,
            maximum=1,
        ),
        graph(
            "Ranks at different steps",
            f"Steps between the first and the last rank of a job: the {SERIES} jobs with most.",
            (
                worst_of(
                    f"""max by ({JOB}) (dshealthd_job_step{{@jobs}}) - min by ({JOB})
                    (dshealthd_job_step{{@jobs}})""",
                    JOB,
                ),
                "{{training_job}}",
            ),
        ),
    ]


def health() -> list[dashboard.Panel]:
    """Return the panels about the loss of ranks and their memory."""
    reserved = 'dshealthd_job_memory_bytes{@jobs,type="reserved"}'
    return [
        rows(
            "Ranks with NaN or infinite loss",
            f"""Ranks whose last known loss is NaN or infinite, and since which step: the {ROWS}
            that lost it first.""",
            [
                JOB_COLUMN,
                NODE_COLUMN,
                Column("Rank", "rank", width=60),
                Column(
                    "Since step",
                    expr=f"""bottomk({ROWS}, max by ({RANK})
                    (dshealthd_job_nonfinite_loss_step{{@jobs}}))""",
                    steps=((1, RED),),
                ),
            ],
        ),
        graph(
            "Loss scale",
            f"""Loss scale of mixed precision: the lowest of a job's ranks, for the {SERIES} jobs
            with the lowest. It falls with each overflow.""",
            worst_line("min", JOB, "dshealthd_job_loss_scale{@jobs}", lowest=True),
            minimum=None,
        ),
        graph(
            "Skipped steps",
            f"""Steps per minute that were skipped because gradients overflowed: the {SERIES} jobs
            with most.""",
            worst_line(
                "max", JOB, "60 * rate(dshealthd_job_skipped_steps_total{@jobs}[$__rate_interval])"
            ),
        ),
        graph(
            "Gradient norm",
            f"""The highest of a job's ranks, if the training computes it: the {SERIES} jobs with
            the highest.""",
            worst_line("max", JOB, "dshealthd_job_gradient_norm{@jobs}"),
        ),
        graph(
            "Memory of ranks",
            f"""GPU memory reserved by torch's allocator: the {SERIES} ranks with most. Tensors use
            a part of it.""",
            (worst("max", RANK, reserved), LEGEND),
            unit="bytes",
        ),
        graph(
            "Memory of ranks against their job's median",
            f"""The {SERIES} ranks that reserve the most in comparison: a sign of unevenly split
            layers or batches, or of a leak.""",
            (
                worst_of(
                    f"""max by ({RANK}) ({reserved}) / on ({JOB}) group_left () quantile by ({JOB})
                    (0.5, {reserved})""",
                    RANK,
                ),
                LEGEND,
            ),
        ),
    ]
