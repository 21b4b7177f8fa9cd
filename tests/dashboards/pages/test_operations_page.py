"""The Operations page: each click writes one event in the name of the right user; nothing else writes any."""

import sqlite3
from pathlib import Path

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.rundir import create_run_dir
from rolecall.dashboards import users as people
from rolecall.recovery.nodes import fold_nodes
from rolecall.recovery.operators import commands
from rolecall.views import observed_ranks
from rolecall.views.observed_ranks import ObservedRank
from rolecall.watch.agents import observing_run
from tests.dashboards.acting_world import HOSTILE, World, button, fill, page, session, sign_in, texts, world

K = EventKind


@pytest.fixture
def made(tmp_path: Path) -> World:
    return world(tmp_path)


def _new(made: World, before: int) -> list[tuple[EventKind, object]]:
    """(kind, by) of the events written after so many."""
    return [(e.kind, e.payload.to_body().get("by")) for e in made.events()[before:]]


# --- looking ------------------------------------------------------------------------------------------------------


def test_a_run_without_plans_says_so(made: World) -> None:
    at = page("operations", made)
    assert not at.exception
    assert "No pending plans" in texts(at)
    assert "No operator commands yet" in texts(at)
    assert "rolecall waits for approval" in texts(at)


def test_a_run_that_has_ended_offers_no_commands(made: World) -> None:
    made.say(K.RUN_ENDED, {"outcome": "done", "because": "120 steps"})
    shown = texts(page("operations", made))
    assert "nothing left to command" in shown and "No operator commands yet" in shown
    assert "Automatic recovery" not in shown and "Replicas" not in shown


def test_a_run_that_has_ended_has_no_plan_to_decide_and_nothing_in_progress(made: World) -> None:
    made.propose("i-1")
    made.open("i-2", "rollout/0")
    acting = made.plan("i-2", "rollout/0")
    made.say(K.ACTION_STARTED, {"plan": acting.to_dict(), "digest": acting.digest}, "i-2")
    made.say(K.RUN_ENDED, {"outcome": "interrupted", "because": "Ctrl-C"})
    at = sign_in(page("operations", made), made.add_user("anna"))
    assert "awaits approval" not in texts(at)
    assert not any(b.label in ("Approve", "Hold", "Reject") for b in at.button)
    shown = "".join(h.proto.body for h in at.get("html"))
    assert "not finished" in shown and "in progress" not in shown


def test_without_a_people_file_it_says_how_to_make_one_and_shows_the_commands(made: World) -> None:
    proposed = made.propose("i-1")
    at = page("operations", made, acting=False)
    assert not at.exception
    assert "rolecall users add" in texts(at)
    assert f"rolecall approve {proposed.digest}" in texts(at)
    assert button(at, "Approve").disabled


def test_a_guest_sees_the_plan_whole_and_can_click_nothing(made: World) -> None:
    made.propose("i-1", because="rollout/1 ended by signal 9")
    at = page("operations", made)
    reported = texts(at)
    for said in (
        "rollout/1 ended by signal 9",
        "plan: replace rollout/1#1 on node-2",
        "rollout/2 takes its requests",
        "its agent saw it end",
        "expires in",
        "awaits approval",
    ):
        assert said in reported
    acting = [b for b in at.button if b.label not in ("Sign in",)]
    assert acting
    assert all(b.disabled for b in acting)


def test_no_act_comes_from_a_load_or_an_address(made: World) -> None:
    proposed = made.propose("i-1")
    token = made.add_user("anna")
    before = len(made.events())
    at = page("operations", made)
    at.query_params["approve"] = proposed.digest
    at.query_params["token"] = token
    at.run()
    sign_in(at, token).run()
    assert len(made.events()) == before


