"""Evaluations and progress in the dataset: in the report, on the terminal and in a watch's metrics."""

from contextlib import closing
from typing import Any

from rolecall.core.config.job import parse_job
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.reports.html import evaluation_sentence, render_html
from rolecall.reports.report import write_report
from rolecall.views.run_totals import run_account
from rolecall.views.snapshot import RunSnapshotProjection
from rolecall.watch.metrics import _learning_values
from tests.events import filled, made_event

EVALUATION: dict[str, Any] = {
    "step": 0,
    "prompts": 40,
    "samples": 4,
    "reward": 0.125,
    "reward_low": 0.1,
    "reward_high": 0.15,
    "pass_at": {"1": 0.25, "4": 0.5},
    "unscored": {},
    "response_length": 9.5,
}
LAST = {**EVALUATION, "step": 20, "reward": 0.75, "reward_low": 0.7, "reward_high": 0.8, "unscored": {"<b>odd": 2}}
DATASET = {"rows": 100, "rows_seen": 250, "dropped": {"prompt too long": 3}}


def test_the_report_has_them_with_their_intervals(fake_run: RunDir) -> None:
    before = write_report(fake_run)
    assert before["evaluations"] == [] and before["dataset"] is None
    assert "held-out" not in render_html(before) and not evaluation_sentence(before)
    with closing(Journal(fake_run.database_url)) as journal:
        for body in (EVALUATION, LAST):
            journal.append(filled(K.EVALUATION_FINISHED, body))
        journal.append(filled(K.STEP_COMMITTED, {"step": 120, "seconds": 1.0, "reward": 0.9, "dataset": DATASET}))
    report = write_report(fake_run)
    assert [(e["step"], e["reward"]) for e in report["evaluations"]] == [(0, 0.125), (20, 0.75)]
    assert report["dataset"] == {**DATASET, "epoch": 2, "epoch_share": 0.5}
    assert evaluation_sentence(report) == (
        "held-out reward from 0.125 at step 0 to 0.750 (0.700 to 0.800) at step 20, 40 prompts; "
        "pass@1 25.0%, pass@4 50.0%; 2 not scored: <b>odd"
    )
    page = render_html(report)
    assert "Reward on held-out prompts" in page and 'aria-label="held-out reward over time"' in page
    assert "&lt;b&gt;odd" in page and "<b>odd" not in page
    assert "epoch 3, 50% of its 100 rows" in page


def test_an_evaluation_without_a_score_is_in_the_report_without_a_point(fake_run: RunDir) -> None:
    none = {"step": 0, "reward": None, "reward_low": None, "reward_high": None, "unscored": {"reward_failed": 9}}
    with closing(Journal(fake_run.database_url)) as journal:
        journal.append(filled(K.EVALUATION_FINISHED, none))
    report = write_report(fake_run)
    assert report["evaluations"][0]["unscored"] == {"reward_failed": 9}
    assert "held-out" not in render_html(report)


def test_metrics_are_of_the_newest_evaluation_and_step() -> None:
    account = run_account(parse_job({}))
    assert not list(_learning_values(account))
    account.take(made_event(kind=K.EVALUATION_FINISHED, body=EVALUATION))
    account.take(made_event(kind=K.EVALUATION_FINISHED, body=LAST, wall_at=7.0))
    account.take(made_event(kind=K.STEP_COMMITTED, body={"dataset": DATASET}))
    found = {(v.metric.name.removeprefix("rolecall_run_"), v.labels): v.value for v in _learning_values(account)}
    assert found["evaluation_reward", ()] == 0.75 and found["evaluation_reward_low", ()] == 0.7
    assert found["evaluation_pass_ratio", ("4",)] == 0.5 and found["evaluation_unscored", ("<b>odd",)] == 2.0
    assert found["evaluation_timestamp_seconds", ()] == 7.0 and found["evaluation_step", ()] == 20.0
    assert found["dataset_epoch", ()] == 2.0 and found["dataset_epoch_ratio", ()] == 0.5
    assert found["dataset_groups_dropped_total", ("prompt too long",)] == 3.0
    assert all(len(v.labels) == len(v.metric.labels) for v in _learning_values(account))


def test_the_terminal_shows_the_newest_reward() -> None:
    projection = RunSnapshotProjection()
    projection.read([made_event(kind=K.EVALUATION_FINISHED, body=LAST)])
    assert projection.snapshot(0.0, {}, {}, None).held_out_reward == 0.75
