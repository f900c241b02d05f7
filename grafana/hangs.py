"""The row of the dashboard *Jobs* about what is hung.

Which jobs, which ranks the others wait for, and which have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import job_link, node_link, series_link
from grafana.panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, YELLOW, graph, timeline
from grafana.queries import ROWS, SERIES, worst
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.panels import States

RANK = "cluster, exported_job, node, rank"
DOING: States = {
    0: ("training", GREEN),
    1: ("input", BLUE),
    2: ("forward", GREEN),
    3: ("backward, collectives, optimizer", YELLOW),
    4: ("evaluation", PURPLE),
    5: ("checkpoint", ORANGE),
    6: ("compile", PURPLE),
    7: ("a pause of another kind", GREY),
}
"""The current phase of each rank, by stage and phase."""
_STAGES = {"input": 1, "forward": 2, "backward": 3}
_PHASES = {"training": 0, "evaluation": 4, "checkpoint": 5, "compile": 6, "other": 7}


def panels() -> list[dashboard.Panel]:
    """Return the panels."""
    cause = "cluster, exported_job, node, rank, gpu, part, peer, class, reason"
    overdue = f"max by ({RANK}) (dshealthd_job_overdue_seconds{{@jobs}})"
    ended = "cluster, exported_job, node, rank, how"
    return [
        rows(
            "Causes of hangs",
            f"""What explains most of a hang, by all nodes of the job: the class, and the rank, GPU or peer that the others wait for; at
            most eight a job and {ROWS} in all. Class unknown: no node has found anything.""",
            [
                Column(title="Job", label="exported_job", link=job_link()),
                Column(title="Class", label="class", width=90),
                Column(title="Node", label="node", link=node_link()),
                Column(title="Rank", label="rank", width=60),
                Column(title="GPU", label="gpu", width=60),
                Column(title="Part", label="part"),
                Column(title="Peer", label="peer"),
                Column(title="Reason", label="reason"),
                Column(
                    title="",
                    expr=f"topk({ROWS}, max by ({cause}) (dshealthd:job:hang_cause{{@of_jobs}}))",
                ),
            ],
            size=(12, 8),
        ),
        rows(
            "What nodes say of their own ranks",
            f"""Ranks that hold a job up as far as their node alone can tell: stopped, gone, blocked in the kernel, in a pause, at their
            input, behind or ahead. At most {ROWS}.""",
            [
                Column(title="Job", label="exported_job", link=job_link()),
                Column(title="Node", label="node", link=node_link()),
                Column(title="Rank", label="rank", width=60),
                Column(title="Class", label="class"),
                Column(title="Reason", label="reason"),
                Column(
                    title="",
                    expr=f"""topk({ROWS}, max by (cluster, exported_job, node, rank, class, reason)
                        (dshealthd_job_hang_culprit_info{{@jobs}}))""",
                ),
            ],
            size=(6, 8),
        ),
        rows(
            "Ranks that ended",
            f"Ranks whose process has ended within ten minutes, and how: the first {ROWS}. "
            "The first to fail is the one to look at.",
            [
                Column(title="Job", label="exported_job", link=job_link()),
                Column(title="Node", label="node", link=node_link()),
                Column(title="Rank", label="rank", width=60),
                Column(title="How", label="how"),
                Column(
                    title="When",
                    expr=(
                        f"bottomk({ROWS}, 1000 * max by ({ended}) "
                        f"(dshealthd_job_rank_ended_timestamp_seconds{{@jobs}}))"
                    ),
                    unit="dateTimeFromNow",
                ),
            ],
            sort=("When", False),
            size=(6, 8),
        ),
        timeline(
            "Hangs in the time shown",
            f"""Nodes on which every rank of a job was silent for longer than is usual, by what that node knew of it; {SERIES} of those at
            the end of the time shown. Waiting: nothing on this node explains it.""",
            worst(
                "max by (cluster, exported_job, node, class) "
                '(dshealthd_job_hang{@jobs,class!="none"})',
                "cluster, exported_job, node, class",
            ),
            "{{exported_job}} {{node}} {{class}}",
            {1: ("is hung", RED)},
            link=series_link(),
            size=(8, 8),
        ),
        graph(
            "Silent for longer than is usual",
            f"""By how much: the {SERIES} ranks that are furthest past what is usual for them. 0 is usual; what is usual is learnt from a
            rank's own history.""",
            (worst(overdue, RANK), "{{exported_job}} {{rank}} {{node}}"),
            unit="s",
            link=series_link(),
            size=(8, 8),
        ),
        timeline(
            "What ranks do",
            f"""The stage of the step, or the pause that the rank has marked: of the {SERIES} ranks that are furthest past what is usual. A
            rank whose stage is not known is training.""",
            f"({_doing()}) and on ({RANK}) topk({SERIES}, max_over_time(({overdue})[15m:1m] "
            "@ end()))",
            "{{exported_job}} {{rank}} {{node}}",
            DOING,
            link=series_link(),
            size=(8, 8),
        ),
    ]


def _doing() -> str:
    """Return the key of `DOING` for each rank: of its pause if it is in one, else of its stage."""
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
