"""Panels as one calls them here: a line chart, a stat, a table; each a few words, with everything else set alike.

The SDK leaves legends off and tooltips single; these functions set what every panel of its kind has, from a ``Face``
(what one reads) and ``Query`` objects (what is asked).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

from dashboards.sdk import (
    Builder,
    Dataquery,
    Panel,
    TextMode,
    barchart,
    bargauge,
    build,
    common,
    heatmap,
    kinds,
    model,
    prometheus,
    promql,
    stat,
    statetimeline,
    tables,
    texts,
    timeseries,
)
from dashboards.sdk import heat as heats
from dashboards.states import STATES, State

__all__ = [
    "SERVICE",
    "SOURCE",
    "Face",
    "Property",
    "Query",
    "bars",
    "called",
    "columns",
    "heat",
    "lines",
    "named",
    "number",
    "panel_id",
    "panel_link",
    "runbook_url",
    "states",
    "table",
    "text",
    "thresholds",
]

SERVICE = "asyncpipe-service"
"""The uid of the dashboard that shows the runbook."""
SOURCE = kinds.DataSourceRef(type_val="prometheus", uid="${datasource}")
REFS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LAST = "lastNotNull"
Format = promql.PromQueryFormat

Property = tuple[str, object]
"""The id and the value of an override: ``("unit", "s")``."""
P = TypeVar(
    "P",
    stat.Panel,
    bargauge.Panel,
    barchart.Panel,
    timeseries.Panel,
    statetimeline.Panel,
    heatmap.Panel,
    tables.Panel,
)


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and how its series are called (``{{label}}`` stands for a label's value)."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """What every panel with numbers has."""

    title: str
    about: str
    """How to read it."""
    unit: str
    low: float | None = 0
    high: float | None = None
    decimals: int | None = None
    steps: tuple[tuple[float | None, str], ...] = ((None, "text"),)
    """Thresholds: from which value on (the first: ``None``) there is which colour."""
    runbook: tuple[str, ...] = ()
    """Headings of the runbook's entries that help when this panel looks bad."""
    names: tuple[tuple[str, tuple[Property, ...]], ...] = ()
    """Overrides by regular expression on the series' names."""


def lines(face: Face, *queries: Query, stacked: bool = False, beside: bool = False, held: bool = False) -> Panel:
    """Lines over time.

    ``stacked`` areas; the legend ``beside`` as a table of last values, where there are many; values ``held`` until the
    next one, where they count something.
    """
    panel = _faced(timeseries.Panel(), face).targets(_targets(queries))
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
    panel.legend(_legend(beside)).tooltip(_tooltip()).line_width(1).fill_opacity(70 if stacked else 8)
    panel.show_points(kinds.VisibilityMode.AUTO).point_size(4)
    if stacked:
        panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if held:
        panel.line_interpolation(kinds.LineInterpolation.STEP_AFTER)
    return panel.build()


def number(face: Face, *queries: Query, instant: bool = False, named: bool = False) -> Panel:
    """The last value, large; ``named`` shows the series' name with it."""
    panel = _faced(stat.Panel(), face).targets(_targets(queries, instant=instant))
    panel.reduce_options(_last()).color_mode(kinds.BigValueColorMode.VALUE)
    panel.graph_mode(kinds.BigValueGraphMode.NONE if instant else kinds.BigValueGraphMode.AREA)
    panel.text_mode(kinds.BigValueTextMode.VALUE_AND_NAME if named else kinds.BigValueTextMode.AUTO)
    return panel.build()


def bars(face: Face, *queries: Query, colour: str) -> Panel:
    """A horizontal bar for each series' last value."""
    panel = _faced(bargauge.Panel(), face).targets(_targets(queries)).color_scheme(_fixed(colour))
    panel.reduce_options(_last()).orientation(kinds.VizOrientation.HORIZONTAL).legend(_legend())
    panel.display_mode(kinds.BarGaugeDisplayMode.BASIC).name_placement(kinds.BarGaugeNamePlacement.LEFT)
    return panel.build()


def columns(face: Face, by: str, *queries: tuple[str, Query]) -> Panel:
    """A stacked horizontal bar for each value of the label ``by``, from instant queries with their colours."""
    panel = _faced(barchart.Panel(), face).targets(_targets([query for _, query in queries], Format.TABLE))
    panel.transformations(_merged([query.legend for _, query in queries], hidden=("Time", "job")))
    for colour, query in queries:
        panel.override_by_name(query.legend, _properties([("color", _fixed(colour).build())]))
    panel.x_field(by).orientation(kinds.VizOrientation.HORIZONTAL).stacking(kinds.StackingMode.NORMAL)
    panel.legend(_legend()).tooltip(_tooltip()).fill_opacity(85).line_width(0)
    return panel.show_value(kinds.VisibilityMode.NEVER).build()


def states(face: Face, query: Query) -> Panel:
    """A row for each series of state codes, over time, in the states' colours."""
    results = {str(s.code): model.ValueMappingResult(text=s.name, color=s.colour, index=s.code) for s in STATES}
    panel = _faced(statetimeline.Panel(), face).targets(_targets([query]))
    panel.mappings([model.ValueMap(options=results)]).legend(_legend()).tooltip(_tooltip())
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel.show_value(kinds.VisibilityMode.NEVER).fill_opacity(85).line_width(0).row_height(0.85).merge_values(True)
    return panel.build()


