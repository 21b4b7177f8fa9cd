"""report.json holds what the issue promises, comes out the same again, and is compared with the right failure-free
run."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.errors import JournalError, RolecallError, RunNotFound
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.run import StepCommitted
from rolecall.core.rundir import RunDir
from rolecall.reports.html import render_html
from rolecall.reports.report import environment, make_report, read_facts, write_report
from rolecall.views import ettr as effective
from rolecall.views.audit import REPORT_JSON
from rolecall.views.phases import PHASES
from tests.events import filled
from tests.fake_run import HANG, KILL, FakeRun, made_health

PROMISED = {
    "seed", "num_steps", "reward_first", "reward_last", "wall_seconds", "ettr", "seconds_to_n_steps", "incidents",
    "pids_kept", "audit", "weights_proven",
}  # fmt: skip
PROMISED_OF_INCIDENT = {
    "fault", "suspects", "fault_class", "because", "detected_seconds", "resolved_seconds", "action", "tokens_lost",
    "steps_lost",
}  # fmt: skip
PROMISED_OF_AUDIT = {"ok", "groups_trained", "groups_dropped", "groups_undone", "duplicates", "unaccounted"}


def _in_file(run: RunDir) -> dict[str, Any]:
    value = json.loads((run.path / REPORT_JSON).read_text())
    assert isinstance(value, dict)
    return value


def test_the_report_holds_what_was_promised(fake_run: RunDir) -> None:
    report = write_report(fake_run)
    assert report["html"] == str(fake_run.path / "report.html") and Path(report["html"]).is_file()
    assert {**report, "html": None} == {**_in_file(fake_run), "html": None}
    assert set(report) >= PROMISED
    assert all(set(i) >= PROMISED_OF_INCIDENT for i in report["incidents"])
    assert set(report["audit"]) >= PROMISED_OF_AUDIT
    assert set(report["incidents"][0]["fault"]) >= {"kind", "target", "injected_at"}


def test_the_report_of_a_run_with_resolved_incidents(fake_run: RunDir) -> None:
    report = write_report(fake_run)
    assert report["ok"] and not report["failure_free"] and report["outcome"] == "completed"
    assert (report["seed"], report["num_steps"], report["faults_injected"]) == (7, 120, 3)
    assert report["reward_first"] < 0.2 and report["reward_last"] > 0.9
    assert report["pids_kept"] is True and report["pids"]["num_kept"] == 5
    assert report["pids"]["named"] == ["rollout/0#1", "rollout/1#1", "trainer/1#1"]
    assert report["weights_proven"] == 2
    assert [i["action"] for i in report["incidents"]] == ["replace_replica"] * 3
    assert 0.85 < report["ettr"] < report["ettr_paper"] < 1.0
    for phases, incident in zip(report["recovery_phases"], report["incidents"], strict=True):
        assert phases["incident_id"] == incident["incident_id"] and phases["detect"] == incident["detected_seconds"]
        serving = phases["decide"] + phases["restart"] + phases["reconnect"]
        assert serving == pytest.approx(incident["serving_seconds"], abs=5e-3)
    lost = report["lost_replica_seconds"]
    assert list(lost) == list(PHASES) and lost["detect"] > lost["decide"] > 0.0
    training = report["steps"][-1]["at"] - report["training_started_seconds"]
    assert sum(lost.values()) == pytest.approx(5 * training * (1 - report["ettr"]), rel=1e-2), (
        "two trainers, three rollouts"
    )
    assert report["ettr_with_start"] < report["ettr"]
    assert report["wall_seconds"] == pytest.approx(report["ended_at"] - report["started_at"], abs=1e-3)


def test_the_policys_health_stands_beside_the_steps(fake_run: RunDir, tmp_path: Path) -> None:
    report = write_report(fake_run)
    health = report["health"]
    assert set(health) == {*made_health(0, 120), "log_ratio_max"}
    assert {len(values) for values in health.values()} == {len(report["steps"])}
    assert health["entropy"][7] == pytest.approx(made_health(7, 120)["entropy"], abs=1e-6)
    assert health["response_length"][8] > 0 and health["response_length"][9] is None
    old = FakeRun(tmp_path, num_steps=3, strikes=(), finish=False).build()
    with closing(Journal(old.database_url, create=False)) as journal:
        events = [
            replace(e, payload=replace(e.payload, health={}, log_ratio_max=None))
            for e in journal.events(kinds=[EventKind.STEP_COMMITTED])
        ]
    assert effective.health(effective.steps(events)) == {}


def test_ettr_of_one_hang_by_hand(tmp_path: Path) -> None:
    report = write_report(FakeRun(tmp_path, num_steps=90, strikes=(HANG,)).build())
    span = report["steps"][-1]["at"] - report["training_started_seconds"]
    stalled = HANG.found_after + 1.4  # fault to the commit of the interrupted step: 3 of 5 count
    alone = HANG.serving_after - 1.4  # from there until the replacement serves: 4 of 5
    assert report["ettr"] == pytest.approx(1 - (stalled * 2 / 5 + alone * 1 / 5) / span, abs=2e-4)


def test_a_report_written_again_is_the_same(fake_run: RunDir) -> None:
    write_report(fake_run)
    before = _in_file(fake_run)
    html = (fake_run.path / "report.html").read_text()
    write_report(fake_run)
    assert {k: v for k, v in _in_file(fake_run).items() if k != "audit"} == {
        k: v for k, v in before.items() if k != "audit"
    }
    assert _in_file(fake_run)["audit"]["ok"]
    assert (fake_run.path / "report.html").read_text().count("<svg") == html.count("<svg")
    assert not list(fake_run.path.glob(".*.tmp"))


# --- what makes a run not ok --------------------------------------------------------------------------------------


def _fails(report: dict[str, Any]) -> list[str]:
    assert not report["ok"]
    return [v["what"] for v in report["verdict"] if not v["ok"]]


def test_a_fault_without_an_incident_is_missed(fake_run: RunDir) -> None:
    with fake_run.injections_path.open("a") as f:
        f.write(json.dumps({"kind": "reward-kill", "target": "reward/0", "injected_at": 1.7e9 + 1103}) + "\n")
    report = write_report(fake_run)
    assert [f["target"] for f in report["missed"]] == ["reward/0"]
    assert _fails(report) == ["faults resolved"]


def test_an_incident_that_no_one_caused_is_a_false_alarm(fake_run: RunDir) -> None:
    lines = fake_run.injections_path.read_text().splitlines(keepends=True)
    fake_run.injections_path.write_text("".join(lines[1:]))
    report = write_report(fake_run)
    assert report["false_alarms"] == ["i-1"] and report["incidents"][0]["fault"] is None


def test_no_file_of_the_report_holds_a_url_that_is_a_secret(fake_run: RunDir) -> None:
    job = fake_run.read()
    job["config"]["recovery"]["webhook_url"] = "https://hooks.slack.com/services/s3cret"
    fake_run.write(job)
    write_report(fake_run)
    for file in ("report.json", "report.html"):
        text = (fake_run.path / file).read_text()
        assert "hooks.slack.com" in text and "s3cret" not in text


def test_a_run_that_was_cut_short_is_not_ok_and_still_reported(tmp_path: Path) -> None:
    report = write_report(FakeRun(tmp_path, num_steps=12, strikes=(), finish=False).build())
    assert report["outcome"] == "running" and _fails(report) == ["finished"]


def test_an_incident_left_open_is_not_ok(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, num_steps=90, strikes=(KILL,))
    fake._close = lambda incident, strike: None  # type: ignore[method-assign]
    report = write_report(fake.build())
    assert set(_fails(report)) == {"faults resolved", "no incident open"}
    assert report["incidents"][0]["outcome"] == "open" and report["incidents"][0]["resolved_seconds"] is None


def test_a_run_without_a_single_step(tmp_path: Path) -> None:
    report = write_report(FakeRun(tmp_path, num_steps=1, strikes=(), finish=False).build())
    assert report["num_steps"] == 1
    fake = FakeRun(tmp_path, run_id="empty", strikes=())
    fake.run.write({})
    fake.journal.close()
    empty = write_report(fake.run)
    assert (empty["num_steps"], empty["ettr"], empty["reward_first"], empty["wall_seconds"]) == (0, None, None, 0)


def test_a_run_that_never_committed_a_step_has_no_ettr(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, strikes=())
    fake._steps = lambda: None  # type: ignore[method-assign]
    fake.at(400.0, lambda: fake.say(EventKind.RUN_ENDED, {"outcome": "failed", "because": "no step"}))
    report = write_report(fake.build())
    assert report["num_steps"] == 0 and report["wall_seconds"] == pytest.approx(400.0)
    assert report["ettr"] is None is report["ettr_with_start"] and report["lost_replica_seconds"] == {}
    assert "ETTR</dt><dd>–" in render_html(report)


def test_no_journal_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalError):
        write_report(RunDir(tmp_path))


def test_a_damaged_injectors_log_is_named(fake_run: RunDir) -> None:
    fake_run.injections_path.write_text("{}\n")
    with pytest.raises(RolecallError, match=r"injections\.jsonl: line 1"):
        write_report(fake_run)


def test_a_killed_helper_is_no_incident_but_must_come_back(tmp_path: Path) -> None:
    def built(name: str, restarted: bool) -> dict[str, Any]:
        fake = FakeRun(tmp_path, run_id=name, num_steps=20, strikes=())
        if restarted:
            body = {"what": "agent", "node": "node-3", "because": "it ended with -9"}
            fake.at(30.4, lambda: fake.say(EventKind.COMPONENT_RESTARTED, body))
        run = fake.build()
        line = {"kind": "agent-kill", "target": "agent", "node": "node-3", "injected_at": fake.wall_zero + 30.0}
        run.injections_path.write_text(json.dumps(line) + "\n")
        return write_report(run)

    report = built("back", restarted=True)
    assert report["ok"] and report["faults_injected"] == 0 and not report["missed"]
    assert report["helper_faults"][0]["restarted_seconds"] == pytest.approx(0.4)
    assert _fails(built("gone", restarted=False)) == ["own processes back"]


def test_one_restart_answers_one_killed_helper(tmp_path: Path) -> None:
    def built(name: str, *restarted_at: float) -> list[float | None]:
        fake = FakeRun(tmp_path, run_id=name, num_steps=20, strikes=())
        body = {"what": "watch", "node": "", "because": "it ended with -9"}
        for at in restarted_at:
            fake.at(at, lambda: fake.say(EventKind.COMPONENT_RESTARTED, body))
        run = fake.build()
        lines = [{"kind": "watch-kill", "target": "watch", "injected_at": fake.wall_zero + at} for at in (30.0, 30.2)]
        run.injections_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = write_report(run)
        assert report["ok"] is (len(restarted_at) == 2)
        return [h["restarted_seconds"] for h in report["helper_faults"]]

    assert built("once", 30.4) == [pytest.approx(0.4), None]
    assert built("twice", 30.4, 31.2) == [pytest.approx(0.4), pytest.approx(1.0)]


def test_a_fault_that_hits_several_is_named_by_any_of_them(fake_run: RunDir) -> None:
    lines = [json.loads(line) for line in fake_run.injections_path.read_text().splitlines()]
    lines[1] |= {"target": "trainer/0", "targets": ["trainer/0", "trainer/1"], "pid": 4103}
    fake_run.injections_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = write_report(fake_run)
    assert report["incidents"][1]["diagnosed_correctly"] and not report["missed"]


# --- the failure-free run -----------------------------------------------------------------------------------------


def test_without_a_failure_free_run_there_is_an_estimate(fake_run: RunDir) -> None:
    pace = write_report(fake_run)["seconds_to_n_steps"]
    assert pace["baseline"] is None and pace["baseline_run"] is None
    assert 0.5 * 120 < pace["estimate"] < pace["this"]


def test_the_newest_failure_free_run_of_the_same_configuration_is_taken(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_report(FakeRun(tmp_path, run_id=name, num_steps=60, strikes=(), seed=3).build())
    for name, ended in (("old", 1.0), ("new", 2.0)):
        path = tmp_path / name / REPORT_JSON
        path.write_text(json.dumps({**json.loads(path.read_text()), "ended_at": ended}))
    write_report(FakeRun(tmp_path, run_id="other-config", num_steps=30, strikes=()).build())
    write_report(FakeRun(tmp_path, run_id="with-faults", num_steps=60, strikes=(KILL,)).build())
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / REPORT_JSON).write_text("{")
    report = write_report(FakeRun(tmp_path, run_id="this", num_steps=60, strikes=(KILL,)).build())
    pace = report["seconds_to_n_steps"]
    assert (pace["baseline_run"], pace["n"]) == ("new", 60)
    assert report["ettr"] < report["ettr_baseline"] == 1.0


def test_a_named_run_is_compared_with_and_must_be_there(fake_run: RunDir, tmp_path: Path) -> None:
    base = FakeRun(tmp_path, run_id="base", num_steps=50, strikes=()).build()
    with pytest.raises(RunNotFound, match="base"):
        write_report(fake_run, base.path)
    write_report(base)
    for named in (base.path, base.path / REPORT_JSON):
        pace = write_report(fake_run, named)["seconds_to_n_steps"]
        assert (pace["n"], pace["baseline_run"]) == (50, "base")


def test_a_fault_that_was_asked_for_and_never_happened_fails_the_run(fake_run: RunDir) -> None:
    assert write_report(fake_run)["ok"]
    lines = fake_run.injections_path.read_text().splitlines(keepends=True)
    journal = Journal(fake_run.database_url)
    body = {"outcome": "completed", "because": "done", "faults_wanted": len(lines) + 1}
    journal.append(filled(EventKind.RUN_ENDED, body))
    journal.close()
    report = write_report(fake_run)
    assert not report["ok"]
    assert [v["what"] for v in report["verdict"] if not v["ok"]] == ["faults happened"]


def test_the_mfu_is_reported_where_the_peaks_are_known_and_its_decline_is_a_remark(tmp_path: Path) -> None:
    peaks = {"runtime": {"trainer_peak_flops": 1e12}}
    facts = read_facts(FakeRun(tmp_path, num_steps=40, strikes=()).build())
    assert make_report(facts, None)["mfu"] == {}
    steps = [e for e in facts.events if e.kind is EventKind.STEP_COMMITTED]
    seconds = {e.event_id: 3.0 if n < 20 else 30.0 for n, e in enumerate(steps)}
    events = [
        replace(e, payload=replace(e.as_(StepCommitted), seconds=seconds[e.event_id])) if e.event_id in seconds else e
        for e in facts.events
    ]
    report = make_report(replace(facts, events=events, job={**facts.job, "config": {**facts.config, **peaks}}), None)
    mfu = report["mfu"]["trainer"]
    assert set(report["mfu"]) == {"trainer"} and mfu["newest"] < 0.2 * mfu["best"]
    (remark,) = (r for r in report["remarks"] if r["kind"] == "mfu_declined")
    assert remark["what"] == "trainer" and "medians of 16 steps" in remark["because"]
    assert f"MFU of trainer {mfu['median']:.1%}" in render_html({**report, "environment": environment()})
