"""Hold, lift and veto over whole watches: what an operator says of a plan stands until its end, whoever dies meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import CommandRefused, ConcurrentWrite, ConfigError
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.core.rundir import RunDir
from rolecall.recovery.incidents import IncidentOutcome, IncidentState
from rolecall.recovery.loop import Watch
from rolecall.recovery.operators import commands, queries
from rolecall.recovery.operators.run_location import JournalLocation
from rolecall.testing.recovery_world import diagnosis
from tests.events import filled
from tests.recovery.world import World
from tests.terminal.texts import incidents_text, status_text

K = EventKind
APPROVAL_SECONDS = 60.0


def proposing(path: Path) -> tuple[World, RunDir, Watch, str]:
    """A watch in mode approve with one proposal."""
    world = World(path, mode="approve", approval_timeout_seconds=APPROVAL_SECONDS)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(lambda: any(i.state is IncidentState.PROPOSED for i in world.incidents()), watch)
    return world, RunDir(path), watch, _digest(world)


def holding(path: Path) -> tuple[World, RunDir, Watch, str]:
    """A watch in mode act with one plan that a pause holds."""
    world, run = World(path, free_nodes=1), RunDir(path)
    watch = world.watch()
    commands.pause_recovery(run, "bob", "a look")
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(lambda: world.events(K.PLAN_BLOCKED), watch)
    return world, run, watch, _digest(world)


def _digest(world: World) -> str:
    attempt = world.only().attempt
    assert attempt is not None
    return attempt.plan.digest


def test_nothing_begins_while_it_is_held_and_all_goes_on_after(tmp_path: Path) -> None:
    world, run, watch, digest = holding(tmp_path)
    said = commands.hold_plan(run, digest, "alice", "let me get a dump", 30.0, world.clock)
    assert said.startswith("on hold until 20") and said.endswith(": replace replica of rollout/1#1 (inc-1-rollout-1)")
    commands.resume_recovery(run, "bob")
    world.run(29, watch)
    assert world.runtime.replaced == [] and world.only().state is IncidentState.PLANNED
    reported = status_text(queries.status(run, world.clock))
    assert "on hold by alice until" in reported and "let me get a dump" in reported
    world.until(world.all_closed, watch)
    assert world.runtime.replaced == [("rollout/1", 1)] and world.only().outcome is IncidentOutcome.RESOLVED
    (called,) = world.events(K.ONCALL_PAGED)
    assert called.payload.because.startswith("the hold by alice ended (let me get a dump): replace replica")
    assert called.seq < world.events(K.ACTION_STARTED)[0].seq


def test_a_lifted_hold_sends_no_page(tmp_path: Path) -> None:
    world, run, watch, digest = holding(tmp_path)
    commands.hold_plan(run, digest, "alice", "let me get a dump", 3600.0, world.clock)
    commands.resume_recovery(run, "bob")
    world.run(5, watch)
    assert "hold lifted: " in commands.lift_hold(run, digest, "bob", "done", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.events(K.ONCALL_PAGED) == []
    with pytest.raises(CommandRefused, match="no open plan"):
        commands.lift_hold(run, digest, "bob", "again", world.clock)


def test_a_held_proposal_lapses_only_after_the_hold(tmp_path: Path) -> None:
    world, run, watch, digest = proposing(tmp_path)
    commands.hold_plan(run, digest, "alice", "asking the owner", 200.0, world.clock)
    began = world.clock.wall()
    world.run(190, watch)
    assert world.only().state is IncidentState.PROPOSED
    world.until(world.all_closed, watch, seconds=200)
    lapsed = world.events(K.PLAN_EXPIRED)[0].wall_at - began
    assert 200 + APPROVAL_SECONDS <= lapsed < 200 + APPROVAL_SECONDS + 2
    assert [e.payload.topic.partition(":")[0] for e in world.events(K.ONCALL_PAGED)] == ["hold_over", "expired"]
    assert world.runtime.replaced == []


def test_an_approval_waits_for_the_end_of_the_hold(tmp_path: Path) -> None:
    world, run, watch, digest = proposing(tmp_path)
    commands.hold_plan(run, digest, "alice", "asking the owner", 30.0, world.clock)
    assert "; on hold by alice until" in commands.approve_plan(run, digest, "bob", world.clock)
    world.run(29, watch)
    assert world.runtime.replaced == []
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED
    # It is used up: no word fits any more.
    for word in (commands.approve_plan, commands.reject_plan):
        with pytest.raises(CommandRefused, match="no open plan"):
            word(run, digest, "bob", clock=world.clock)


def test_hold_again_extends(tmp_path: Path) -> None:
    world, run, watch, digest = holding(tmp_path)
    commands.hold_plan(run, digest, "alice", "first", 10.0, world.clock)
    with pytest.raises(CommandRefused, match=r"already on hold by alice until"):
        commands.hold_plan(run, digest, "carol", "second", 5.0, world.clock)
    world.run(8, watch)
    commands.hold_plan(run, digest, "carol", "second", 10.0, world.clock)
    commands.resume_recovery(run, "bob")
    world.run(9, watch)
    assert world.runtime.replaced == []
    world.until(world.all_closed, watch)
    (called,) = world.events(K.ONCALL_PAGED)
    assert "the hold by carol ended" in called.payload.because, "the first one never ended by itself"


@pytest.mark.parametrize("setting", [holding, proposing])
def test_a_veto_ends_it(tmp_path: Path, setting: Callable[[Path], tuple[World, RunDir, Watch, str]]) -> None:
    world, run, watch, digest = setting(tmp_path)
    commands.hold_plan(run, digest, "alice", "mine", 600.0, world.clock)
    commands.reject_plan(run, digest, "alice", "I debug it", world.clock)
    for word in (commands.hold_plan, commands.lift_hold):
        with pytest.raises(CommandRefused):
            word(run, digest, "alice", "more", *([9.0] if word is commands.hold_plan else []), clock=world.clock)
    commands.resume_recovery(run, "bob")
    world.until(world.all_closed, watch)
    world.run(30, watch)
    assert world.runtime.replaced == [] and world.only().outcome is IncidentOutcome.ESCALATED
    assert world.only().because == "rejected by alice: I debug it"
    assert [e.payload.topic for e in world.events(K.ONCALL_PAGED)] == ["rejected"]


def test_more_that_is_known_does_not_end_a_hold(tmp_path: Path) -> None:
    """The new plan takes down the same incarnation as the held one."""
    world, run, watch, digest = holding(tmp_path)
    commands.hold_plan(run, digest, "alice", "let me get a dump", 30.0, world.clock)
    commands.resume_recovery(run, "bob")
    world.detector.extra = [diagnosis(FaultClass.GPU, ("rollout/1", 1), onset=world.clock.wall())]
    world.run(29, watch)
    attempt = world.only().attempt
    assert attempt is not None and attempt.plan.action is ActionKind.REPLACE_NODE and _digest(world) != digest
    assert world.runtime.replaced == [] and world.only().state is IncidentState.PLANNED
    world.until(lambda: world.runtime.replaced, watch)


@pytest.mark.parametrize(("seconds", "replaced"), [(-5.0, []), (5.0, [("rollout/1", 1)])])
def test_a_veto_is_not_gone_around_under_another_name(
    tmp_path: Path, seconds: float, replaced: list[tuple[str, int]]
) -> None:
    """What began before the word is what it was about; what began after it is a new fault."""
    world, run, watch, digest = holding(tmp_path)
    commands.reject_plan(run, digest, "alice", "I debug it", world.clock)
    commands.resume_recovery(run, "bob")
    world.until(world.all_closed, watch)
    onset = world.clock.wall() + seconds
    world.run(10, watch)
    world.detector.extra = [diagnosis(FaultClass.GPU, ("rollout/1", 1), onset=onset)]
    world.run(5, watch)
    assert world.runtime.replaced == replaced
    commands.replace(run, "rollout/1", "done with it", "alice", world.clock)
    world.until(lambda: world.runtime.replaced, watch)


def test_a_started_plan_cannot_be_held(tmp_path: Path) -> None:
    world, run, watch = World(tmp_path), RunDir(tmp_path), None
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(lambda: world.events(K.ACTION_STARTED), watch)
    for word in (commands.hold_plan, commands.reject_plan):
        with pytest.raises(CommandRefused, match=r"is verifying. In mode act a plan starts as soon as"):
            word(run, _digest(world), "alice", "wait", *([9.0] if word is commands.hold_plan else []))
    assert len(world.incidents()) == 1 and world.events(K.HOLD_PLACED) == []


def test_a_request_that_is_held_waits_as_long_as_a_new_one(tmp_path: Path) -> None:
    world = World(tmp_path, approval_timeout_seconds=10.0)
    run, watch = RunDir(tmp_path), world.watch()
    commands.pause_recovery(run, "bob", "a look")
    commands.replace(run, "rollout/2", "it looks tired", "alice", world.clock)
    world.until(lambda: world.events(K.PLAN_BLOCKED), watch)
    commands.hold_plan(run, _digest(world), "carol", "not now", 60.0, world.clock)
    world.run(65, watch)
    assert world.only().state is IncidentState.PLANNED
    commands.resume_recovery(run, "bob")
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 86_401.0])
def test_a_hold_has_an_end(tmp_path: Path, seconds: float) -> None:
    world, run, _, digest = holding(tmp_path)
    with pytest.raises(CommandRefused, match="at most 86400 s"):
        commands.hold_plan(run, digest, "alice", "for ever", seconds, world.clock)


def _just_before(world: World, kind: EventKind, say: Callable[[], str]) -> list[str]:
    """Says it once, when the watch has decided to write an event of this kind and has not written it."""
    pass_on, said = world.switch.point, list[str]()

    def point(what: str) -> None:
        pass_on(what)
        if what == f"before append {kind}" and not said:
            said.append(say())

    world.switch.point = point  # type: ignore[method-assign]
    return said


def test_a_word_that_comes_as_the_action_begins_is_not_lost(tmp_path: Path) -> None:
    """The watch has decided to begin, and an operator's word is written first: nothing begins."""
    world, run, watch, digest = holding(tmp_path)
    commands.resume_recovery(run, "bob")
    said = _just_before(
        world, K.ACTION_STARTED, lambda: commands.hold_plan(run, digest, "alice", "stop!", 20.0, world.clock)
    )
    world.run(19, watch)
    assert said and world.runtime.replaced == [] and world.events(K.ACTION_STARTED) == []
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and world.runtime.replaced == [("rollout/1", 1)]