def test_a_job_that_is_only_watched_offers_no_command_that_cannot_work(tmp_path: Path) -> None:
    made = World(run=observing_run(tmp_path, "torchrun", {"vm-1": "http://127.0.0.1:9"}), users_path=tmp_path / "users")
    now = made.journal.clock.wall()
    ranks = [ObservedRank("trainer/0", 0, "vm-1", 40, True, "compute", 5, now, now)]
    made.journal.set_flag(observed_ranks.FLAG, observed_ranks.to_json(ranks))
    made.journal.acquire("watch", "watch@vm-1", 1e-3)
    made.say(K.LEASE_ACQUIRED, {"holder": "watch@vm-1", "fence": 1, "mode": "observe"})
    made.open("i-1", "trainer/0", fault_class=FaultClass.HANG)
    planned = made.plan("i-1", "trainer/0")
    at = page("operations", made)
    assert not at.exception
    reported = texts(at)
    assert "trainer/0 on vm-1" in reported and "only watches this job" in reported
    assert "○ not executed in this mode" in reported and "would: replace trainer/0" in reported
    assert planned.digest not in "\n".join(c.value for c in at.code), "neither hold nor reject"
    assert not any(b.label in ("Hold", "Reject", "Drain", "Replace") for b in at.button)
    assert 'rolecall node quarantine vm-1 --reason "REASON"' in "\n".join(c.value for c in at.code)
    first = next(e for e in at.main if e.type == "html" and "rc-banner" in e.proto.body)
    assert (
        "No watch is running." in first.proto.body and "<code>rolecall status RUN</code>: it prints" in first.proto.body
    )


def test_hostile_text_is_shown_as_text(made: World) -> None:
    made.propose("i-1", because=HOSTILE)
    made.say(K.RECOVERY_PAUSED, {"by": HOSTILE[:60], "because": HOSTILE})
    at = page("operations", made)
    assert not at.exception
    assert HOSTILE in texts(at)
    assert not any("onerror" in str(m.value) or "bold" in str(m.value) for m in at.markdown)


# --- signing in ---------------------------------------------------------------------------------------------------


def test_signing_in_and_out(made: World) -> None:
    token = made.add_user("anna")
    at = sign_in(page("operations", made), token)
    assert "Signed in as anna" in "\n".join(str(t.value) for t in at.sidebar.text)
    held = at.session_state["rolecall.user"]
    assert isinstance(held, people.SignedInUser)
    assert token not in session(at)
    button(at, "Sign out").click().run()
    assert "rolecall.user" not in at.session_state
    assert "Read-only: sign in" in texts(at)


def test_a_wrong_token_is_reported_and_kept_nowhere(made: World) -> None:
    made.add_user("anna")
    at = sign_in(page("operations", made), "wrong-token")
    assert "no user has this access token" in "\n".join(str(t.value) for t in at.sidebar.text)
    assert "wrong-token" not in texts(at)
    assert "wrong-token" not in session(at)


def test_who_is_removed_meanwhile_is_out_before_the_click_counts(made: World) -> None:
    made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    people.remove(made.users_path, "anna")
    before = len(made.events())
    button(at, "Approve").click().run()
    assert len(made.events()) == before
    assert "is no longer a user" in texts(at)


def test_without_a_click_for_long_an_operator_is_out(made: World) -> None:
    made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    held = at.session_state["rolecall.user"]
    at.session_state["rolecall.user"] = people.SignedInUser(
        name=held.name, fingerprint=held.fingerprint, seen_at=held.seen_at - people.IDLE_SECONDS - 1
    )
    before = len(made.events())
    button(at, "Approve").click().run()
    assert len(made.events()) == before
    assert "without activity" in texts(at) + "\n".join(str(t.value) for t in at.sidebar.text)


# --- plans --------------------------------------------------------------------------------------------------------


def test_a_click_approves_the_plan_under_the_name_of_the_file(made: World) -> None:
    proposed = made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    before = len(made.events())
    button(at, "Approve").click().run()
    assert _new(made, before) == [(K.PLAN_APPROVED, "anna")]
    assert made.events()[-1].payload.digest == proposed.digest
    assert "approved: replace replica of " in texts(at)


def test_a_double_click_is_one_word(made: World) -> None:
    made.propose("i-1")
    made.propose("i-2", "rollout/0")
    at = sign_in(page("operations", made), made.add_user("anna"))
    first = button(at, "Approve")
    before = len(made.events())
    first.click().run()
    first.click().run()  # the same button, as it was painted
    assert _new(made, before) == [(K.PLAN_APPROVED, "anna")]