def heat(face: Face, query: Query, repeat: str, across: int) -> Panel:
    """Classic histogram buckets over time, once for each value of the variable ``repeat``, ``across`` side by side."""
    panel = _faced(heatmap.Panel(), face).targets(_targets([query], Format.HEATMAP))
    panel.calculate(False).show_legend()
    panel.y_axis(heatmap.YAxisConfig().unit(face.unit).axis_placement(kinds.AxisPlacement.LEFT))
    colours = heatmap.HeatmapColorOptions().mode(heats.HeatmapColorMode.SCHEME).scheme("Viridis")
    panel.color(colours.fill("dark-blue").scale(heats.HeatmapColorScale.EXPONENTIAL).exponent(0.5).steps(64))
    panel.tooltip(heatmap.HeatmapTooltip().mode(kinds.TooltipDisplayMode.SINGLE).y_histogram(True))
    return panel.repeat(repeat).repeat_direction("h").max_per_row(across).build()


def table(
    face: Face, *queries: tuple[Query, Sequence[Property]], first: Sequence[tuple[str, Sequence[Property]]]
) -> Panel:
    """A row for each set of labels: the labels ``first``, then a column for each query, with its legend as heading.

    A query without a legend is asked for its labels alone.
    """
    titles = [query.legend for query, _ in queries]
    panel = _faced(tables.Panel(), face).targets(_targets([query for query, _ in queries], Format.TABLE))
    panel.transformations(_merged(titles, hidden=("Time",), first=[name for name, _ in first]))
    for heading, (_, properties) in zip((*(name for name, _ in first), *titles), (*first, *queries), strict=True):
        if properties:
            panel.override_by_name(heading, _properties(properties))
    return panel.cell_height(kinds.TableCellHeight.SM).cell_options(kinds.TableAutoCellOptions()).build()


def text(title: str, content: str) -> Panel:
    """A text in Markdown."""
    return texts.Panel().title(title).mode(TextMode.MARKDOWN).content(content).build()


def called(series: str, name: str, colour: str) -> tuple[str, tuple[Property, ...]]:
    """An override that gives the series of that legend a name and a colour."""
    return f"/^{series}$/", (("displayName", name), ("color", _fixed(colour).build()))


def named(*shown: State, suffix: str = "") -> tuple[tuple[str, tuple[Property, ...]], ...]:
    """Overrides that give series called by a state's label its name (and ``suffix``) and its colour."""
    return tuple(called(state.label, state.name + suffix, state.colour) for state in shown)


def thresholds(*steps: tuple[float | None, str]) -> Property:
    """A property of a table's column: from which value on (the first: ``None``) it has which colour."""
    return "thresholds", _thresholds(steps).build()


def panel_id(title: str) -> int:
    """The number of the panel of that title: of the title itself, so that links outlive a change of the layout."""
    return 1 + crc32(title.encode()) % 99_999


def panel_link(title: str, url: str) -> build.DashboardLink:
    """A link in a panel's corner."""
    return build.DashboardLink(title).type(model.DashboardLinkType.LINK).icon("external link").url(url)


def runbook_url(entry: str) -> str:
    """Where Grafana shows an entry of the runbook. Of a panel's links it fills in time and variables by these names."""
    return f"/d/{SERVICE}?viewPanel=panel-{panel_id(entry)}&${{__url_time_range}}&${{__all_variables}}"


def _faced(panel: P, face: Face) -> P:
    panel.title(face.title).description(face.about).datasource(SOURCE).unit(face.unit)
    panel.links([panel_link(f"Runbook: {entry}", runbook_url(entry)) for entry in face.runbook])
    panel.thresholds(_thresholds(face.steps))
    if face.low is not None:
        panel.min(face.low)
    if face.high is not None:
        panel.max(face.high)
    if face.decimals is not None:
        panel.decimals(face.decimals)
    for pattern, properties in face.names:
        panel.override_by_regexp(pattern, _properties(properties))
    return panel


def _targets(
    queries: Sequence[Query], form: Format = Format.TIME_SERIES, instant: bool = False
) -> list[Builder[Dataquery]]:
    """The queries as A, B, C …; tables are of one instant and named by their columns."""
    found: list[Builder[Dataquery]] = []
    for ref, query in zip(REFS, queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(SOURCE).format(form)
        target.editor_mode(promql.QueryEditorMode.CODE)
        if form is Format.TABLE:
            found.append(target.instant())
            continue
        if query.legend:
            target.legend_format(query.legend)
        found.append(target.instant() if instant else target.range())
    return found


def _merged(
    titles: Sequence[str], hidden: Iterable[str], first: Sequence[str] = ()
) -> list[model.DataTransformerConfig]:
    """One table of several instant queries: joined on their labels, the columns named and put in order."""
    values = {f"Value #{REFS[place]}" if len(titles) > 1 else "Value": title for place, title in enumerate(titles)}
    hidden = (*hidden, *(name for name, title in values.items() if not title))
    options = {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {name: place for place, name in enumerate((*first, *values))},
        "renameByName": {name: title for name, title in values.items() if title},
    }
    return [
        model.DataTransformerConfig(id_val="merge", options={}),
        model.DataTransformerConfig(id_val="organize", options=options),
    ]


def _properties(properties: Iterable[Property]) -> list[model.DynamicConfigValue]:
    return [model.DynamicConfigValue(id_val=name, value=value) for name, value in properties]


def _thresholds(steps: Iterable[tuple[float | None, str]]) -> build.ThresholdsConfig:
    made = [model.Threshold(value=value, color=colour) for value, colour in steps]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(made)


def _fixed(colour: str) -> build.FieldColor:
    return build.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color(colour)


def _legend(beside: bool = False) -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True)
    if not beside:
        return legend.display_mode(kinds.LegendDisplayMode.LIST).placement(kinds.LegendPlacement.BOTTOM).calcs([])
    legend.display_mode(kinds.LegendDisplayMode.TABLE).placement(kinds.LegendPlacement.RIGHT).calcs([LAST])
    return legend.sort_by("Last *").sort_desc(True)


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs([LAST]).values(False)
