"""Panels: numbers, graphs and timelines, as models of Grafana's SDK.

Every panel has a description that says what it means. The board sets its position, id and row.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.models import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)

from grafana.queries import promql

Steps = Sequence[tuple[float | None, str]]
"""Colors by the lowest value of each, in rising order.

None is minus infinity; values below the first are green.
"""
States = Mapping[int, tuple[str, str]] | Mapping[str, tuple[str, str]]
"""Texts and colors of single values."""

DATA_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, YELLOW, ORANGE, RED, PURPLE, GRAY, BLUE = (
    "green",
    "yellow",
    "orange",
    "red",
    "purple",
    "#8e8e8e",
    "blue",
)
UP: States = {1: ("yes", GREEN), 0: ("no", RED)}
UNKNOWN = "unknown"
"""Shown instead of 0 if the value is not known."""
KEPT = "${datasource:queryparam}&${__url_time_range}"
"""Query parameters that a link passes on to another dashboard, beside what it leads to."""
CLUSTER = "${__data.fields.cluster}"
"""The cluster of a table's row, empty without that label: two may have nodes of one name."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of a value; the URL may contain Grafana's variables."""

    title: str
    url: str


def node_link(field: str = "${__data.fields.node}", cluster: str = CLUSTER) -> Link:
    """Return a link to the dashboard of the node that `field` names, by default that of a table's
    row.
    """
    return Link(
        title="Node",
        url=f"/d/dshealthd-node/dshealthd-node?var-node={field}&var-cluster={cluster}&{KEPT}",
    )


def _link_of(*legends: str) -> Link | None:
    """Return the link of lines, bands or squares to the dashboard of the node that names them."""
    named = any("{{node}}" in legend for legend in legends)
    return node_link("${__field.labels.node}", "${__field.labels.cluster}") if named else None


def job_link() -> Link:
    """Return a link from a table's row to the dashboard of its training job."""
    return Link(
        title="Job",
        url="/d/dshealthd-jobs/dshealthd-jobs?var-training=${__data.fields.training_job}"
        f"&var-cluster={CLUSTER}&{KEPT}",
    )


def number(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str = "none",
    steps: Steps = (),
    states: States | None = None,
    unknown: str = UNKNOWN,
) -> dashboard.Panel:
    """Return one large number with a color; it shows `unknown` if the query returns nothing."""
    return panel(
        "stat",
        title,
        description,
        (4, 4),
        targets=[target(expr, instant=True)],
        options=_stat_options(common.BigValueTextMode.AUTO),
        field=_field(unit, steps or ((None, BLUE),), states, None, unknown=unknown),
    )


def squares(
    title: str,
    description: str,
    expr: str,
    *,
    name: str,
    steps: Steps,
    states: States,
    size: tuple[int, int],
) -> dashboard.Panel:
    """Return a square for each result, in the query's order, with its `name` (a legend such as
    `{{node}}`) and the color of its value.
    """
    options = _stat_options(common.BigValueTextMode.NAME)
    options.justify_mode = common.BigValueJustifyMode.CENTER
    return panel(
        "stat",
        title,
        description,
        size,
        targets=[target(expr, legend=name, instant=True)],
        options=options,
        field=_field("none", steps, states, _link_of(name)),
    )


