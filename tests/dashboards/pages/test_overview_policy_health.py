"""Policy health on the Overview page: charts of the steps' metrics, a note where there are none."""

import math
from pathlib import Path

import pytest

from rolecall.core.journal.events import EventKind as K
from rolecall.core.policy_health import BY_NAME
from rolecall.core.rundir import RunDir
from rolecall.dashboards.data.progress import Bucket, Curve, merged
from rolecall.dashboards.pages import charts
from rolecall.dashboards.pages.overview.page import PANELS, drawn
from rolecall.dashboards.settings import Settings
from tests.dashboards.made_runs import MadeRun
from tests.dashboards.pages.test_overview import _contrast, text
from tests.dashboards.pages.test_overview import drawn as page_drawn
from tests.events import filled
from tests.fake_run import made_health


def bucket(step: int, **signs: float) -> Bucket:
    return Bucket(
        first_step=step, last_step=step, at=0.0, num=1, reward=0.5, seconds=1.0, seconds_max=1.0, tokens=9, signs=signs
    )  # fmt: skip


def test_a_run_whose_steps_report_it(fake_run: RunDir) -> None:
    at = page_drawn(Settings(journal_url=fake_run.database_url, run=fake_run))
    shown = [panel for panel in PANELS if "critic" not in panel.title]
    assert len(at.get("vega_lite_chart")) == 3 + len(shown)
    captions = [c.value for c in at.caption]
    assert all(panel.normal([legend for _, legend in panel.lines]) in captions for panel in shown)
    assert "Policy health" in [s.value for s in at.subheader]


def test_a_run_without_metrics_has_no_such_section(tmp_path: Path) -> None:
    at = page_drawn(MadeRun(tmp_path).settings())
    assert len(at.get("vega_lite_chart")) == 3 and "Policy health" not in [s.value for s in at.subheader]


def test_what_a_damaged_journal_says_of_it_leaves_the_page_whole(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, num_steps=2)
    odd = {"kl_sampler": math.inf, "ratio_max": 1e308, "log_ratio_max": math.nan, "later": 1}
    for step, health in enumerate((odd, {"entropy": 0.5}, {}), start=2):
        made.say(K.STEP_COMMITTED, {"step": step, "seconds": 0.5, "health": health})
    for health in ({"entropy": "<b>much</b>"}, "ill", None):
        body = {**filled(K.STEP_COMMITTED, {"step": 5}).to_body(), "health": health}
        made.journal.append_unchecked(K.STEP_COMMITTED, body)
    at = page_drawn(made.settings())
    assert len(at.get("vega_lite_chart")) == 3 + 1 and "<b>much" not in text(at)


def test_a_critic_has_panels_of_its_own() -> None:
    plain = [bucket(n, **made_health(n, 9)) for n in range(9)]
    assert not [p for p, _ in drawn(plain) if "critic" in p.title]
    critic = [bucket(n, value_loss=0.5, explained_variance=-0.2) for n in range(9)]
    assert [p.title for p, _ in drawn(critic)] == ["critic explained variance", "critic loss"]


def test_a_sign_that_only_some_steps_had_is_a_line_of_those() -> None:
    curve = [bucket(0, entropy=1.0, response_length=7.0), bucket(1, entropy=0.9), bucket(2, response_length=8.0)]
    found = {panel.title: lines for panel, lines in drawn(curve)}
    assert found["response length, tokens"] == {"mean": [{"step": 0, "value": 7.0}, {"step": 2, "value": 8.0}]}
    assert [p["value"] for p in found["entropy, nats per token"]["entropy"]] == [1.0, 0.9]
    assert set(found) == {"response length, tokens", "entropy, nats per token"}


def test_a_caption_is_about_the_lines_that_are_drawn() -> None:
    ((panel, lines),) = drawn([bucket(n, truncated_fraction=1.0, stale_fraction=0.0) for n in range(9)])
    assert panel.normal(lines).startswith("Truncated: ") and "Filtered" not in panel.normal(lines)


def test_a_share_has_no_axis_beyond_all_of_it() -> None:
    def top(figures: str) -> float:
        spec = charts.curves(
            {"truncated": LINES["mean"], "one": [{"step": 1.0, "value": 0.95}]},
            "shares",
            across=(0, 9),
            figures=figures,
        )
        return float(spec["layer"][2]["encoding"]["y"]["scale"]["domain"][1])

    assert top(".1~%") == 1.0 and top("~g") > 1.0


def test_every_line_is_a_sign() -> None:
    reported = [name for panel in PANELS for name, _ in panel.lines]
    assert set(reported) <= set(BY_NAME) and len(reported) == len(set(reported))
    assert all(len(panel.lines) <= len(charts.DASHES) for panel in PANELS)


def test_several_steps_as_one_point_keep_means_and_extremes() -> None:
    both = merged(bucket(1, entropy=1.0, response_length_max=20.0), bucket(2, entropy=3.0, response_length_max=8.0))
    assert both.signs == {"entropy": 2.0, "response_length_max": 20.0}
    one = merged(bucket(1, entropy=1.0), bucket(2, kl_sampler=0.5))
    assert one.signs == {"entropy": 1.0, "kl_sampler": 0.5}
    curve = Curve()
    for step in range(5_000):
        curve.add(bucket(step, entropy=2.0, log_ratio_max=9.0 if step == 77 else 0.001))
    points = curve.points()
    assert {p.signs["entropy"] for p in points} == {2.0}
    assert max(p.signs["log_ratio_max"] for p in points) == 9.0


@pytest.mark.parametrize("highest", [76, 77])
@pytest.mark.parametrize("num_steps", [78, 199, 200, 201, 399, 400, 1_000])
def test_the_highest_value_is_drawn_however_long_the_run(num_steps: int, highest: int) -> None:
    curve = Curve()
    for step in range(num_steps):
        curve.add(bucket(step, log_ratio_max=9.0 if step == highest else 0.001))
    ((_, lines),) = drawn(curve.points())
    (shown,) = lines.values()
    assert len(shown) == len(curve.points()), "a point that is left out may be the one that matters"
    assert max(p["value"] for p in shown) == 9.0


LINES = {name: [{"step": float(n), "value": n / 100} for n in range(40)] for name in ("mean", "longest")}


def test_lines_are_distinguishable_without_colours_and_have_one_axis() -> None:
    spec = charts.curves(LINES, "answers", across=(0, 99))
    encoding = spec["layer"][2]["encoding"]
    assert encoding["color"]["scale"]["domain"] == encoding["strokeDash"]["scale"]["domain"] == ["mean", "longest"]
    assert encoding["strokeDash"]["scale"]["range"] == [[1, 0], [6, 3]] and "data" not in spec
    assert encoding["x"]["scale"]["domain"] == [0, 100] and encoding["y"]["scale"]["domain"][0] == 0
    columns = charts.columns(LINES)
    assert columns["line"] == ["mean"] * 40 + ["longest"] * 40 and len(columns["step"]) == len(columns["value"]) == 80
    alone = charts.curves({"mean": LINES["mean"]}, "answers", across=(0, 99))
    assert alone["layer"][2]["encoding"]["color"]["legend"] is None
    first = charts.curves({"mean": LINES["mean"][:1]}, "answers", across=(0, 0))
    assert first["layer"][2]["mark"]["type"] == "point"


@pytest.mark.parametrize("colour", [charts.LINE, charts.SECOND, charts.THIRD, charts.FAULT])
def test_colours_are_seen_on_both_pages(colour: str) -> None:
    assert _contrast(colour, "#ffffff") >= 3 and _contrast(colour, "#171614") >= 3
