"""The kinds of panels: line chart, stat, table and so on, each with the same settings wherever it is used.

A function makes a panel of its kind from ``PanelOptions`` (title, description, unit …) and ``Query`` objects. It sets
what the SDK leaves out by default, such as the legend and a tooltip for all series.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

from grafana_foundation_sdk.builders import (
    barchart,
    bargauge,
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.builders import text as texts
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heats
from grafana_foundation_sdk.models import prometheus as promql
from grafana_foundation_sdk.models.dashboard import Panel
from grafana_foundation_sdk.models.text import TextMode

from dashboards.states import STATES, State

__all__ = [
    "SERVICE",
    "SOURCE",
    "PanelOptions",
    "Property",
    "Query",
    "bars",
    "series_style",
    "columns",
    "heat",
    "lines",
    "state_styles",
    "number",
    "panel_id",
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
    """A PromQL expression and the names of its series, where ``{{label}}`` stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelOptions:
    """What every panel with numbers has: title, description, unit, thresholds and links."""

    title: str
    about: str
    """The panel's description: how to read it."""
    unit: str
    low: float | None = 0
    high: float | None = None
    decimals: int | None = None
    steps: tuple[tuple[float | None, str], ...] = ((None, "text"),)
    """Thresholds: (least value, colour); the first value is ``None``."""
    runbook: tuple[str, ...] = ()
    """Headings of the runbook's entries that the panel links to."""
    names: tuple[tuple[str, tuple[Property, ...]], ...] = ()
    """Overrides by regular expression on the series' names."""


def lines(
    options: PanelOptions, *queries: Query, stacked: bool = False, beside: bool = False, held: bool = False
) -> Panel:
    """Lines over time.

    ``stacked`` fills and stacks the areas. ``beside`` puts the legend to the right, as a table of last values, for many
    series. ``held`` draws steps instead of slopes, for counts.
    """
    panel = _with_options(timeseries.Panel(), options).targets(_targets(queries))
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
    panel.legend(_legend(beside)).tooltip(_tooltip()).line_width(1).fill_opacity(70 if stacked else 8)
    panel.show_points(kinds.VisibilityMode.AUTO).point_size(4)
    if stacked:
        panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if held:
        panel.line_interpolation(kinds.LineInterpolation.STEP_AFTER)
    return panel.build()


def number(options: PanelOptions, *queries: Query, instant: bool = False, named: bool = False) -> Panel:
    """The last value in large digits; ``named`` adds the name of the series."""
    panel = _with_options(stat.Panel(), options).targets(_targets(queries, instant=instant))
    panel.reduce_options(_last()).color_mode(kinds.BigValueColorMode.VALUE)
    panel.graph_mode(kinds.BigValueGraphMode.NONE if instant else kinds.BigValueGraphMode.AREA)
    panel.text_mode(kinds.BigValueTextMode.VALUE_AND_NAME if named else kinds.BigValueTextMode.AUTO)
    return panel.build()


def bars(options: PanelOptions, *queries: Query, colour: str) -> Panel:
    """A horizontal bar for each series' last value."""
    panel = _with_options(bargauge.Panel(), options).targets(_targets(queries)).color_scheme(_fixed(colour))
    panel.reduce_options(_last()).orientation(kinds.VizOrientation.HORIZONTAL).legend(_legend())
    panel.display_mode(kinds.BarGaugeDisplayMode.BASIC).name_placement(kinds.BarGaugeNamePlacement.LEFT)
    return panel.build()


def columns(options: PanelOptions, by: str, *queries: tuple[str, Query]) -> Panel:
    """A stacked horizontal bar for each value of the label ``by``, from instant queries with their colours."""
    panel = _with_options(barchart.Panel(), options).targets(_targets([query for _, query in queries], Format.TABLE))
    panel.transformations(_merged([query.legend for _, query in queries], hidden=("Time", "job")))
    for colour, query in queries:
        panel.override_by_name(query.legend, _properties([("color", _fixed(colour).build())]))
    panel.x_field(by).orientation(kinds.VizOrientation.HORIZONTAL).stacking(kinds.StackingMode.NORMAL)
    panel.legend(_legend()).tooltip(_tooltip()).fill_opacity(85).line_width(0)
    return panel.show_value(kinds.VisibilityMode.NEVER).build()