def graph(
    title: str,
    description: str,
    *lines: tuple[str, str],
    unit: str = "none",
    steps: Steps = (),
    limits: Sequence[str] = (),
    stacked: bool = False,
    minimum: float | None = 0,
    maximum: float | None = None,
    size: tuple[int, int] = (8, 8),
) -> dashboard.Panel:
    """Return lines over time; each of `lines` is an expression and a legend.

    `steps` are drawn as dashed thresholds; series whose legend starts with one of `limits` are
    measured limits and are drawn dashed too.
    """
    field = _field(unit, steps, None, _link_of(*(legend for _, legend in lines)))
    field.min_val, field.max_val = minimum, maximum
    field.color = dashboard.FieldColor(mode=dashboard.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
    field.custom = common.GraphFieldConfig(
        draw_style=common.GraphDrawStyle.LINE,
        line_width=1,
        fill_opacity=30 if stacked else 0,
        show_points=common.VisibilityMode.NEVER,
        span_nulls=False,
        stacking=common.StackingConfig(mode=common.StackingMode.NORMAL, group="A")
        if stacked
        else None,
        thresholds_style=common.GraphThresholdsStyleConfig(
            mode=common.GraphThresholdsStyleMode.DASHED
        )
        if steps
        else None,
    )
    dashed = [
        dashboard.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
        dashboard.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": RED}),
    ]
    return panel(
        "timeseries",
        title,
        description,
        size,
        targets=[
            target(expr, ref, legend=legend)
            for ref, (expr, legend) in zip(string.ascii_uppercase, lines, strict=False)
        ],
        options=timeseries.Options(legend=_legend(shown=True), tooltip=_tooltip()),
        field=field,
        overrides=[override("byRegexp", f"/^{limit}/", dashed) for limit in limits],
    )


def timeline(
    title: str,
    description: str,
    expr: str,
    legend: str,
    states: States,
    *,
    size: tuple[int, int] = (8, 8),
) -> dashboard.Panel:
    """Return a band over time for each result, colored by its state."""
    field = _field("none", ((None, GRAY),), states, _link_of(legend))
    field.custom = statetimeline.FieldConfig(line_width=0, fill_opacity=80)
    return panel(
        "state-timeline",
        title,
        description,
        size,
        targets=[target(expr, legend=legend)],
        options=statetimeline.Options(
            show_value=common.VisibilityMode.NEVER,
            merge_values=True,
            row_height=0.9,
            align_value=common.TimelineValueAlignment.LEFT,
            legend=_legend(shown=False),
            tooltip=_tooltip(),
            per_page=20,
        ),
        field=field,
    )


def panel(
    kind: str,
    title: str,
    description: str,
    size: tuple[int, int],
    *,
    targets: Sequence[prometheus.Dataquery],
    options: object,
    field: dashboard.FieldConfig,
    overrides: Sequence[dashboard.DashboardFieldConfigSourceOverrides] = (),
) -> dashboard.Panel:
    """Return a panel of a kind that Grafana knows.

    `size` is its width in columns, of 24, and its height in units of about 30 pixels.
    """
    return dashboard.Panel(
        type_val=kind,
        title=title,
        description=" ".join(description.split()),
        datasource=DATA_SOURCE,
        grid_pos=dashboard.GridPos(w=size[0], h=size[1]),
        targets=list(targets),
        options=options,
        field_config=dashboard.FieldConfigSource(defaults=field, overrides=list(overrides)),
    )


def target(
    expr: str, ref: str = "A", *, legend: str = "", instant: bool = False, labels: bool = False
) -> prometheus.Dataquery:
    """Return a panel's query named `ref`.

    `instant` queries only the end of the time shown; `labels` become fields of their own.
    """
    return prometheus.Dataquery(
        ref_id=ref,
        expr=promql(expr),
        datasource=DATA_SOURCE,
        instant=instant,
        range_val=not instant,
        format_val=prometheus.PromQueryFormat.TABLE
        if labels
        else prometheus.PromQueryFormat.TIME_SERIES,
        legend_format=legend or "__auto",
        editor_mode=prometheus.QueryEditorMode.CODE,
    )


def _field(
    unit: str, steps: Steps, states: States | None, link: Link | None, *, unknown: str | None = None
) -> dashboard.FieldConfig:
    return dashboard.FieldConfig(
        unit=unit,
        thresholds=thresholds(steps) if steps else None,
        color=dashboard.FieldColor(mode=dashboard.FieldColorModeId.THRESHOLDS),
        mappings=[value_map(states)] if states else None,
        links=[field_link(link)] if link else None,
        no_value=unknown,
    )


def thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    """Return a panel's colors by value."""
    first = [] if steps[0][0] is None else [dashboard.Threshold(value=None, color=GREEN)]
    found = [dashboard.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig(
        mode=dashboard.ThresholdsMode.ABSOLUTE, steps=[*first, *found]
    )


def value_map(states: States) -> dashboard.ValueMap:
    """Return a panel's texts and colors of single values."""
    return dashboard.ValueMap(
        options={
            str(key): dashboard.ValueMappingResult(text=text, color=color, index=index)
            for index, (key, (text, color)) in enumerate(states.items())
        }
    )


def field_link(link: Link) -> dashboard.DashboardLink:
    """Return a link of a value; a link that leaves Grafana opens in a new tab."""
    return dashboard.DashboardLink(
        title=link.title, url=link.url, target_blank=link.url.startswith("http")
    )


def override(
    matcher: str, options: str, properties: Sequence[dashboard.DynamicConfigValue]
) -> dashboard.DashboardFieldConfigSourceOverrides:
    """Return the properties that override those of the fields that `matcher` and `options`
    select.
    """
    return dashboard.DashboardFieldConfigSourceOverrides(
        matcher=dashboard.MatcherConfig(id_val=matcher, options=options),
        properties=list(properties),
    )


def _stat_options(text: common.BigValueTextMode) -> stat.Options:
    return stat.Options(
        color_mode=common.BigValueColorMode.BACKGROUND,
        graph_mode=common.BigValueGraphMode.NONE,
        text_mode=text,
        justify_mode=common.BigValueJustifyMode.AUTO,
        orientation=common.VizOrientation.AUTO,
        reduce_options=common.ReduceDataOptions(calcs=["lastNotNull"], fields="", values=False),
    )


def _legend(*, shown: bool) -> common.VizLegendOptions:
    return common.VizLegendOptions(
        display_mode=common.LegendDisplayMode.LIST,
        placement=common.LegendPlacement.BOTTOM,
        show_legend=shown,
        calcs=[],
    )


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions(
        mode=common.TooltipDisplayMode.MULTI, sort=common.SortOrder.DESCENDING
    )