def test_a_second_operator_who_was_faster_is_reported(made: World) -> None:
    proposed = made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    commands.reject_plan(made.run, proposed.digest, "bert", "not now")
    before = len(made.events())
    button(at, "Approve").click().run()
    assert len(made.events()) == before
    assert "rejected" in texts(at)


def test_a_plan_that_changed_between_painting_and_clicking_is_not_approved(made: World) -> None:
    painted = made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    made.say(K.PLAN_EXPIRED, {"digest": painted.digest, "because": "no one decided"}, "i-1")
    made.say(K.INCIDENT_CLOSED, {"outcome": "escalated", "because": "expired"}, "i-1")
    other = made.propose("i-2", "rollout/2")
    before = len(made.events())
    button(at, "Approve").click().run()
    assert len(made.events()) == before
    assert painted.digest in texts(at)
    assert other.digest != painted.digest


def test_a_plan_that_lapsed_is_not_approved(made: World) -> None:
    made.propose("i-1", seconds=-1.0)
    at = sign_in(page("operations", made), made.add_user("anna"))
    assert "expired" in texts(at)
    assert not any(b.label == "Approve" for b in at.button)


def test_a_journal_that_is_locked_is_said_and_nothing_is_lost(made: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    before = len(made.events())
    monkeypatch.setattr("rolecall.core.journal.store.BUSY_SECONDS", 0.1)
    lock = sqlite3.connect(made.run.path / "journal.db", isolation_level=None)
    try:
        lock.execute("BEGIN IMMEDIATE")
        button(at, "Approve").click().run()
    finally:
        lock.close()
    assert len(made.events()) == before
    assert "Not done." in texts(at)
    assert "may or may not have been recorded" in texts(at)
    at.run()
    button(at, "Approve").click().run()
    assert _new(made, before) == [(K.PLAN_APPROVED, "anna")]


def test_a_hold_has_a_reason_and_an_end_and_is_lifted(made: World) -> None:
    proposed = made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    before = len(made.events())
    button(at, "Hold").click().run()
    assert len(made.events()) == before
    assert "a reason is required" in texts(at)
    fill(at, "plan:", "why", "checking the cable first")
    button(at, "Hold").click().run()
    assert _new(made, before) == [(K.HOLD_PLACED, "anna")]
    placed = made.events()[-1]
    assert placed.payload.because == "checking the cable first"
    assert placed.payload.digest == proposed.digest
    assert placed.payload.until == pytest.approx(placed.wall_at + 600, abs=5)
    at.run()
    assert "on hold" in texts(at)
    button(at, "Lift the hold").click().run()
    assert _new(made, before) == [(K.HOLD_PLACED, "anna"), (K.HOLD_LIFTED, "anna")]


def test_enter_in_a_reason_is_no_command(made: World) -> None:
    """Streamlit clicks the first button of a form then, as Hold for a reason to reject."""
    made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    forms = [block.proto.form for block in at.get("form") if block.proto.form.form_id.startswith("form:")]
    assert len(forms) >= 4 and not any(f.enter_to_submit for f in forms)


def test_the_result_of_a_command_stays_with_its_run(made: World, tmp_path: Path) -> None:
    made.propose("i-1")
    other = create_run_dir(made.run.path.parent, "other")
    other.write({"run_id": "other", "seed": 1, "config": {}})
    other_world = World(run=other, users_path=made.users_path)
    other_world.say(K.RUN_STARTED, {"seed": 1, "roles": {}, "nodes": []})
    at = sign_in(page("operations", made), made.add_user("anna"))
    button(at, "Approve").click().run()
    assert "Done: recorded in the journal." in texts(at)
    at.query_params["run"] = "other"
    at.run()
    assert "No pending plans" in texts(at) and "Done: recorded in the journal." not in texts(at)
    at.query_params["run"] = made.run.run_id
    assert "Done: recorded in the journal." in texts(at.run())


def test_a_veto_ends_the_plan(made: World) -> None:
    made.propose("i-1")
    at = sign_in(page("operations", made), made.add_user("anna"))
    before = len(made.events())
    fill(at, "plan:", "why", "it is being repaired by hand")
    button(at, "Reject").click().run()
    assert _new(made, before) == [(K.PLAN_REJECTED, "anna")]
    assert made.events()[-1].payload.because == "it is being repaired by hand"


# --- everything else ----------------------------------------------------------------------------------------------


def test_all_acting_is_paused_and_goes_on(made: World) -> None:
    at = sign_in(page("operations", made), made.add_user("anna"))
    before = len(made.events())
    fill(at, "pause", "why", "the network is being changed")
    button(at, "Pause").click().run()
    at.run()
    assert "Recovery is paused." in texts(at)
    assert "anna: the network is being changed" in texts(at)
    button(at, "Resume recovery").click().run()
    assert _new(made, before) == [(K.RECOVERY_PAUSED, "anna"), (K.RECOVERY_RESUMED, "anna")]


def test_a_node_is_quarantined_and_returned(made: World) -> None:
    at = sign_in(page("operations", made), made.add_user("anna"))
    before = len(made.events())
    at.selectbox(key="operations.node").select("node-3").run()
    fill(at, "quarantine:", "why", "it is hot")
    button(at, "Quarantine").click().run()
    at.run()
    assert "node-3 was quarantined by anna: it is hot" in texts(at)
    fill(at, "return:", "why", "cooled")
    button(at, "Return to service").click().run()
    assert _new(made, before) == [(K.NODE_QUARANTINED, "anna"), (K.NODE_RETURNED_TO_SERVICE, "anna")]


def test_a_node_is_drained_only_when_its_name_is_typed(made: World) -> None:
    at = sign_in(page("operations", made), made.add_user("anna"))
    at.selectbox(key="operations.node").select("node-2").run()
    assert "rollout/1#1: replace node" in texts(at)
    assert "allowed by all guards" in texts(at)
    before = len(made.events())
    fill(at, "drain:", "why", "its fan is loud")
    fill(at, "drain:", "confirm", "node-1")
    button(at, "Drain").click().run()
    assert len(made.events()) == before
    assert "'node-1' is not 'node-2'" in texts(at)
    fill(at, "drain:", "why", "its fan is loud")
    fill(at, "drain:", "confirm", "node-2")
    button(at, "Drain").click().run()
    drained = made.events(K.NODE_DRAINED)
    assert [(e.payload.by, e.payload.node) for e in drained] == [("anna", "node-2")]
    assert fold_nodes(made.events())["node-2"].quarantined_by == "anna"
    (asked,) = made.incidents().values()
    assert asked.requested_by_operator
    assert asked.diagnosis.because.startswith("anna requested replacement of rollout/1#1")


def test_a_replica_is_replaced_by_hand(made: World) -> None:
    at = sign_in(page("operations", made), made.add_user("anna"))
    before = len(made.events())
    at.selectbox(key="operations.replica").select("trainer/1").run()
    fill(at, "replace:", "why", "it stutters")
    button(at, "Replace").click().run()
    (opened,) = made.events()[before:]
    assert opened.kind is K.INCIDENT_OPENED
    assert "anna requested replacement of trainer/1#1: it stutters" in opened.payload.to_body()["diagnosis"]["because"]


def test_history_lists_who_did_what(made: World) -> None:
    proposed = made.propose("i-1")
    commands.hold_plan(made.run, proposed.digest, "bert", "wait for me", 600.0)
    commands.pause_recovery(made.run, "carla", "a change of the network")
    at = page("operations", made)
    (table,) = [d.value for d in at.dataframe if "operator" in d.value.columns]
    assert list(table["operator"]) == ["carla", "bert"]
    assert list(table["command"]) == ["paused recovery", "put a plan on hold"]
    assert list(table["reason"]) == ["a change of the network", "wait for me"]


def test_a_journal_by_url_alone_takes_a_word_too(made: World) -> None:
    made.propose("i-1")
    at = sign_in(page("operations", made, url_only=True), made.add_user("anna"))
    before = len(made.events())
    button(at, "Approve").click().run()
    assert _new(made, before) == [(K.PLAN_APPROVED, "anna")]