def states(options: PanelOptions, query: Query) -> Panel:
    """A row for each series of state codes, over time, in the states' colours."""
    results = {str(s.code): model.ValueMappingResult(text=s.name, color=s.colour, index=s.code) for s in STATES}
    panel = _with_options(statetimeline.Panel(), options).targets(_targets([query]))
    panel.mappings([model.ValueMap(options=results)]).legend(_legend()).tooltip(_tooltip())
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel.show_value(kinds.VisibilityMode.NEVER).fill_opacity(85).line_width(0).row_height(0.85).merge_values(True)
    return panel.build()


def heat(options: PanelOptions, query: Query, repeat: str, across: int) -> Panel:
    """A heat map of histogram buckets over time, for each value of the variable ``repeat``, ``across`` side by side."""
    panel = _with_options(heatmap.Panel(), options).targets(_targets([query], Format.HEATMAP))
    panel.calculate(False).show_legend()
    panel.y_axis(heatmap.YAxisConfig().unit(options.unit).axis_placement(kinds.AxisPlacement.LEFT))
    colours = heatmap.HeatmapColorOptions().mode(heats.HeatmapColorMode.SCHEME).scheme("Viridis")
    panel.color(colours.fill("dark-blue").scale(heats.HeatmapColorScale.EXPONENTIAL).exponent(0.5).steps(64))
    panel.tooltip(heatmap.HeatmapTooltip().mode(kinds.TooltipDisplayMode.SINGLE).y_histogram(True))
    return panel.repeat(repeat).repeat_direction("h").max_per_row(across).build()


def table(
    options: PanelOptions, *queries: tuple[Query, Sequence[Property]], first: Sequence[tuple[str, Sequence[Property]]]
) -> Panel:
    """A table with a row for each set of labels: the labels ``first``, then a column for each query.

    A column's heading is the legend of its query. A query without a legend only contributes its labels.
    """
    titles = [query.legend for query, _ in queries]
    panel = _with_options(tables.Panel(), options).targets(_targets([query for query, _ in queries], Format.TABLE))
    panel.transformations(_merged(titles, hidden=("Time",), first=[name for name, _ in first]))
    for heading, (_, properties) in zip((*(name for name, _ in first), *titles), (*first, *queries), strict=True):
        if properties:
            panel.override_by_name(heading, _properties(properties))
    return panel.cell_height(kinds.TableCellHeight.SM).cell_options(kinds.TableAutoCellOptions()).build()


def text(title: str, content: str) -> Panel:
    """A text in Markdown."""
    return texts.Panel().title(title).mode(TextMode.MARKDOWN).content(content).build()


def series_style(series: str, name: str, colour: str) -> tuple[str, tuple[Property, ...]]:
    """An override that gives the series with the legend ``series`` a name and a colour."""
    return f"/^{series}$/", (("displayName", name), ("color", _fixed(colour).build()))


def state_styles(*shown: State, suffix: str = "") -> tuple[tuple[str, tuple[Property, ...]], ...]:
    """Overrides that give series whose legend is a state's label the state's name (with ``suffix``) and colour."""
    return tuple(series_style(state.label, state.name + suffix, state.colour) for state in shown)


def thresholds(*steps: tuple[float | None, str]) -> Property:
    """The thresholds of a table's column: (least value, colour); the first value is ``None``."""
    return "thresholds", _thresholds(steps).build()


def panel_id(title: str) -> int:
    """The id of the panel with that title. It depends only on the title, so links survive changes of the layout."""
    return 1 + crc32(title.encode()) % 99_999


def runbook_url(entry: str) -> str:
    """The address of a runbook entry in Grafana, which fills in the time range and the variables in panels' links."""
    return f"/d/{SERVICE}?viewPanel=panel-{panel_id(entry)}&${{__url_time_range}}&${{__all_variables}}"


def _with_options(panel: P, options: PanelOptions) -> P:
    panel.title(options.title).description(options.about).datasource(SOURCE).unit(options.unit)
    links = [build.DashboardLink(f"Runbook: {entry}").url(runbook_url(entry)) for entry in options.runbook]
    panel.links([link.type(model.DashboardLinkType.LINK).icon("external link") for link in links])
    panel.thresholds(_thresholds(options.steps))
    if options.low is not None:
        panel.min(options.low)
    if options.high is not None:
        panel.max(options.high)
    if options.decimals is not None:
        panel.decimals(options.decimals)
    for pattern, properties in options.names:
        panel.override_by_regexp(pattern, _properties(properties))
    return panel


def _targets(
    queries: Sequence[Query], form: Format = Format.TIME_SERIES, instant: bool = False
) -> list[Builder[Dataquery]]:
    """The queries with the ids A, B, C …; queries of tables are instant and have no legend."""
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
    """Transformations that join instant queries on their labels, and name and order the columns."""
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
