"""The row of the dashboard *Jobs* about hangs.

It shows the hung jobs, the ranks that the others wait for, and the ranks that have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import BLUE, GRAY, GREEN, ORANGE, PURPLE, RED, YELLOW, graph, timeline
from grafana.queries import ROWS, SERIES, most, worst, worst_of
from grafana.tables import JOB_COLUMN, NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.panels import States

RANK = "cluster, training_job, node, rank"
DOING: States = {
    0: ("training", GREEN),
    1: ("input", BLUE),
    2: ("forward", GREEN),
    3: ("backward, collectives, optimizer", YELLOW),
    4: ("evaluation", PURPLE),
    5: ("checkpoint", ORANGE),
    6: ("compile", PURPLE),
    7: ("other pause", GRAY),
}
"""Texts and colors of what a rank does, from its stage and phase."""
_STAGES = {"input": 1, "forward": 2, "backward": 3}
_PHASES = {"training": 0, "evaluation": 4, "checkpoint": 5, "compile": 6, "other": 7}


def panels() -> list[dashboard.Panel]:
    """Return the panels about hung jobs and their culprits."""
    cause = "cluster, training_job, node, rank, gpu, part, peer, class, reason"
    overdue = f"max by ({RANK}) (dshealthd_job_overdue_seconds{{@jobs}})"
    ended = "cluster, training_job, node, rank, how"
    return [
        rows(
            "Causes of hangs",
            f"""The best explanation of each hang, from all nodes of the job: the class, and the
            rank, GPU or peer that the others wait for; at most eight per job and {ROWS} in all.
            Class unknown: no node has found a cause.""",
            [
                JOB_COLUMN,
                Column("Class", "class", width=90),
                NODE_COLUMN,
                Column("Rank", "rank", width=60),
                Column("GPU", "gpu", width=60),
                Column("Part", "part"),
                Column("Peer", "peer"),
                Column("Reason", "reason"),
                Column(expr=most("max", cause, "dshealthd:job:hang_cause{@of_jobs}")),
            ],
            size=(12, 8),
        ),
        rows(
            "Culprits, as their own nodes see them",
            f"""Ranks that block a job, as far as their own node can tell: stopped, gone, blocked in
            the kernel, in a pause, waiting for input, behind or ahead. At most {ROWS}.""",
            [
                JOB_COLUMN,
                NODE_COLUMN,
                Column("Rank", "rank", width=60),
                Column("Class", "class"),
                Column("Reason", "reason"),
                Column(
                    expr=most(
                        "max",
                        "cluster, training_job, node, rank, class, reason",
                        "dshealthd_job_hang_culprit_info{@jobs}",
                    )
                ),
            ],
            size=(6, 8),
        ),
        rows(
            "Ranks that ended",
            f"""Ranks whose process ended in the last ten minutes, and how: the first {ROWS}. Look
            at the first that failed.""",
            [
                JOB_COLUMN,
                NODE_COLUMN,
                Column("Rank", "rank", width=60),
                Column("How", "how"),
                Column(
                    "When",
                    expr=f"""bottomk({ROWS}, 1000 * max by ({ended})
                    (dshealthd_job_rank_ended_timestamp_seconds{{@jobs}}))""",
                    unit="dateTimeFromNow",
                ),
            ],
            sort=("When", False),
            size=(6, 8),
        ),
        timeline(
            "Hangs over time",
            f"""Nodes on which every rank of a job was silent for longer than usual, by the class
            that the node found; {SERIES} of those at the end of the time shown. Gray is no hang: a
            pause, a suspended job, a debugger, or a wait whose cause may still be found. Waiting:
            nothing on this node explains the hang.""",
            worst(
                "max",
                "cluster, training_job, node, class",
                'dshealthd_job_hang{@jobs,class!="none"}',
            ),
            "{{training_job}} {{node}} {{class}}",
            {0: ("no hang", GRAY), 1: ("hung", RED)},
        ),
        graph(
            "Silence beyond usual",
            f"""Seconds by which a rank's silence exceeds its usual maximum, learnt from the rank's
            own history: the {SERIES} ranks with the most. 0 is usual.""",
            (worst_of(overdue, RANK), "{{training_job}} {{rank}} {{node}}"),
            unit="s",
        ),
        timeline(
            "Activity of ranks",
            f"""The stage of the step, or the pause that the rank has marked, of the {SERIES} ranks
            whose silence is furthest beyond usual. A rank whose stage is unknown is shown as
            training.""",
            f"""({_doing()}) and on ({RANK}) topk({SERIES}, max_over_time(({overdue})[15m:1m] @
            end()))""",
            "{{training_job}} {{rank}} {{node}}",
            DOING,
        ),
    ]


def _doing() -> str:
    """Return an expression for each rank's key of `DOING`: of its pause if any, else its stage."""
    named = [
        *(("stage", *entry) for entry in _STAGES.items()),
        *(("phase", *entry) for entry in _PHASES.items()),
    ]
    terms = [
        f'{value} * max by ({RANK}) (dshealthd_job_{label}{{@jobs,{label}="{name}"}})'
        for label, name, value in reversed(named)
        if value
    ]
    return " or ".join(
        (*terms, f'0 * max by ({RANK}) (dshealthd_job_phase{{@jobs,phase="training"}})')
    )
