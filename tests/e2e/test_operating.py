"""An operator operates a run that asks before it acts: approves, rejects, pauses and replaces, by commands and in a
browser."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rolecall.session.children import TOKEN_FILE, USER
from tests.dashboards.browser import ADDRESS, browser, chromium, visit
from tests.e2e.inbox import Inbox, inbox
from tests.e2e.runs import DemoRun, alive, check_no_false_alarm, command, demo_run, rolecall
from tests.support import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(800)]

DEADMAN_SECONDS = 0.5
RECOVERY_SECONDS = 240.0
"""A cold start alone takes a minute when the machine has other work."""


def test_an_operator_operates_a_run(tmp_path: Path) -> None:
    with inbox() as webhook:
        settings = [
            "recovery.mode=approve",
            f"recovery.webhook_url={webhook.url}",
            f"recovery.deadman_seconds={DEADMAN_SECONDS}",
        ]
        args = ["--seed", "7", "--faults", "none", "--allow-injection", "--steps", "100000"]
        args += [word for s in settings for word in ("--set", s)]
        with demo_run(tmp_path, "operated", args, dashboard=True) as run:
            run.until_step(2, 200)
            digest = _nothing_happens_without_approval(run, webhook)
            _watch_dies_and_is_missed(run, webhook)
            _a_pause_holds_what_was_approved(run, webhook, digest)
            _a_healthy_rollout_is_replaced_by_hand(run)
            _a_click_approves_a_plan(run)
            _a_rejected_plan_is_not_performed(run, webhook)
            assert len(alive(run.observer)) > 20
            os.kill(run.process.pid, signal.SIGINT)
            assert run.wait(60) == 130
            assert alive(run.observer) == []
            assert "Traceback" not in run.output()
        assert run.observer.listening_elsewhere == set()
    _the_memory_of_it_is_whole(run)


def _nothing_happens_without_approval(run: DemoRun, webhook: Inbox) -> str:
    """A killed rollout becomes a proposal, reported to the operator, and nothing more. Returns the plan's digest."""
    injected = command("inject", str(run.path), "--kind", "rollout-kill", "--target", "rollout/1")
    assert injected.returncode == 0, injected.stderr
    victim = json.loads(injected.stdout)
    assert victim["pid"] == run.observer.pids[("rollout/1", 1)]
    proposed = _event(run, "plan_proposed")
    digest, sentence = str(proposed["plan"]["digest"]), str(proposed["plan"]["because"])
    assert "rollout/1" in sentence
    assert [(t["replica"], t["incarnation"]) for t in proposed["plan"]["targets"]] == [("rollout/1", 1)]
    eventually(lambda: webhook.of("plan_proposed", digest=digest), "the proposal at the webhook")
    (reported,) = webhook.of("plan_proposed")
    assert (reported["because"], reported["incident"], reported["run"]) == (sentence, proposed["incident"], "operated")
    status = rolecall("status", str(run.path))
    assert status.returncode == 1, "an incident is open"
    assert "mode approve" in status.stdout and sentence in status.stdout
    assert f"awaiting approval: rolecall approve {digest} --run " in status.stdout
    run.until_step(len(run.observer.steps) + 2, RECOVERY_SECONDS)  # the survivors train on meanwhile
    assert run.observer.desired()["rollout/1"] == 1 and ("rollout/1", 2) not in run.observer.pids
    return digest


def _watch_dies_and_is_missed(run: DemoRun, webhook: Inbox) -> None:
    """The receiver of the dead-man signal detects that watch is gone, and that another one took over."""
    ((holder, fence),) = run.observer.query("select holder, fence from leases where name = 'watch'")
    eventually(lambda: webhook.of("watch_alive", holder=holder), "a heartbeat of the first watch")
    pid = int(holder.split(":")[1])
    assert any(p == pid and "watch" in seen.title for (p, _), seen in list(run.observer.processes.items()))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: [b for b in webhook.of("watch_alive") if b["holder"] != holder], "a heartbeat of the next")
    before = [b["at"] for b in webhook.of("watch_alive", holder=holder)]
    (first, *_) = [b for b in webhook.of("watch_alive") if b["holder"] != holder]
    # The next one acts only once the lease of the dead one is over: the silence lasts longer than the signal's
    # interval.
    assert first["at"] - max(before) > 2 * DEADMAN_SECONDS
    assert first["open_incidents"] == 1, "the next watch has the incident"
    (restarted,) = run.observer.events("component_restarted")
    assert restarted["what"] == "watch" and "-9" in restarted["because"]
    assert [e["fence"] for e in run.observer.events("lease_acquired")] == [fence, fence + 1]


