"""Each dashboard keeps the rules by which dashboards stay usable: those of grafana/dashboard-linter and of our own."""

import json
import os
import re
import subprocess
import sys

import pytest

from rolecall.core.errors import ConfigError
from rolecall.core.metrics.catalogue import BY_NAME
from rolecall.core.metrics.metric import MetricType
from rolecall.dashboards.grafana import board
from rolecall.dashboards.grafana.export import documents
from rolecall.dashboards.grafana.promql import DCGM_NAMES, RECORDED, SCOPE_LABELS, UnknownMetric, scoped, selectors
from tests.dashboards.grafana.viewing import all_panels

DOCUMENTS = {d["uid"]: d for d in documents()}
SCHEMA_VERSIONS = range(39, 42)
PANEL_KINDS = {"timeseries", "stat", "bargauge", "table", "state-timeline"}
UNITS = {"none", "short", "s", "dtdurations", "percentunit", "bytes", "Bps", "celsius", "watt", "hertz", "cps"} | {
    "dateTimeAsIso",
    "ops",
    "string",
}
SECRET_WORDS = ("password", "token=", "Bearer")


PANELS = [(uid, p["id"]) for uid, d in DOCUMENTS.items() for p in all_panels(d)]
PANEL = {(uid, p["id"]): p for uid, d in DOCUMENTS.items() for p in all_panels(d)}
IDS = [f"{uid}-{PANEL[uid, n]['title']}" for uid, n in PANELS]
each_board = pytest.mark.parametrize("uid", DOCUMENTS)
each_panel = pytest.mark.parametrize("at", PANELS, ids=IDS)


def test_there_is_a_dashboard_for_each_address_that_links_name() -> None:
    assert set(DOCUMENTS) == {
        *(board.OVERVIEW, board.WATCHED, board.TRAINING, board.ROLES, board.REPLICA),
        *(board.GPUS, board.NETWORK, board.HEALTH),
    }


@each_board
def test_a_dashboard_is_what_grafana_expects(uid: str) -> None:
    document = DOCUMENTS[uid]
    assert len(uid) <= board.UID_CHARS_MAX
    assert document["title"] and document["description"] and document["tags"] == [board.TAG]
    assert document["schemaVersion"] in SCHEMA_VERSIONS
    assert document["editable"] is False and document["refresh"] == "30s"
    assert "id" not in document and "version" not in document, "both are the server's"
    rows = [p for p in document["panels"] if p["type"] == "row"]
    panels = [p["id"] for p in (*rows, *all_panels(document))]
    assert len(panels) == len(set(panels))
    assert not any(word in json.dumps(document) for word in SECRET_WORDS)


@each_board
def test_variables_let_people_choose_and_follow_the_time(uid: str) -> None:
    variables = {v["name"]: v for v in DOCUMENTS[uid]["templating"]["list"]}
    assert next(iter(variables)) == "datasource"
    assert variables.pop("datasource")["query"] == "prometheus"
    assert {"job", "instance", "run", "watch"} <= set(variables)
    for name, variable in variables.items():
        assert variable["type"] == "query", name
        assert variable["refresh"] == 2, f"{name}: asked again when the time changes"
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert variable["label"], name
        assert re.match(r"(label_values|query_result)\(", variable["query"]["query"])
    for name in ("job", "instance"):
        assert variables[name]["multi"] and variables[name]["allValue"] == ".+"
    used = set(re.findall(r"\$(?:\{)?([a-z]\w*)", json.dumps(DOCUMENTS[uid]["panels"])))
    known = {*variables, "datasource", "__rate_interval", "__range"}
    assert {n for n in used if not n.startswith("__")} <= known


@each_board
def test_panels_stand_side_by_side(uid: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DOCUMENTS[uid]["panels"]:
        assert bool(panel.get("panels")) == bool(panel.get("collapsed")), "panels of an open row stand beside it"
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= board.WIDTH
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]


@each_board
def test_incidents_are_annotated_from_both_places(uid: str) -> None:
    metric, written = DOCUMENTS[uid]["annotations"]["list"]
    assert (
        metric["datasource"]["uid"] == "${datasource}"
        and "rolecall_incident_recent_timestamp_seconds{" in metric["expr"]
    )
    assert all(
        f"{{{{{label}}}}}" in metric["titleFormat"] + metric["textFormat"] for label in ("role", "replica", "fault")
    )
    assert metric["target"]["expr"] == metric["expr"]
    # The value is the moment, in milliseconds: an incident that was over before the next scrape stands at its own time.
    assert metric["useValueForTime"] is True and metric["expr"].startswith("1000 * ")
    assert written["datasource"]["uid"] == "-- Grafana --" and written["target"]["tags"] == [board.TAG, "run:$run"]
    assert written["target"]["matchAny"] is False


