"""Operator commands and queries on a real database, with a watch running."""

from pathlib import Path

import pytest

from rolecall.core.errors import CommandRefused, InvalidId
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.loop import Watch
from rolecall.recovery.notifications.outbox import notification_text
from rolecall.recovery.operators import commands, queries
from rolecall.testing.recovery_world import diagnosis
from tests.events import filled
from tests.recovery.world import World
from tests.terminal.texts import incidents_text, status_text

K = EventKind


def approving(path: Path) -> tuple[World, RunDir, Watch]:
    world = World(path, mode="approve", approval_timeout_seconds=60.0)
    return world, RunDir(path), world.watch()


def proposed(world: World, watch: Watch) -> str:
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.until(lambda: any(i.state is IncidentState.PROPOSED for i in world.incidents()), watch)
    attempt = world.only().attempt
    assert attempt is not None
    return attempt.plan.digest


def test_an_approved_plan_is_performed_once(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    world.run(5, watch)
    assert world.runtime.replaced == []
    assert [m.kind for m in world.notifier.messages] == ["plan_proposed"]
    assert commands.approve_plan(run, digest, "alice", world.clock) == (
        "approved: replace replica of rollout/1#1 (inc-1-rollout-1)"
    )
    with pytest.raises(CommandRefused, match="was already approved"):
        commands.approve_plan(run, digest, "bob", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.desired("rollout/1") == 2
    with pytest.raises(CommandRefused, match="no open plan"):
        commands.approve_plan(run, digest, "alice", world.clock)
    assert [m.kind for m in world.notifier.messages] == ["plan_proposed", "plan_approved", "incident_closed"]


def test_an_approval_is_for_one_digest(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    with pytest.raises(CommandRefused, match=f"plans awaiting a decision: {digest}"):
        commands.approve_plan(run, "0123456789abcdef", "alice", world.clock)
    assert world.only().state is IncidentState.PROPOSED


def test_an_approval_is_for_the_incarnations_that_it_names(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    commands.approve_plan(run, digest, "alice", world.clock)
    # Before it is executed, somebody else replaces the replica.
    stands = world.journal.desired()["rollout/1"]  # type: ignore[index]
    world.journal.set_desired(type(stands)(replica=stands.replica, incarnation=2, node=stands.node))
    world.until(world.all_closed, watch)
    assert world.desired("rollout/1") == 2 and world.events(K.ACTION_STARTED) == []
    assert world.only().outcome is IncidentOutcome.SELF_RECOVERED


def test_a_retry_needs_an_approval_of_its_own(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    world.runtime.starts_that_die["rollout/1"] = 1
    digest = proposed(world, watch)
    commands.approve_plan(run, digest, "alice", world.clock)
    world.until(lambda: len(world.only().attempts) == 2 and world.only().state is IncidentState.PROPOSED, watch)
    world.run(5, watch)
    assert world.desired("rollout/1") == 2
    second = world.only().attempts[1].plan.digest
    assert second != digest
    commands.approve_plan(run, second, "alice", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.desired("rollout/1") == 3


def test_the_guards_look_again_after_an_approval(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    commands.pause_recovery(run, "bob", "upgrade")
    commands.approve_plan(run, digest, "alice", world.clock)
    world.run(5, watch)
    assert world.runtime.replaced == []
    commands.resume_recovery(run, "bob")
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


def test_a_proposal_lapses_and_an_operator_is_reported(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    world.until(world.all_closed, watch, seconds=120)
    with pytest.raises(CommandRefused):
        commands.approve_plan(run, digest, "alice", world.clock)
    world.run(30, watch)
    assert world.runtime.replaced == [] and world.only().outcome is IncidentOutcome.ESCALATED
    assert [m.kind for m in world.notifier.messages] == ["plan_proposed", "plan_expired", "oncall_paged"]
    assert all("not approved for 60 s" in m.because for m in world.notifier.messages[1:])


def test_an_approval_that_cannot_be_used_in_time_lapses_too(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    commands.pause_recovery(run, "bob", "upgrade")
    commands.approve_plan(run, digest, "alice", world.clock)
    world.until(world.all_closed, watch, seconds=120)
    commands.resume_recovery(run, "bob")
    world.run(30, watch)
    assert world.runtime.replaced == [] and world.only().outcome is IncidentOutcome.ESCALATED
    assert "approved but blocked by a guard" in world.notifier.messages[-1].because


def test_too_late_is_refused_even_where_no_watch_has_noticed(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    world.clock.advance(61)
    with pytest.raises(CommandRefused, match="expired 1 s ago"):
        commands.approve_plan(run, digest, "alice", world.clock)


def test_the_first_word_stands(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    assert "rejected: " in commands.reject_plan(run, digest, "bob", "it is mine to debug")
    with pytest.raises(CommandRefused, match="was already rejected"):
        commands.approve_plan(run, digest, "alice", world.clock)
    world.until(world.all_closed, watch)
    assert world.runtime.replaced == [] and "it is mine to debug" in world.only().because


def test_a_request_goes_through_the_guards(tmp_path: Path) -> None:
    world = World(tmp_path)
    run, watch = RunDir(tmp_path), world.watch()
    world.step(watch)
    said = commands.replace(run, "rollout/2", "it looks tired", "alice", world.clock)
    assert said == "inc-1-rollout-2 opened: rollout/2 will be replaced once all guards allow it"
    with pytest.raises(CommandRefused, match="inc-1-rollout-2 already handles rollout/2"):
        commands.replace(run, "rollout/2", "again", "alice", world.clock)
    world.until(world.all_closed, watch)
    incident = world.only()
    assert incident.outcome is IncidentOutcome.RESOLVED and world.desired("rollout/2") == 2
    assert incident.diagnosis.because == "alice requested replacement of rollout/2#1: it looks tired"


def test_a_request_is_no_proposal_but_counts_like_any_other(tmp_path: Path) -> None:
    world = World(tmp_path, mode="approve", evictions_per_hour_max=1)
    run, watch = RunDir(tmp_path), world.watch()
    commands.replace(run, "rollout/2", "it looks tired", "alice", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED
    commands.replace(run, "rollout/1", "this one too", "alice", world.clock)
    world.run(30, watch)
    assert world.desired("rollout/1") == 1
    (reported,) = [m for m in world.notifier.messages if m.kind == "oncall_paged"]
    assert "the limit is 1" in reported.because


def test_a_request_in_observe_mode_is_held_and_ends(tmp_path: Path) -> None:
    world = World(tmp_path, mode="observe", approval_timeout_seconds=20.0)
    run, watch = RunDir(tmp_path), world.watch()
    said = commands.replace(run, "rollout/2", "please", "alice", world.clock)
    assert f"no watch holds the lease; `rolecall status {run.shell_name}` prints the command that starts one" in said
    world.until(world.all_closed, watch)
    assert world.runtime.replaced == []
    assert "mode is observe" in world.only().because and world.only().outcome is IncidentOutcome.ESCALATED


@pytest.mark.parametrize(("replica", "error"), [("rollout/9", CommandRefused), ("rollout", InvalidId)])
def test_a_request_for_an_unknown_replica_is_refused(tmp_path: Path, replica: str, error: type[Exception]) -> None:
    World(tmp_path)
    with pytest.raises(error):
        commands.replace(RunDir(tmp_path), replica, "please", "alice")


def test_status_and_incidents(tmp_path: Path) -> None:
    world = World(tmp_path)
    run, watch = RunDir(tmp_path), world.watch()
    commands.pause_recovery(run, "bob", "upgrade \x1b[31mred")
    world.runtime.inject("rollout/1", FaultClass.CRASH)
    world.run(3, watch)
    value = queries.status(run, world.clock)
    assert value["mode"] == "act" and value["watch"] == {"holder": "host:1:1", "fence": 1}
    assert value["evictions_last_hour"] == 0
    assert [i["held_by"] for i in value["open_incidents"]] == [["paused"]]
    text = status_text(value)
    assert "blocked (paused): paused by bob: upgrade" in text
    assert "PAUSED: bob: upgrade \\x1b[31mred" in text and "\x1b" not in text
    assert "inc-1-rollout-1 planned: rollout/1#1: crash" in text
    commands.resume_recovery(run, "bob")
    world.until(world.all_closed, watch)
    assert queries.status(run, world.clock)["evictions_last_hour"] == 1
    (one,) = queries.incidents(run, "inc-1-rollout-1")
    assert one["outcome"] == "resolved" and one["events"][0]["kind"] == "incident_opened"
    assert "incident verified" in incidents_text([one])
    assert [i["incident_id"] for i in queries.incidents(run)] == ["inc-1-rollout-1"]
    with pytest.raises(CommandRefused, match="there are: inc-1-rollout-1"):
        queries.incidents(run, "inc-7")
    world.clock.advance(60)
    assert "NO WATCH IS RUNNING" in status_text(queries.status(run, world.clock))
    assert commands.resume_recovery(run, "bob").endswith("was not paused")


@pytest.mark.parametrize("fault", [FaultClass.CRASH, FaultClass.SLOW])
def test_every_decision_replays(tmp_path: Path, fault: FaultClass) -> None:
    world = World(tmp_path)
    run, watch = RunDir(tmp_path), world.watch()
    world.runtime.starts_that_die["rollout/1"] = 1
    world.runtime.inject("rollout/1", fault)
    world.until(world.all_closed, watch)
    value = queries.replay(run, "inc-1-rollout-1")
    assert value["same"] is True and len(value["plans"]) == 2
    assert ": same decision" in value["text"] and "replace replica" in value["text"]
    with pytest.raises(CommandRefused):
        queries.replay(run, "inc-2-rollout-1")


def test_a_decision_that_would_differ_now_is_reported(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.SLOW)
    world.until(world.all_closed, watch)
    (made,) = world.events(K.PLAN_CREATED)
    question = {
        **made.payload.to_body()["question"],
        "config": {**made.payload.to_body()["question"]["config"], "horizon_seconds": 1.0},
    }
    world.journal.append(world.events(K.INCIDENT_OPENED)[0].payload, incident_id="inc-2-other")
    world.journal.append(
        filled(K.PLAN_CREATED, {**made.payload.to_body(), "question": question}), incident_id="inc-2-other"
    )
    value = queries.replay(RunDir(tmp_path), "inc-2-other")
    assert value["same"] is False and "DIFFERENT decision" in value["text"]


HOSTILE = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script> [red]x[/red]\nno open incidents\r\u202eevil"


def _hostile_world(path: Path) -> World:
    world = World(path)
    world.detector.extra = [
        diagnosis(FaultClass.CONTROL_PLANE, ("reward/0", 1), onset=world.clock.wall(), because=HOSTILE)
    ]
    watch = world.watch()
    commands.pause_recovery(RunDir(path), "bob", HOSTILE)
    world.run(3, watch)
    return world


def _is_text(reported: str, ours: int) -> None:
    lines = reported.splitlines()
    assert all(line.isprintable() for line in lines) and len(lines) == ours, "it neither steers nor adds a line"
    assert any("<script>alert(1)</script> [red]x[/red]\\x0ano open incidents" in line for line in lines)


def test_foreign_text_is_shown_as_text(tmp_path: Path) -> None:
    world = _hostile_world(tmp_path)
    run = RunDir(tmp_path)
    status = queries.status(run, world.clock)
    _is_text(status_text(status), 4 + len(status["replicas"]))
    name = world.only().incident_id
    _is_text(incidents_text(queries.incidents(run, name)), 4 + len(world.journal.events(incident_id=name)))
    _is_text(queries.replay(run, name)["text"], 2)


def test_foreign_text_is_reported_as_text(tmp_path: Path) -> None:
    world = _hostile_world(tmp_path)
    (reported,) = world.notifier.messages
    _is_text(reported.because, 1)
    assert reported.because.count("\\x1b") >= 1


def test_a_long_sentence_is_cut() -> None:
    assert len(notification_text("x" * 10_000)) == 2000 and notification_text("short") == "short"


def test_a_run_that_has_ended_takes_no_command_that_would_act(tmp_path: Path) -> None:
    world, run, watch = approving(tmp_path)
    digest = proposed(world, watch)
    world.journal.append(filled(K.RUN_ENDED, {"outcome": "done", "because": "all steps are done"}))
    before = len(world.journal.events())
    refused = [
        lambda: commands.replace(run, "rollout/0", "why not", "ada", world.clock),
        lambda: commands.approve_plan(run, digest, "ada", world.clock),
        lambda: commands.reject_plan(run, digest, "ada", "no", world.clock),
        lambda: commands.hold_plan(run, digest, "ada", "wait", 60.0, world.clock),
        lambda: commands.lift_hold(run, digest, "ada", "", world.clock),
        lambda: commands.quarantine(run, "node-1", "ada", "hot", world.clock),
        lambda: commands.return_node(run, "node-1", "ada", "cold", world.clock),
        lambda: commands.drain(run, "node-1", "ada", "hot", world.clock),
    ]
    for command in refused:
        with pytest.raises(CommandRefused, match=r"has ended \(all steps are done\)"):
            command()
    assert len(world.journal.events()) == before, "nothing was written"
    assert "reviewed as right" in commands.review_diagnosis(run, world.only().incident_id, True, "ada")
