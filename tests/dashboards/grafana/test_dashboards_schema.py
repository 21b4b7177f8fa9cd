"""Exported dashboards satisfy Grafana's published types (`@grafana/schema`), as TypeScript's compiler sees it."""

import copy
from pathlib import Path
from typing import Any

import pytest

from rolecall.dashboards.grafana.export import documents
from tests.dashboards.grafana.typescript import HOME, complaints

pytestmark = pytest.mark.xdist_group("grafana-schema")  # one worker installs the packages


def _panel(document: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in document["panels"] if p["type"] == kind)
    return found


def test_all_dashboards_satisfy_the_schema(tmp_path: Path) -> None:
    assert complaints(tmp_path, documents()) == []


def test_what_the_schema_does_not_know_is_found(tmp_path: Path) -> None:
    """One copy for each mistake, each with that mistake alone."""
    wrong = []

    def plant(name: str) -> dict[str, Any]:
        document = copy.deepcopy(documents("http://127.0.0.1:8501")[0])
        document["uid"] = name
        wrong.append(document)
        return document

    plant("of-board")["colour"] = "red"
    plant("of-time")["time"]["til"] = "now"
    plant("of-variable")["templating"]["list"][1]["multy"] = True
    plant("of-annotation")["annotations"]["list"][0]["titel"] = "x"
    _panel(plant("of-panel"), "timeseries")["titel"] = "x"
    _panel(plant("of-options"), "timeseries")["options"]["legend"]["mode"] = "list"
    _panel(plant("of-field"), "timeseries")["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1
    _panel(plant("of-target"), "timeseries")["targets"][0]["exprr"] = "up"
    _panel(plant("of-enum"), "stat")["options"]["colorMode"] = "rainbow"
    _panel(plant("of-row"), "row")["colapsed"] = True
    _panel(plant("of-table"), "table")["options"]["showHeadr"] = True
    found = complaints(tmp_path, wrong)
    assert {line.partition(".ts(")[0] for line in found} == {d["uid"] for d in wrong}
    assert all("error TS2353" in line or "error TS2322" in line or "error TS2561" in line for line in found), found


def test_the_lock_names_no_registry() -> None:
    assert "resolved" not in (HOME / "package-lock.json").read_text()
