"""Panel types of all dashboards. Each panel has a title, a description of how to read it, and a unit.

Colour is never the only cue: a state has a text (value mappings), a threshold a line, a series a legend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, common, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus as prometheus_builders
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import prometheus
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Panel,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)

from rolecall.dashboards.grafana.promql import scoped

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"

Builder = TypeVar("Builder", timeseries.Panel, stat.Panel, table.Panel, statetimeline.Panel, bargauge.Panel)


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One expression. `legend` in Grafana's syntax: `{{label}}`."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class MappedValue:
    """Text and colour that replace a number."""

    text: str
    colour: str


ValueMappings = Mapping[int, MappedValue]
UP_DOWN: ValueMappings = {0: MappedValue("DOWN", RED), 1: MappedValue("up", GREEN)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A data link. `url` may contain Grafana's variables."""

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class PanelFormat:
    """How values are shown. `limits`: (value from which a colour applies, colour), the first without a value."""

    unit: str = "none"
    _: KW_ONLY
    mappings: ValueMappings | None = None
    limits: Sequence[tuple[float | None, str]] = ()
    decimals: int | None = None
    least: float | None = 0.0
    most: float | None = None
    links: Sequence[Link] = ()
    no_value: str = ""


def lines(title: str, description: str, style: PanelFormat, *queries: PanelQuery, stacked: bool = False) -> Panel:
    panel = _with(timeseries.Panel(), title, description, style, queries)
    panel = panel.line_width(1).fill_opacity(30 if stacked else 5).show_points(common_models.VisibilityMode.AUTO)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if style.limits:
        panel = panel.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        )
    return _of_time(panel).color_scheme(builders.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME)).build()


BAND_POINTS_MAX = 120
"""Each point of the band aggregates all replicas of a role. 30 s apart in an hour: fast enough for 1,000 replicas."""
SUSPECT, LOWEST, MEDIAN, HIGHEST = "this replica, rank {{rank}}", "peers: lowest", "peers: median", "peers: highest"


def band(title: str, description: str, style: PanelFormat, own: str, peers: str) -> Panel:
    """A replica's series over the band (lowest, median, highest) of its peers."""
    queries = (
        PanelQuery(own, SUSPECT),
        PanelQuery(f"min({peers})", LOWEST),
        PanelQuery(f"quantile(0.5, {peers})", MEDIAN),
        PanelQuery(f"max({peers})", HIGHEST),
    )
    panel = _of_time(_with(timeseries.Panel(), title, description, style, queries)).line_width(2)
    panel = panel.max_data_points(BAND_POINTS_MAX)
    panel = panel.show_points(common_models.VisibilityMode.AUTO).fill_opacity(0)
    edge = [_value("color", {"mode": "fixed", "fixedColor": GREY}), _value("custom.lineWidth", 1)]
    dashed = _value("custom.lineStyle", {"fill": "dash", "dash": [6, 6]})
    panel = panel.override_by_name(LOWEST, edge)
    panel = panel.override_by_name(
        HIGHEST, [*edge, _value("custom.fillBelowTo", LOWEST), _value("custom.fillOpacity", 15)]
    )
    panel = panel.override_by_name(MEDIAN, [*edge, dashed])
    return panel.color_scheme(builders.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME)).build()


def numbers(title: str, description: str, style: PanelFormat, *queries: PanelQuery, trend: bool = False) -> Panel:
    """The latest value of each series as a large number."""
    panel = _with(stat.Panel(), title, description, style, queries, instant=not trend)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    panel = panel.graph_mode(common_models.BigValueGraphMode.AREA if trend else common_models.BigValueGraphMode.NONE)
    panel = panel.color_mode(common_models.BigValueColorMode.VALUE).wide_layout(False)
    panel = panel.text_mode(
        common_models.BigValueTextMode.VALUE_AND_NAME
        if any(q.legend for q in queries)
        else common_models.BigValueTextMode.VALUE
    )
    return panel.build()


def bars(title: str, description: str, style: PanelFormat, *queries: PanelQuery) -> Panel:
    """The latest value of each series as a bar."""
    panel = _with(bargauge.Panel(), title, description, style, queries, instant=True)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    panel = panel.orientation(common_models.VizOrientation.HORIZONTAL)
    return panel.display_mode(common_models.BarGaugeDisplayMode.BASIC).build()