def test_a_hold_that_comes_as_the_proposal_lapses_is_not_lost(tmp_path: Path) -> None:
    world, run, watch, digest = proposing(tmp_path)
    said = _just_before(
        world, K.PLAN_EXPIRED, lambda: commands.hold_plan(run, digest, "alice", "wait", 20.0, world.clock)
    )
    world.until(lambda: said, watch, seconds=APPROVAL_SECONDS + 5)
    world.run(15, watch)
    assert world.only().state is IncidentState.PROPOSED and world.events(K.PLAN_EXPIRED) == []
    commands.approve_plan(run, digest, "bob", world.clock)
    world.until(world.all_closed, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED


def test_overtaken_counts_only_what_was_named_and_is_newer(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = world.journal.append(filled(K.PLAN_BLOCKED, {}), incident_id="inc-1", key="k")
    world.journal.append(filled(K.PLAN_BLOCKED, {}), incident_id="inc-2")
    again = world.journal.append(filled(K.PLAN_BLOCKED, {}), incident_id="inc-1", key="k", unless=[K.PLAN_BLOCKED])
    assert again == first, "what stands already is no news"
    world.journal.append(filled(K.PLAN_EXPIRED, {}), incident_id="inc-1", unless=[K.PLAN_BLOCKED], since=first.seq)
    with pytest.raises(ConcurrentWrite, match=r"inc-1: plan_blocked was not written, e3 plan_expired came first"):
        world.journal.append(filled(K.PLAN_BLOCKED, {}), incident_id="inc-1", unless=[K.PLAN_EXPIRED], since=first.seq)


def test_marks(tmp_path: Path) -> None:
    world, run = World(tmp_path), RunDir(tmp_path)
    watch = world.watch()
    world.runtime.inject("rollout/1", FaultClass.HANG)
    world.until(world.all_closed, watch)
    name = world.only().incident_id
    assert commands.review_diagnosis(run, name, False, "alice", "it was me") == f"diagnosis of {name} reviewed as wrong"
    commands.review_diagnosis(run, name, True, "bob")
    world.run(2, watch)
    assert world.only().outcome is IncidentOutcome.RESOLVED and len(world.incidents()) == 1
    (reported,) = queries.incidents(run)
    assert reported["review"]["verdict"] == "right" and reported["review"]["by"] == "bob"
    assert f"{name} resolved" in incidents_text([reported]) and "reviewed as right by bob" in incidents_text([reported])
    with pytest.raises(CommandRefused, match="no incident inc-9"):
        commands.review_diagnosis(run, "inc-9", True, "bob")


@pytest.mark.parametrize("name", ["", "  ", "x" * 65, "bob\x1b[2J", "a\nb"])
def test_commands_need_a_user_name(tmp_path: Path, name: str) -> None:
    world, run, _, digest = proposing(tmp_path)
    words: list[Callable[[], str]] = [
        lambda: commands.pause_recovery(run, name, "why"),
        lambda: commands.resume_recovery(run, name),
        lambda: commands.approve_plan(run, digest, name),
        lambda: commands.reject_plan(run, digest, name),
        lambda: commands.hold_plan(run, digest, name, "why", 9.0),
        lambda: commands.lift_hold(run, digest, name),
        lambda: commands.review_diagnosis(run, "inc-1-rollout-1", True, name),
        lambda: commands.replace(run, "rollout/2", "why", name),
    ]
    before = world.journal.head()
    for word in words:
        with pytest.raises(CommandRefused, match="is not a user name"):
            word()
    assert world.journal.head() == before


def test_the_url_of_a_journal_is_enough(tmp_path: Path) -> None:
    world, run, watch, digest = proposing(tmp_path)
    place = JournalLocation(world.url)
    assert place.run_id == run.run_id == tmp_path.name
    commands.approve_plan(place, digest, "alice", world.clock)
    world.until(world.all_closed, watch)
    assert queries.status(place, world.clock)["run"] == run.run_id
    with pytest.raises(ConfigError) as error:
        JournalLocation("mysql://u:secret@h/d")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "run_id"),
    [
        ("sqlite:////runs/demo-1/journal.db", "demo-1"),
        ("sqlite:////tmp/mine.db", "mine"),
        ('postgresql://u:p@h/d?options=-csearch_path%3D"rolecall-demo-2"', "demo-2"),
        ("postgresql://u@h/d", "d"),
    ],
)
def test_a_journal_url_gives_the_run_id(url: str, run_id: str) -> None:
    place = JournalLocation(url)
    assert place.run_id == run_id and ":p@" not in repr(place)
