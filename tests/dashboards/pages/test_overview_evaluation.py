"""Held-out reward and progress in the dataset on the Overview page."""

import math
from pathlib import Path

from rolecall.core.journal.events import EventKind as K
from tests.dashboards.made_runs import MadeRun
from tests.dashboards.pages.test_overview import drawn, text
from tests.events import filled

SECTION = "Held-out prompts and dataset"


def test_a_run_without_them_has_no_such_section(tmp_path: Path) -> None:
    at = drawn(MadeRun(tmp_path).settings())
    assert SECTION not in [s.value for s in at.subheader]


def test_held_out_reward_with_its_interval_and_the_epoch(tmp_path: Path) -> None:
    before = len(drawn(MadeRun(tmp_path / "without").settings()).get("vega_lite_chart"))
    made = MadeRun(tmp_path / "with")
    for step, reward in ((0, 0.1), (10, 0.3), (20, 0.625)):
        body = {
            "step": step,
            "prompts": 40,
            "reward": reward,
            "reward_low": reward - 0.05,
            "reward_high": reward + 0.05,
            "pass_at": {"1": 0.2, "8": 0.775},
            "unscored": {"reward_failed": 2},
            "response_length": 31.0,
        }
        made.journal.append(filled(K.EVALUATION_FINISHED, body))
    dataset = {"rows": 200, "rows_seen": 250, "dropped": {"prompt too long": 3}}
    made.journal.append(filled(K.STEP_COMMITTED, {"step": 30, "seconds": 0.5, "dataset": dataset}))
    at = drawn(made.settings())
    page = text(at)
    assert SECTION in [s.value for s in at.subheader]
    assert len(at.get("vega_lite_chart")) == before + 2
    assert "0.625" in page and "95 %: 0.575 to 0.675" in page and "77.5 %" in page
    assert "2 not scored: reward_failed" in page and "25 % of its 200 rows; 250 seen" in page
    assert "3 prompt too long" in page


def test_what_a_damaged_journal_says_of_them_leaves_the_page_whole(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.journal.append(filled(K.EVALUATION_FINISHED, {"step": 2**70, "reward": 0.5}))
    made.journal.append(filled(K.EVALUATION_FINISHED, {"step": 3, "reward": math.inf, "unscored": {"<b>x": 1}}))
    odd = {"rows": 0, "rows_seen": -3, "dropped": {"<b>y": 1}}
    made.journal.append(filled(K.STEP_COMMITTED, {"step": 30, "seconds": 0.5, "dataset": odd}))
    page = text(drawn(made.settings()))
    assert "<b>x" not in page and "<b>y" not in page