def _a_pause_holds_what_was_approved(run: DemoRun, webhook: Inbox, digest: str) -> None:
    paused = command("pause", "--run", str(run.path), "--reason", "an operator is at the rack")
    assert paused.returncode == 0 and "is paused" in paused.stdout
    wrong = command("approve", "no-such-plan", "--run", str(run.path))
    assert wrong.returncode == 2 and digest in wrong.stderr, "the refusal names the plan that waits"
    approved = rolecall("approve", digest, "--run", str(run.path))
    assert approved.returncode == 0, approved.stderr
    assert "approved: replace replica of rollout/1#1" in approved.stdout
    held = _event(run, "plan_blocked", guard="paused")
    assert "an operator is at the rack" in held["because"]
    status = command("status", str(run.path))
    assert status.returncode == 1 and "PAUSED:" in status.stdout and "an operator is at the rack" in status.stdout
    assert run.observer.events("action_started") == []
    again = command("approve", digest, "--run", str(run.path))
    assert again.returncode == 2 and "was already approved" in again.stderr
    # With a warm standby the replacement takes seconds; its own start would slow that of a cold one.
    eventually(lambda: run.observer.states.get(("standby/0", 1)) == "ready", "the standby", seconds=RECOVERY_SECONDS)
    resumed = command("resume", "--run", str(run.path))
    assert resumed.returncode == 0 and " resumed" in resumed.stdout
    closed = _event(run, "incident_closed", incident=held["incident"])
    assert closed["outcome"] == "resolved"
    eventually(lambda: run.observer.states[("rollout/1", 2)] == "serving", "the observer to have looked again")
    (started,) = run.observer.events("action_started")
    (decision,) = run.observer.events("plan_approved")
    assert started["approved_by"] == decision["by"] and "@" in decision["by"]
    (resume,) = run.observer.events("recovery_resumed")
    assert resume["seq"] < started["seq"]
    eventually(
        lambda: webhook.of("incident_closed", incident=held["incident"], resolved=True),
        "the end at the webhook",
    )


def _a_healthy_rollout_is_replaced_by_hand(run: DemoRun) -> None:
    before = dict(run.observer.pids)
    asked = command("replace", "rollout/0", "--run", str(run.path), "--reason", "its fan is loud")
    assert asked.returncode == 0 and " opened: " in asked.stdout, asked.stderr
    refused = command("replace", "rollout/9", "--run", str(run.path), "--reason", "a slip")
    assert refused.returncode == 2 and "rollout/9 is not part of this run" in refused.stderr
    incident = asked.stdout.split()[0]
    closed = _event(run, "incident_closed", incident=incident)
    assert closed["outcome"] == "resolved" and "its fan is loud" in closed["because"]
    eventually(lambda: run.observer.states[("rollout/0", 2)] == "serving", "the observer to have looked again")
    # It gave all its tokens before it was ended.
    moved = [m for m in run.observer.events("requests_reassigned") if m["from_replica"] == "rollout/0"]
    assert [m["tokens_lost"] for m in moved] in ([], [0]), moved
    old = (before["rollout/0", 1], run.observer.start_ticks(before["rollout/0", 1]))
    assert not [line for line in alive(run.observer) if line.startswith(f"{old[0]} ")]
    others = {key: pid for key, pid in before.items() if not key[0].startswith(("rollout/", "standby/"))}
    others["rollout/2", 1] = before["rollout/2", 1]
    assert {key: run.observer.pids[key] for key in others} == others and len(others) == 6
    assert {f"{pid} " for pid in others.values()} <= {line[: line.index(" ") + 1] for line in alive(run.observer)}


def _a_click_approves_a_plan(run: DemoRun) -> None:
    """By a command where there is no browser: the rest of the test needs none."""
    assert command("inject", str(run.path), "--kind", "reward-kill", "--target", "reward/1").returncode == 0
    eventually(lambda: len(run.observer.events("plan_proposed")) == 2, "the second proposal")
    proposed = run.observer.events("plan_proposed")[-1]
    if chromium() is None:
        assert command("approve", proposed["plan"]["digest"], "--run", str(run.path)).returncode == 0
    else:
        _click(run, proposed)
    assert _event(run, "incident_closed", incident=proposed["incident"])["outcome"] == "resolved"
    (approved,) = run.observer.events("plan_approved", proposed["incident"])
    assert approved["digest"] == proposed["plan"]["digest"]


