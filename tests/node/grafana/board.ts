/**
 * What a dashboard's JSON may be, from Grafana's own types. These leave the insides of panels open ("any record"); here
 * each kind of panel that the dashboards use has the options and field settings of its plugin, and no other key.
 */
import type {
  AnnotationQuery,
  Dashboard,
  DataQuery,
  FieldColor,
  FieldConfig,
  LineStyle,
  MatcherConfig,
  Panel,
  RowPanel,
  TableCellOptions,
  ThresholdsConfig,
} from "@grafana/schema";
import type * as barchart from "@grafana/schema/dist/esm/raw/composable/barchart/panelcfg/x/BarChartPanelCfg_types.gen";
import type * as bargauge from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen";
import type * as heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as statetimeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as text from "@grafana/schema/dist/esm/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen";
import type * as timeseries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

/** A type as JSON writes it: in the place of an enumeration's member stands its value. */
type Plain<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends object
      ? { [K in keyof T]: Plain<T[K]> }
      : T;

/** What Grafana's Prometheus plugin adds to a query and to an annotation; the schema has no types of it. */
type Query = DataQuery & {
  expr: string;
  format?: "time_series" | "table" | "heatmap";
  legendFormat?: string;
  instant?: boolean;
  range?: boolean;
  editorMode?: "code" | "builder";
};
type Annotation = AnnotationQuery<Query> & { titleFormat?: string; textFormat?: string };

/** What the dashboards override for single series and columns; in the schema, any value may have any name. */
type Override =
  | { id: "unit" | "displayName"; value: string }
  | { id: "decimals" | "custom.fillOpacity"; value: number }
  | { id: "color"; value: FieldColor }
  | { id: "thresholds"; value: ThresholdsConfig }
  | { id: "links"; value: { title: string; url: string; targetBlank: boolean }[] }
  | { id: "custom.lineStyle"; value: LineStyle }
  | { id: "custom.cellOptions"; value: TableCellOptions };

type Settings<Custom> = {
  defaults: Omit<FieldConfig, "custom"> & { custom?: Custom };
  overrides: { matcher: MatcherConfig<string>; properties: Override[] }[];
};
type Shown<Type extends string, Options, Custom> = Plain<
  Omit<Panel, "type" | "options" | "fieldConfig" | "targets"> & {
    type: Type;
    options: Options;
    fieldConfig?: Settings<Custom>;
    targets?: Query[];
  }
>;
type AnyPanel =
  | Shown<"barchart", barchart.Options, barchart.FieldConfig>
  | Shown<"bargauge", bargauge.Options, never>
  | Shown<"heatmap", heatmap.Options, heatmap.FieldConfig>
  | Shown<"stat", stat.Options, never>
  | Shown<"state-timeline", statetimeline.Options, statetimeline.FieldConfig>
  | Shown<"table", table.Options, table.FieldConfig>
  | Shown<"text", text.Options, never>
  | Shown<"timeseries", timeseries.Options, timeseries.FieldConfig>
  | Plain<RowPanel>;

export type Board = Plain<Omit<Dashboard, "panels" | "annotations"> & { annotations?: { list?: Annotation[] } }> & {
  panels: AnyPanel[];
};