def states(title: str, description: str, style: PanelFormat, *queries: PanelQuery) -> Panel:
    """States over time, a row for each series."""
    assert style.mappings, f"{title}: a state panel needs value mappings"
    panel = _with(statetimeline.Panel(), title, description, style, queries)
    panel = panel.show_value(common_models.VisibilityMode.AUTO).merge_values(True).row_height(0.8).fill_opacity(70)
    return panel.legend(_legend([])).color_scheme(builders.FieldColor().mode(FieldColorModeId.THRESHOLDS)).build()


def rows(title: str, description: str, style: PanelFormat, query: PanelQuery, columns: Mapping[str, str]) -> Panel:
    """A table of the latest values. `columns`: label -> heading, in order; the value comes last, under the query's
    legend. Value mappings and unit apply to the value only, not to labels."""
    plain = replace(style, unit="none", mappings=None, limits=())
    panel = _with(table.Panel(), title, description, plain, (query,), instant=True, as_table=True)
    order = {name: n for n, name in enumerate((*columns, "Value"))}
    organize = DataTransformerConfig(
        id_val="organize",
        options={
            "excludeByName": {"Time": True},
            "indexByName": order,
            "renameByName": {**columns, "Value": query.legend},
        },
    )
    of_value = [_value("unit", style.unit)]
    if style.mappings:
        of_value.append(_value("mappings", [_mapping(style.mappings)]))
    if style.limits or style.mappings:
        of_value.append(_value("thresholds", _thresholds(style).build()))
        of_value.append(_value("custom.cellOptions", {"type": "color-text"}))
    panel = panel.with_transformation(organize).override_by_name(query.legend, of_value)
    return panel.show_header(True).cell_height(common_models.TableCellHeight.SM).build()


def _with(
    panel: Builder,
    title: str,
    description: str,
    style: PanelFormat,
    queries: Sequence[PanelQuery],
    *,
    instant: bool = False,
    as_table: bool = False,
) -> Builder:
    panel = panel.title(title).description(" ".join(description.split())).datasource(DATASOURCE).unit(style.unit)
    for n, query in enumerate(queries):
        target = prometheus_builders.Dataquery().expr(scoped(query.expression)).ref_id(chr(ord("A") + n))
        target = target.datasource(DATASOURCE).editor_mode(prometheus.QueryEditorMode.CODE)
        target = target.legend_format(query.legend or "__auto")
        target = target.instant() if instant else target.range()
        if as_table:
            target = target.format(prometheus.PromQueryFormat.TABLE)
        panel = panel.with_target(target)
    if style.mappings:
        panel = panel.mappings([_mapping(style.mappings)])
    if style.decimals is not None:
        panel = panel.decimals(style.decimals)
    if style.least is not None:
        panel = panel.min(style.least)
    if style.most is not None:
        panel = panel.max(style.most)
    if style.no_value:
        panel = panel.no_value(style.no_value)
    if style.links:
        panel = panel.data_links([builders.DashboardLink(link.title).url(link.url) for link in style.links])
    return panel.thresholds(_thresholds(style))


def _thresholds(style: PanelFormat) -> builders.ThresholdsConfig:
    steps = [Threshold(value=v, color=c) for v, c in (style.limits or ((None, GREEN if style.mappings else BLUE),))]
    return builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _of_time(panel: timeseries.Panel) -> timeseries.Panel:
    tip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    return panel.legend(_legend(["lastNotNull", "max"])).tooltip(tip.sort(common_models.SortOrder.DESCENDING))


def _legend(calcs: list[str]) -> common.VizLegendOptions:
    mode = common_models.LegendDisplayMode.TABLE if calcs else common_models.LegendDisplayMode.LIST
    legend = common.VizLegendOptions().show_legend(bool(calcs)).display_mode(mode).calcs(calcs)
    return legend.placement(common_models.LegendPlacement.BOTTOM)


def _mapping(mappings: ValueMappings) -> ValueMapping:
    options = {
        str(value): ValueMappingResult(text=mapped.text, color=mapped.colour, index=n)
        for n, (value, mapped) in enumerate(mappings.items())
    }
    return ValueMap(options=options)


def _value(name: str, value: object) -> DynamicConfigValue:
    return DynamicConfigValue(id_val=name, value=value)
