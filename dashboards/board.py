"""A dashboard around its panels: the grid, the variables, the links between the dashboards.

Sections are stacked; those with a title have a heading. A section is a stack of bands. A band is a row of panels of
one height that fill the 24 columns, so there are neither holes nor overlaps::

    ┌ section ───────────────────────────┐
    │ band   panel, 8 │ panel, 8 │ 8     │ 8 rows
    │ band   panel, 24                   │ 7 rows
    └────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from asyncpipe.errors import OptionError
from dashboards.panels import SOURCE, panel_id
from dashboards.queries import series

__all__ = ["COLUMNS", "Band", "Section", "board", "chosen"]

COLUMNS = 24
TAG = "asyncpipe"


@dataclass(frozen=True, slots=True)
class Band:
    """Panels side by side, each with its width in columns, and their height in rows."""

    height: int
    panels: tuple[tuple[Panel, int], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Bands one below the other, with a heading if there is a title."""

    title: str
    bands: Sequence[Band]


def board(
    uid: str, title: str, about: str, sections: Sequence[Section], variables: Sequence[build.QueryVariable] = ()
) -> Dashboard:
    """The whole dashboard. ``variables`` come after the data source, ``$job`` and ``$device``.

    Raises ``OptionError`` for a band that leaves a hole, and for two panels of the same title.
    """
    made = build.Dashboard(title).uid(uid).description(about).tags([TAG]).timezone("browser").editable()
    made.refresh("10s").time("now-30m", "now").tooltip(model.DashboardCursorSync.CROSSHAIR)
    made.with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    made.with_variable(chosen("job", "Job", "label_values(asyncpipe_build_info, job)"))
    device = f"label_values({series('stage_busy_seconds_total').split(', ')[0]}}}, device)"
    made.with_variable(chosen("device", "Device", device))
    for variable in variables:
        made.with_variable(variable)
    made.annotation(_alerts()).link(_siblings())
    whole = made.build()
    whole.panels = _placed(sections)
    return whole


def chosen(name: str, label: str, query: str) -> build.QueryVariable:
    """A variable with any number of chosen values; the default is all."""
    variable = build.QueryVariable(name).label(label).datasource(SOURCE).multi(True).include_all(True).all_value(".*")
    variable.query({"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"})
    variable.sort(model.VariableSort.NATURAL_ASC)
    variable.current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _alerts() -> build.AnnotationQuery:
    """Marks on every time axis at the times when alerts fired."""
    firing = 'ALERTS{alertname=~"Asyncpipe.+", alertstate="firing", job=~"$job|"}'
    annotation = build.AnnotationQuery().name("Alerts").datasource(SOURCE).enable(True).icon_color("red")
    target = prometheus.Dataquery().expr(firing).ref_id("Alerts").datasource(SOURCE).range()
    return annotation.target(target).title_format("{{alertname}}").text_format("{{job}} {{device}} {{reason}}")


def _siblings() -> build.DashboardLink:
    link = build.DashboardLink("asyncpipe").type(model.DashboardLinkType.DASHBOARDS).tags([TAG]).icon("dashboard")
    return link.keep_time(True).include_vars(True).as_dropdown(False)


def _placed(sections: Sequence[Section]) -> list[Panel | model.RowPanel]:
    """The panels and headings of all sections with their ids and positions."""
    found: dict[int, Panel | model.RowPanel] = {}
    y = 0
    for section in sections:
        if section.title:
            row = model.RowPanel(title=section.title, grid_pos=model.GridPos(h=1, w=COLUMNS, x=0, y=y), panels=[])
            _add(found, row)
            y += 1
        for band in section.bands:
            x = 0
            for panel, width in band.panels:
                panel.grid_pos = model.GridPos(h=band.height, w=width, x=x, y=y)
                _add(found, panel)
                x += width
            if x != COLUMNS:
                raise OptionError(f"the band of {band.panels[0][0].title!r} is {x} columns wide; it needs {COLUMNS}")
            y += band.height
    return list(found.values())


def _add(found: dict[int, Panel | model.RowPanel], panel: Panel | model.RowPanel) -> None:
    number = panel.id_val = panel_id(panel.title or "")
    if number in found:
        raise OptionError(f"{panel.title!r} and {found[number].title!r} have the same number; rename one of them")
    found[number] = panel
