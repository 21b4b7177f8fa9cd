"""An operator in a browser beside a real run: reads the incident's sentence, signs in, approves the plan, sees it
resolved."""

from pathlib import Path

import pytest

from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir
from rolecall.session.children import TOKEN_FILE, USER
from tests.dashboards.browser import ADDRESS, Visit, browser, visit
from tests.e2e.runs import DemoRun, alive, demo_run
from tests.support import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SEED = 47
RUN_SECONDS = 400.0


def _events(run: DemoRun, *kinds: EventKind) -> list[Event]:
    journal = Journal(RunDir(run.path).database_url, create=False)
    try:
        return journal.events(kinds=kinds)
    finally:
        journal.close()


def _until_there_is(run: DemoRun, kind: EventKind) -> Event:
    def has_event() -> bool:
        assert run.process.poll() is None, run.output()[-3000:]
        return (run.path / "journal.db").exists() and bool(_events(run, kind))

    eventually(has_event, f"an event {kind}: {run.output()[-1000:]}", seconds=RUN_SECONDS)
    return _events(run, kind)[-1]


def _sign_in(shot: Visit, token: str) -> None:
    field = shot.page.locator("input[type=password]")
    field.fill(token)
    field.press("Enter")
    shot.page.get_by_text(USER, exact=False).first.wait_for()


def test_a_click_approves_a_plan_and_the_run_is_resolved(tmp_path: Path) -> None:
    args = ["--seed", str(SEED), "--steps", "30", "--faults", "rollout-kill"]
    args += ["--set", "recovery.mode=approve", "--set", "recovery.approval_timeout_seconds=300"]
    with browser() as of, demo_run(tmp_path, "approved", args, dashboard=True) as run:
        eventually(lambda: ADDRESS.search(run.output()), f"the dashboard's address: {run.output()}", seconds=120)
        address = ADDRESS.search(run.output())
        assert address is not None
        proposed = _until_there_is(run, EventKind.PLAN_PROPOSED)
        sentence = _events(run, EventKind.INCIDENT_OPENED)[0].payload.to_body()["diagnosis"]["because"]
        token = (run.path / TOKEN_FILE).read_text().strip()
        with visit(of, address.group()) as shot:
            shot.open("/")
            shot.page.get_by_text(sentence[:60], exact=False).first.wait_for()
            shot.open(f"/incidents?incident={proposed.incident_id}")
            shot.page.get_by_text(sentence[:60], exact=False).first.wait_for()
            shot.open("/operations")
            assert shot.page.get_by_role("button", name="Approve").first.is_disabled()
            assert _events(run, EventKind.PLAN_APPROVED) == [], "viewing approves nothing"
            _sign_in(shot, token)
            shot.page.get_by_role("button", name="Approve").first.click()
            approved = _until_there_is(run, EventKind.PLAN_APPROVED)
            assert approved.payload.by == USER and approved.incident_id == proposed.incident_id
            assert approved.payload.digest == proposed.payload.to_body()["plan"]["digest"]
            verified = _until_there_is(run, EventKind.INCIDENT_VERIFIED)
            assert verified.incident_id == proposed.incident_id
            shot.faultless()
            assert token not in shot.page.url and token not in shot.text()
        assert run.wait(RUN_SECONDS) == 0, run.output()[-3000:]
        assert alive(run.observer) == []
        assert len(_events(run, EventKind.PLAN_APPROVED)) == 1
        for log in (run.path / "logs").glob("*.log"):
            assert token not in log.read_text(errors="replace"), f"the token is in {log}"
    report = run.report()
    assert [i["outcome"] for i in report["incidents"]] == ["resolved"]