def test_what_is_recorded_is_read() -> None:
    recorded = set(RECORDED)
    targets = [t["expr"] for panel in PANEL.values() for t in panel["targets"]]
    assert recorded and recorded == {s.metric for e in targets for s in selectors(e) if ":" in s.metric}


@each_board
def test_links_lead_to_dashboards_that_are_there_and_carry_the_time(uid: str) -> None:
    document = DOCUMENTS[uid]
    assert {link["url"] for link in document["links"]} == {f"/d/{other}" for other in DOCUMENTS if other != uid}
    assert all(link["includeVars"] and link["keepTime"] for link in document["links"])
    for panel in all_panels(document):
        for link in panel["fieldConfig"]["defaults"].get("links", ()):
            target, _, query = link["url"].removeprefix("/d/").partition("?")
            assert target in DOCUMENTS, link["url"]
            names = {v["name"] for v in DOCUMENTS[target]["templating"]["list"]}
            assert set(re.findall(r"var-(\w+)=", query)) <= names
            assert "${__url_time_range}" in query and "${datasource:queryparam}" in query


@each_panel
def test_a_panel_says_what_it_shows(at: tuple[str, int]) -> None:
    panel = PANEL[at]
    assert panel["type"] in PANEL_KINDS
    assert panel["title"] and panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] in UNITS
    if panel["type"] == "state-timeline" or defaults.get("mappings"):
        assert all(option["text"] for m in defaults["mappings"] for option in m["options"].values()), (
            "colour has its word"
        )


@each_panel
def test_targets_ask_the_chosen_servers(at: tuple[str, int]) -> None:
    targets = PANEL[at]["targets"]
    assert targets and len({t["refId"] for t in targets}) == len(targets)
    for target in targets:
        expression = target["expr"]
        found = list(selectors(expression))
        assert found, f"{expression}: reads no metric"
        for selector in found:
            recorded = ":" in selector.metric  # by a rule, over all servers of a job
            assert set(selector.labels) >= (SCOPE_LABELS - {"instance"} if recorded else SCOPE_LABELS), selector.text
            assert recorded or selector.metric in BY_NAME or selector.metric in DCGM_NAMES
        assert target["datasource"]["uid"] == "${datasource}"
        assert target["instant"] is not target["range"]


@each_panel
def test_rates_follow_the_scrape_interval(at: tuple[str, int]) -> None:
    for target in PANEL[at]["targets"]:
        expression = target["expr"]
        assert set(re.findall(r"\[([^\]]+)\]", expression)) <= {"$__rate_interval", "$__range"}
        for function, inner in re.findall(
            r"\b(rate|increase|sum|avg)\b(?: (?:by|without) \([^)]*\))? ?\(([a-zA-Z_]+)", expression
        ):
            metric = BY_NAME.get(inner)
            if metric is None:
                continue
            if function in ("sum", "avg"):
                assert metric.type is not MetricType.COUNTER, f"{expression}: adds up a counter that may start again"
            else:
                assert metric.type is MetricType.COUNTER, f"{expression}: {inner} is no counter"


def test_a_misspelt_metric_or_label_is_refused_when_it_is_built() -> None:
    with pytest.raises(UnknownMetric, match="rolecall_run_stepp is in neither"):
        scoped("max(rolecall_run_stepp)")
    with pytest.raises(UnknownMetric, match="role:rolecall_process_up:nothing"):
        scoped("role:rolecall_process_up:nothing")
    with pytest.raises(UnknownMetric, match="DCGM_FI_DEV_NOTHING"):
        scoped("DCGM_FI_DEV_NOTHING")
    with pytest.raises(UnknownMetric, match="has no label rolle"):
        scoped('rolecall_process_up{rolle="x"}')


def test_metrics_of_the_watch_are_queried_from_the_watch() -> None:
    assert scoped("rolecall_run_step") == 'rolecall_run_step{job=~"$job",instance=~"$watch"}'
    assert scoped('rolecall_gpu_up{gpu="0"}') == 'rolecall_gpu_up{job=~"$job",instance=~"$instance",gpu="0"}'


def test_the_same_bytes_in_every_process() -> None:
    code = "import json; from rolecall.dashboards.grafana.export import documents; print(json.dumps(documents()))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {json.dumps(documents()) + "\n"}


def test_links_to_incidents_only_where_their_address_is_known() -> None:
    address = "https://rolecall.example/ops"
    with_address = json.dumps(documents(address + "/"))
    assert f"{address}/incidents" in with_address
    assert "/incidents" not in json.dumps(documents())


@pytest.mark.parametrize("address", ["rolecall.example", "ftp://x", "http://", "http://u:p@x", "http://x/?q=1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--incidents-at"):
        documents(address)
