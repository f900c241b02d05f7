"""Tables of labels, and of the values that queries return for them."""

from __future__ import annotations

import string
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.models import common, dashboard, table

from grafana import panels
from grafana.panels import Link, States, Steps

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Column:
    """A column of a table: a label of the rows or, with `expr`, the value of a query that has one
    result per row.
    """

    title: str = ""
    """Heading; if empty, the value is not shown and only makes the row appear."""
    label: str = ""
    _: KW_ONLY
    expr: str = ""
    unit: str = "none"
    decimals: int | None = None
    steps: Steps = ()
    states: States | None = None
    link: Link | None = None
    width: int | None = None


NODE_COLUMN = Column("Node", "node", link=panels.node_link())
JOB_COLUMN = Column("Job", "training_job", link=panels.job_link())


def rows(
    title: str,
    description: str,
    columns: Sequence[Column],
    *,
    sort: tuple[str, bool] | None = None,
    matrix: tuple[str, str] | None = None,
    unknown: str = "none known",
    size: tuple[int, int] = (8, 8),
) -> dashboard.Panel:
    """Return a table; `sort` is a column's title and whether it descends, `unknown` the text of a
    cell without a value.

    With `matrix`, the values of two labels become its rows and its columns. A table whose rows lead
    to a node or a job has their cluster, too.
    """
    if any(column.link and panels.CLUSTER in column.link.url for column in columns):
        columns = [*columns, Column("Cluster", "cluster")]
    values = [column for column in columns if column.expr]
    targets = [
        panels.target(column.expr, ref, instant=True, labels=True)
        for ref, column in zip(string.ascii_uppercase, values, strict=False)
    ]
    # The data source's names for value fields depend on whether there is more than one.
    refs = ["Value"] if len(values) == 1 else [f"Value #{target.ref_id}" for target in targets]
    named = {column.title: ref for column, ref in zip(values, refs, strict=True)}
    names = {
        column.title: column.label or named[column.title] for column in columns if column.title
    }
    transformations = [
        *([_transformation("merge", {})] if len(values) > 1 else []),
        _transformation("filterFieldsByName", {"include": {"names": list(names.values())}}),
        _transformation(
            "groupingToMatrix",
            {
                "rowField": matrix[0],
                "columnField": matrix[1],
                "valueField": "Value",
                "emptyValue": "zero",
            },
        )
        if matrix
        else _transformation(
            "organize",
            {
                "excludeByName": {},
                "indexByName": {name: index for index, name in enumerate(names.values())},
                "renameByName": {name: title for title, name in names.items()},
            },
        ),
    ]
    found = panels.panel(
        "table",
        title,
        description,
        size,
        targets=targets,
        options=table.Options(
            show_header=True,
            cell_height=common.TableCellHeight.SM,
            sort_by=[common.TableSortByFieldState(display_name=sort[0], desc=sort[1])]
            if sort
            else None,
        ),
        field=dashboard.FieldConfig(
            custom=common.TableFieldOptions(filterable=True, inspect=False), no_value=unknown
        ),
        overrides=[override for column in columns if (override := _override(column))],
    )
    found.transformations = transformations
    return found


def _override(column: Column) -> dashboard.DashboardFieldConfigSourceOverrides | None:
    properties = []
    if column.expr:
        properties.append(dashboard.DynamicConfigValue("unit", column.unit))
    if column.decimals is not None:
        properties.append(dashboard.DynamicConfigValue("decimals", column.decimals))
    if column.width is not None:
        properties.append(dashboard.DynamicConfigValue("custom.width", column.width))
    if column.steps:
        properties.append(
            dashboard.DynamicConfigValue("thresholds", panels.thresholds(column.steps))
        )
    if column.states:
        properties.append(
            dashboard.DynamicConfigValue("mappings", [panels.value_map(column.states)])
        )
    if column.steps or column.states:
        properties.append(dashboard.DynamicConfigValue("color", {"mode": "thresholds"}))
        properties.append(
            dashboard.DynamicConfigValue("custom.cellOptions", {"type": "color-text"})
        )
    if column.link:
        properties.append(dashboard.DynamicConfigValue("links", [panels.field_link(column.link)]))
    return (
        panels.override("byName", column.title, properties) if properties and column.title else None
    )


def _transformation(name: str, options: dict[str, Any]) -> dashboard.DataTransformerConfig:
    return dashboard.DataTransformerConfig(id_val=name, options=options)
