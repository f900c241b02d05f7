"""A dashboard: its rows of panels, its variables, its links to the others, and the alerts marked in
its graphs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard, prometheus

from dshealthd.symptoms.runbooks import url
from grafana.limits import Limits
from grafana.panels import DATA_SOURCE, ORANGE, RED, Link
from grafana.queries import promql

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 24
TAG = "dshealthd"
NO_PROBES = "no probes"
"""Shown instead of 0 if no agent takes part in probes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Input of the dashboards: the thresholds, and the URL of the runbooks in the form that
    `symptoms.runbooks.url` expects.
    """

    limits: Limits
    runbooks: str

    def runbook(self) -> Link:
        """Return a table's link to the runbook of the symptom in its column `symptom`."""
        return Link(title="Runbook", url=url(self.runbooks, "${__data.fields.symptom}"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A heading and its panels; the panels of a closed row are queried only once it is opened."""

    title: str
    panels: Sequence[dashboard.Panel]
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class Board:
    """A dashboard as its module declares it."""

    uid: str
    title: str
    description: str
    variables: Sequence[dashboard.VariableModel]
    rows: Sequence[Row]
    alerts: tuple[str, ...] = ("@alerts", "@server")
    """The matchers of the alerts that graphs mark: those with the labels of any."""
    since: str = "now-1h"


def data_source() -> dashboard.VariableModel:
    """Return the variable that selects the Prometheus data source."""
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.DATASOURCE,
        name="datasource",
        label="Data source",
        query="prometheus",
    )


def choice(
    name: str,
    label: str,
    query: str,
    *,
    description: str = "",
    regex: str = "",
    several: bool = False,
    everything: str | None = None,
) -> dashboard.VariableModel:
    """Return a dashboard's variable with the values that a query finds.

    `everything` is the expression for "All": "" for a list of all values, None for no such choice.
    """
    every = (
        None
        if everything is None
        else dashboard.VariableOption(selected=True, text="All", value="$__all")
    )
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.QUERY,
        name=name,
        label=label,
        description=description or None,
        hide=dashboard.VariableHide.DONT_HIDE,
        query={"query": promql(query), "refId": name},
        definition=promql(query),
        datasource=DATA_SOURCE,
        regex=regex,
        refresh=dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED,
        sort=dashboard.VariableSort.NATURAL_ASC,
        multi=several,
        include_all=every is not None,
        all_value=everything or None,
        current=every,
    )


def cluster() -> dashboard.VariableModel:
    """Return the variable of the cluster; "All" also matches series without that label."""
    return choice(
        "cluster",
        "Cluster",
        "label_values(dshealthd_build_info, cluster)",
        several=True,
        everything=".*",
    )


def write(board: Board) -> str:
    """Return the JSON of a dashboard."""
    document = json.loads(json.dumps(_model(board), cls=JSONEncoder))
    return (
        json.dumps(_without_placement(document), indent=2, sort_keys=True, ensure_ascii=False)
        + "\n"
    )


def _without_placement(value: Any) -> Any:
    """Drop a placement that the SDK adds, which moves links and annotations from above the panels
    into a menu of their own.
    """
    if isinstance(value, dict):
        return {
            key: _without_placement(entry)
            for key, entry in value.items()
            if (key, entry) != ("placement", "inControlsMenu")
        }
    return [_without_placement(entry) for entry in value] if isinstance(value, list) else value


def _model(board: Board) -> dashboard.Dashboard:
    return dashboard.Dashboard(
        uid=board.uid,
        title=board.title,
        description=" ".join(board.description.split()),
        tags=[TAG],
        # In a dashboard that is not editable, users cannot even view a panel's query. Grafana still
        # saves no changes to provisioned files (allowUiUpdates), only a copy.
        editable=True,
        graph_tooltip=dashboard.DashboardCursorSync.CROSSHAIR,
        time=dashboard.DashboardDashboardTime(from_val=board.since, to="now"),
        timepicker=dashboard.TimePickerConfig(),
        refresh="30s",
        panels=_place(board.rows),
        templating=dashboard.DashboardDashboardTemplating(list_val=list(board.variables)),
        annotations=dashboard.AnnotationContainer(list_val=_annotations(board)),
        links=[
            dashboard.DashboardLink(
                title="dshealthd",
                type_val=dashboard.DashboardLinkType.DASHBOARDS,
                icon="external link",
                tags=[TAG],
                keep_time=True,
                include_vars=True,
            )
        ],
    )


def _annotations(board: Board) -> list[dashboard.AnnotationQuery]:
    """Return the annotations that mark alerts on a board.

    Most alerts of jobs are tickets for their owners, so a board of jobs marks all severities alike.
    """
    if any("training_job" in labels for labels in board.alerts):
        return [_annotation("Alerts", "critical|warning", RED, board)]
    return [
        _annotation("Pages", "critical", RED, board),
        _annotation("Tickets", "warning", ORANGE, board),
    ]


def _annotation(name: str, severity: str, color: str, board: Board) -> dashboard.AnnotationQuery:
    """Return the annotation that marks alerts of a severity.

    It draws one line per rule, not one per node for which the rule fires.
    """
    firing = f'alertstate="firing",severity=~"{severity}"'
    found = " or ".join(f"ALERTS{{{labels},{firing}}}" for labels in board.alerts)
    expr = promql(f"count by (alertname, symptom) ({found})")
    return dashboard.AnnotationQuery(
        name=name,
        datasource=DATA_SOURCE,
        enable="critical" in severity,
        icon_color=color,
        expr=expr,
        title_format="{{alertname}}",
        text_format="{{symptom}}",
        tag_keys="symptom",
        step="60s",
        target=prometheus.Dataquery(
            expr=expr, ref_id="Anno", range_val=True, instant=False, legend_format="{{alertname}}"
        ),
    )


def _place(rows: Iterable[Row]) -> list[dashboard.Panel | dashboard.RowPanel]:
    """Place rows below one another, their panels from left to right, and number all of them."""
    placed: list[dashboard.Panel | dashboard.RowPanel] = []
    number, top = 1, 0
    for row in rows:
        heading = dashboard.RowPanel(
            title=row.title,
            collapsed=row.closed,
            id_val=number,
            grid_pos=dashboard.GridPos(x=0, y=top, w=WIDTH, h=1),
        )
        placed.append(heading)
        left, line, number, below = 0, 0, number + 1, top + 1
        for panel in row.panels:
            size = panel.grid_pos or dashboard.GridPos()
            if left + size.w > WIDTH:
                left, below, line = 0, below + line, 0
            panel.grid_pos = dashboard.GridPos(x=left, y=below, w=size.w, h=size.h)
            panel.id_val = number
            left, line, number = left + size.w, max(line, size.h), number + 1
        if row.closed:  # its panels take no space until it is opened
            heading.panels = list(row.panels)
            top += 1
        else:
            placed += row.panels
            top = below + line
    return placed