def _click(run: DemoRun, proposed: dict[str, Any]) -> None:
    """Reads the incident's sentence, signs in and approves; the token goes nowhere else."""
    incident = proposed["incident"]
    sentence = _event(run, "incident_opened", incident=incident)["diagnosis"]["because"][:60]
    token = (run.path / TOKEN_FILE).read_text().strip()
    address = ADDRESS.search(run.output())
    assert address is not None, run.output()
    with browser() as of, visit(of, address.group()) as shot:
        shot.open("/")
        shot.page.get_by_text(sentence, exact=False).first.wait_for()
        shot.open(f"/incidents?incident={incident}")
        shot.page.get_by_text(sentence, exact=False).first.wait_for()
        shot.open("/operations")
        approve = shot.page.get_by_role("button", name="Approve").first
        assert approve.is_disabled()
        assert run.observer.events("plan_approved", incident) == [], "viewing approves nothing"
        field = shot.page.locator("input[type=password]")
        field.fill(token)
        field.press("Enter")
        shot.page.get_by_text(USER, exact=False).first.wait_for()
        approve.click()
        assert _event(run, "plan_approved", incident=incident)["by"] == USER
        _event(run, "incident_verified", incident=incident)
        shot.faultless()
        assert token not in shot.page.url and token not in shot.text()
    for log in (run.path / "logs").glob("*.log"):
        assert token not in log.read_text(errors="replace"), f"the token is in {log}"


def _a_rejected_plan_is_not_performed(run: DemoRun, webhook: Inbox) -> None:
    assert command("inject", str(run.path), "--kind", "rollout-kill", "--target", "rollout/2").returncode == 0
    eventually(lambda: len(run.observer.events("plan_proposed")) == 3, "the third proposal")
    proposed = run.observer.events("plan_proposed")[-1]
    digest = proposed["plan"]["digest"]
    rejected = command("reject", digest, "--run", str(run.path), "--reason", "we want to look at it")
    assert rejected.returncode == 0 and "rejected: replace replica of rollout/2#1" in rejected.stdout, rejected.stderr
    closed = _event(run, "incident_closed", incident=proposed["incident"])
    (decision,) = run.observer.events("plan_rejected")
    assert closed["outcome"] == "escalated"
    assert closed["because"] == f"rejected by {decision['by']}: we want to look at it"
    eventually(lambda: webhook.of("oncall_paged", topic="rejected"), "the call at the webhook")
    run.until_step(len(run.observer.steps) + 2, RECOVERY_SECONDS)
    assert run.observer.desired()["rollout/2"] == 1 and ("rollout/2", 2) not in run.observer.pids
    status = command("status", str(run.path))
    assert status.returncode == 0 and "no open incident" in status.stdout
    (left,) = [line.split() for line in status.stdout.splitlines() if line.split()[:1] == ["rollout/2#1"]]
    assert left[1] == "lost"


def _the_memory_of_it_is_whole(run: DemoRun) -> None:
    audit = command("audit", str(run.path))
    assert audit.returncode == 0, audit.stdout
    reported = command("incidents", "--run", str(run.path))
    assert reported.returncode == 0
    assert [line.split(":")[0] for line in reported.stdout.splitlines() if line.startswith("inc-")] == [
        "inc-4-rollout-2 escalated",
        "inc-3-reward-1 resolved",
        "inc-2-rollout-0 resolved",
        "inc-1-rollout-1 resolved",
    ]
    replayed = command("replay", "inc-1-rollout-1", "--run", str(run.path))
    assert replayed.returncode == 0, replayed.stdout
    report = json.loads(command("report", str(run.path), "--json").stdout)
    by_id = {i["incident_id"]: i for i in report["incidents"]}
    assert (
        by_id["inc-1-rollout-1"]["resolved_seconds"] is not None
        and by_id["inc-4-rollout-2"]["resolved_seconds"] is None
    )
    check_no_false_alarm(report)
    assert report["pids_kept"] is True, report["pids"]


def _event(run: DemoRun, kind: str, **wanted: Any) -> dict[str, Any]:
    """The first event of a kind with these values, once it is there."""

    def found() -> list[dict[str, Any]]:
        return [e for e in run.observer.events(kind) if all(e.get(k) == v for k, v in wanted.items())]

    eventually(found, f"{kind} {wanted}:\n{run.output()[-2000:]}", seconds=RECOVERY_SECONDS)
    return found()[0]
