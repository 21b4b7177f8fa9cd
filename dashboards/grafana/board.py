"""A dashboard: shared variables, incident annotations and links, and rows of panels, left to right.

Panels and dashboards have fixed ids, so links to them stay valid. Variables select what is shown: `run` is a run, the
hidden `watch` follows from it (the watches of that run), `instance` selects agents.
"""

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    AnnotationContainer,
    AnnotationQuery,
    AnnotationTarget,
    Dashboard,
    DashboardCursorSync,
    DataSourceRef,
    GridPos,
    Panel,
    RowPanel,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from rolecall.dashboards.grafana.panels import DATASOURCE, Link
from rolecall.dashboards.grafana.promql import labels_of, scoped

TAG = "rolecall"
"""Tag of dashboards, and of the annotations that `rolecall grafana annotate` writes."""
REFRESH = "30s"
ANNOTATION_STEP = "15s"
"""Query step of incident annotations: points this close are one region."""
UID_CHARS_MAX = 40
WIDTH = 24
"""Columns of Grafana's grid."""

VARIABLE_REF = "PrometheusVariableQueryEditor-VariableQuery"
LABEL_VALUES, QUERY_RESULT = 1, 3
"""Query types of variables in Grafana's Prometheus data source."""

OVERVIEW, WATCHED, TRAINING, ROLES, REPLICA, GPUS, NETWORK, HEALTH = (
    f"rolecall-{name}" for name in ("overview", "watched", "training", "roles", "replica", "gpus", "network", "health")
)
"""UIDs of the dashboards."""

EVERYTHING = ".+"
OF_AGENT, OF_EXPORTER, OF_WATCH = "rolecall_agent_build_info", "DCGM_FI_DEV_GPU_TEMP", "rolecall_watch_build_info"
"""A metric that identifies each kind of server."""


class PanelRow:
    """Panels side by side, all of one height, each with its width (of 24); they wrap."""

    def __init__(
        self, title: str, *panels: Panel, widths: int | Sequence[int] = 8, height: int = 8, collapsed: bool = False
    ) -> None:
        """`widths`: of all panels, or of each. Grafana runs the queries of a `collapsed` row when it is opened."""
        self.title, self.height, self.panels, self.collapsed = title, height, panels, collapsed
        self.widths = (widths,) * len(panels) if isinstance(widths, int) else tuple(widths)


class _IncidentQuery(AnnotationQuery):
    """Fields of an annotation query that Grafana's Prometheus data source reads but its schema does not list. The
    expression appears twice, because some versions read it from `target` and others from the query."""

    def to_json(self) -> dict[str, object]:
        return {
            **super().to_json(),
            "target": {"refId": "Anno", "expr": self.expr, "datasource": DATASOURCE, "interval": ANNOTATION_STEP},
            "titleFormat": "{{replica}}: {{fault}}",
            "textFormat": "role {{role}}, node {{node}}",
            "tagKeys": "role,fault",
            "step": ANNOTATION_STEP,
            "useValueForTime": True,  # milliseconds since 1970
        }


def board(
    uid: str, title: str, description: str, variables: Iterable[builders.QueryVariable], rows: Iterable[PanelRow]
) -> Dashboard:
    """Builds a dashboard. Raises ValueError if a row does not fit."""
    if len(uid) > UID_CHARS_MAX:
        raise ValueError(f"{uid}: a uid has at most {UID_CHARS_MAX} characters")
    made = builders.Dashboard(f"rolecall: {title}").uid(uid).description(" ".join(description.split()))
    made = made.tags([TAG]).readonly().refresh(REFRESH).time("now-1h", "now").timezone("browser")
    made = made.tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    for variable in variables:
        made = made.with_variable(variable)
    others = [(f"/d/{other}", name) for other, name in _PAGES if other != uid]
    made = made.links([builders.DashboardLink(n).url(url).include_vars(True).keep_time(True) for url, n in others])
    dashboard = made.build()
    dashboard.panels = list(_placed(rows))
    dashboard.annotations = _annotations()
    return dashboard


