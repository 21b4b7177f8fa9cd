// What an exported dashboard has to be: Grafana's own types, with enums as JSON has them (by value). Panels are checked one
// by one, each against the options and the field configuration of its own kind: in a union an unknown key would pass.
import type { AnnotationQuery, AnnotationTarget, Dashboard, DataSourceRef, FieldConfig, MatcherConfig, Panel, RowPanel, ValueMapping } from "@grafana/schema";
import type { GraphFieldConfig, TableFieldOptions, TableCellOptions } from "@grafana/schema";
import type { Options as BarGaugeOptions } from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen.js";
import type { Options as StatOptions } from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.js";
import type { FieldConfig as StateFields, Options as StateOptions } from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.js";
import type { Options as TableOptions } from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen.js";
import type { Options as TimeSeriesOptions } from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.js";

type IsAny<T> = 0 extends 1 & T ? true : false;

export type Plain<T> =
  IsAny<T> extends true ? T
  : T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends readonly (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> }
  : T;

// Grafana publishes no type for the queries of its Prometheus source: these fields are what that source reads.
interface Target {
  refId: string;
  expr: string;
  datasource: Plain<DataSourceRef>;
  instant: boolean;
  range: boolean;
  format?: "time_series" | "table" | "heatmap";
  legendFormat: string;
  editorMode: "code" | "builder";
}

interface DataLink {
  title: string;
  url: string;
  // The builders write the fields of a dashboard's link, which Grafana passes over here.
  type?: string; icon?: string; tooltip?: string; tags?: string[];
  asDropdown?: boolean; targetBlank?: boolean; includeVars?: boolean; keepTime?: boolean;
}

type Defaults<Fields> = Plain<Omit<FieldConfig, "custom" | "links">> & { custom?: Plain<Fields>; links?: DataLink[] };

// Of overrides Grafana's schema says only `{id, value?}`: those that we write are named.
type Override =
  | { id: "unit"; value: string }
  | { id: "color"; value: { mode: string; fixedColor?: string } }
  | { id: "mappings"; value: Plain<ValueMapping>[] }
  | { id: "thresholds"; value: Plain<NonNullable<FieldConfig["thresholds"]>> }
  | { id: "custom.cellOptions"; value: Plain<TableCellOptions> }
  | { id: "custom.lineWidth" | "custom.fillOpacity"; value: number }
  | { id: "custom.fillBelowTo"; value: string }
  | { id: "custom.lineStyle"; value: Plain<NonNullable<GraphFieldConfig["lineStyle"]>> };

type Of<Options, Fields> = Plain<Omit<Panel, "options" | "fieldConfig" | "targets">> & {
  options: Plain<Partial<Options>>;
  fieldConfig: { defaults: Defaults<Fields>; overrides: { matcher: Plain<MatcherConfig>; properties: Override[] }[] };
  targets: Target[];
};

export type TimeSeries = Of<TimeSeriesOptions, GraphFieldConfig>;
export type Stat = Of<StatOptions, never>;
export type BarGauge = Of<BarGaugeOptions, never>;
export type Table = Of<TableOptions, Partial<TableFieldOptions>>;
export type StateTimeline = Of<StateOptions, StateFields>;
export type Row = Plain<RowPanel>;

export type Board = Partial<Plain<Omit<Dashboard, "panels" | "annotations">>>;

// What Grafana's Prometheus source reads of an annotation query and the schema of dashboards does not list.
export type Annotation = Plain<Omit<AnnotationQuery, "target">> & {
  target: Plain<AnnotationTarget> | { refId: string; expr: string; datasource: Plain<DataSourceRef>; interval: string };
  expr?: string; step?: string; titleFormat?: string; textFormat?: string; tagKeys?: string; useValueForTime?: boolean;
};