def document(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as JSON. Drops interval fields that the builders add to variables and the schema does not know."""
    made: dict[str, Any] = json.loads(json.dumps(dashboard, cls=JSONEncoder))
    for variable in made["templating"]["list"]:
        for name in ("auto", "auto_min", "auto_count"):
            variable.pop(name, None)
    return made


def to(uid: str, *variables: str) -> str:
    """URL of another dashboard with the current time range, data source and job; `variables` as `var-role=...`."""
    kept = ("${__url_time_range}", "${datasource:queryparam}", "${job:queryparam}", "${run:queryparam}", *variables)
    return f"/d/{uid}?" + "&".join(kept)


# Series links use `__field.labels`, table links `__data.fields`.
SERIES_TO_ROLE = Link(title="This role", url=to(ROLES, "var-role=${__field.labels.role}"))
SERIES_TO_REPLICA = Link(
    title="Compare this replica with its peers",
    url=to(REPLICA, "var-role=${__field.labels.role}", "var-replica=${__field.labels.replica}"),
)
ROW_TO_REPLICA = Link(
    title="Compare this replica with its peers",
    url=to(REPLICA, "var-role=${__data.fields.role}", "var-replica=${__data.fields.replica}"),
)
ROW_TO_GPUS = Link(title="GPUs of its node", url=to(GPUS, "var-node=${__data.fields.node}"))
ROW_TO_NETWORK = Link(title="Network of its node", url=to(NETWORK, "var-node=${__data.fields.node}"))


def incidents(address: str) -> tuple[Link, ...]:
    """Link to the Incidents page of `rolecall dashboard`, if its address is known."""
    return (Link(title="Incidents of this run", url=address.rstrip("/") + "/incidents"),) if address else ()


class Choice(Enum):
    ONE = "one"
    SEVERAL = "several"
    ANY = "any"  # all by default
    ANY_NAMED = "any named"  # all by default, but only existing values: not those of another run


def query_variable(
    name: str, label: str, query: str, choice: Choice = Choice.ANY, *, hidden: bool = False
) -> builders.QueryVariable:
    """A variable whose values come from Prometheus, refreshed when the time range changes."""
    kind = QUERY_RESULT if query.startswith("query_result(") else LABEL_VALUES
    made = builders.QueryVariable(name).label(label).query({"query": query, "refId": VARIABLE_REF, "qryType": kind})
    made = made.datasource(DATASOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    made = made.sort(VariableSort.ALPHABETICAL_CASE_INSENSITIVE_ASC).multi(choice is not Choice.ONE)
    if choice in (Choice.ANY, Choice.ANY_NAMED):
        made = made.include_all(True).current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    if choice is Choice.ANY:
        made = made.all_value(EVERYTHING)
    return made.hide(VariableHide.HIDE_VARIABLE) if hidden else made


def of_servers() -> list[builders.QueryVariable]:
    """Variables that select servers, on every dashboard."""
    servers, agents = _any_of(OF_WATCH, OF_AGENT, OF_EXPORTER), _any_of(OF_AGENT, OF_EXPORTER)
    runs = 'label_values(rolecall_run_info{job=~"$job"},run)'
    watches = 'label_values(rolecall_run_info{job=~"$job",run=~"$run"},instance)'
    return [
        query_variable("job", "Scrape job", f"label_values({{{servers}}},job)"),
        query_variable("run", "Run", runs, Choice.ONE),
        query_variable("watch", "Watch", watches, Choice.ANY_NAMED, hidden=True),
        query_variable("instance", "Agent", f'label_values({{{agents},job=~"$job"}},instance)'),
    ]


def values_of(label: str, title: str, metric: str, choice: Choice = Choice.ANY) -> builders.QueryVariable:
    """Variable with the values of a label, on the selected servers; `metric` may have matchers."""
    return query_variable(label, title, f"label_values({scoped(metric)},{label})", choice)


def _any_of(*metrics: str) -> str:
    assert all(labels_of(name) for name in metrics)  # each is known
    return f'__name__=~"{"|".join(metrics)}"'


_PAGES = (
    (OVERVIEW, "Run overview"),
    (WATCHED, "Watched job"),
    (TRAINING, "Training health"),
    (ROLES, "Roles"),
    (REPLICA, "One replica"),
    (GPUS, "GPUs of a node"),
    (NETWORK, "Network of a node"),
    (HEALTH, "rolecall health"),
)


def _annotations() -> AnnotationContainer:
    """Incidents from two sources: a metric with the time at which each was opened (also of incidents that closed before
    the next scrape), and the regions that `rolecall grafana annotate` wrote for the selected run."""
    seen = _IncidentQuery(
        name="Incidents (metric)",
        datasource=DATASOURCE,
        icon_color="red",
        expr=scoped("1000 * max by (node, role, replica, fault) (rolecall_incident_recent_timestamp_seconds)"),
    )
    target = AnnotationTarget(limit=100, match_any=False, tags=[TAG, "run:$run"], type_val="tags")
    written = AnnotationQuery(
        name="Incidents (annotated)",
        datasource=DataSourceRef(type_val="grafana", uid="-- Grafana --"),
        icon_color="orange",
        target=target,
    )
    return AnnotationContainer(list_val=[seen, written])


def _placed(rows: Iterable[PanelRow]) -> Iterable[Panel | RowPanel]:
    top = 0
    for n, row in enumerate(rows, start=1):
        first = 100 * n
        place = GridPos(x=0, y=top, w=WIDTH, h=1)
        head = RowPanel(title=row.title, id_val=first, collapsed=row.collapsed, panels=[], grid_pos=place)
        below = _in_row(row, first, top + 1)
        if row.collapsed:
            head.panels = below
            yield head
            top += 1
        else:
            yield head
            yield from below
            top = max(panel.grid_pos.y for panel in below if panel.grid_pos) + row.height


def _in_row(row: PanelRow, first: int, top: int) -> list[Panel]:
    left = 0
    for m, (width, panel) in enumerate(zip(row.widths, row.panels, strict=True), start=1):
        if left + width > WIDTH:
            left, top = 0, top + row.height
        panel.id_val, panel.grid_pos = first + m, GridPos(x=left, y=top, w=width, h=row.height)
        left += width
    return list(row.panels)
