"""Plans performed by calls: each call once, whoever dies in between, and never under a lease that is over."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import ActuatorError, JournalError, LeaseFenced
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted
from rolecall.core.membership import Desired
from rolecall.recovery.actuators.base import ActionResult
from rolecall.recovery.actuators.calls import NO_STATUS, NOT_SENT, TOO_MANY, Call, Procedure, Reply
from rolecall.recovery.actuators.external import STALE_SECONDS, ExternalActuator, calls_of, order_of
from rolecall.recovery.actuators.targets.target import Member, Order
from tests.support import eventually

A, K = ActionKind, EventKind
DEADLINE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCall(Call):
    """Counted in `made`; answers with the call's own key."""

    made: list[str]
    status: int = 0
    may_end: threading.Event | None = None

    @property
    def shown(self) -> str:
        return f"do {self.key}"

    def make(self) -> Reply:
        if self.may_end is not None:
            self.may_end.wait(60.0)
        self.made.append(self.key)
        return Reply(status=self.status, text=f"did {self.key}")


@dataclass
class FakeTarget:
    """Reads, drains, ends. `statuses`: of the calls; `also`: what else a replacement takes down; `prepares`: the drain
    ends no process."""

    name: str = "fake"
    supports: frozenset[ActionKind] = frozenset({A.REPLACE_REPLICA, A.REPLACE_NODE})
    made: list[str] = field(default_factory=list)
    repeatable: bool = False
    statuses: dict[str, int] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    orders: list[Order] = field(default_factory=list)
    endless: bool = False
    held: dict[str, threading.Event] = field(default_factory=dict)  # key of a call -> it ends once this is set
    prepares: bool = False
    tells: str = ""  # to be added to whatever ends it

    def also_hit(self, order: Order) -> Sequence[str]:
        return self.also

    def replace(self, order: Order) -> Procedure:
        self.orders.append(order)
        may_end = self.held.get("read") or self.held.get(f"read {order.replica}")
        read = yield FakeCall(key="read", words="read it", changes=False, made=self.made, may_end=may_end)
        assert read.text == "did read"
        for key in ("drain", "end"):
            reply = yield self._call(key)
            if reply.status:
                raise ActuatorError(f"{key}: {reply.shown}")
        try:
            while self.endless:
                yield FakeCall(key="wait", words="wait for it", changes=False, made=self.made)
        except ActuatorError as e:
            raise ActuatorError(f"{e}{self.tells}") from None
        return f"{order.replica} ended"

    def _call(self, key: str) -> FakeCall:
        status = self.statuses.get(key, 0)
        return FakeCall(
            key=key,
            words=f"{key} it",
            repeatable=self.repeatable,
            prepares=self.prepares and key == "drain",
            made=self.made,
            status=status,
            may_end=self.held.get(key),
        )


class World:
    def __init__(self, folder: Path) -> None:
        self.clock, self.target = FakeClock(), FakeTarget()
        self.journal = Journal(f"sqlite:///{folder / 'journal.db'}", clock=self.clock)
        self.members = [(1, Member(replica="rollout/1", rank=n, node="n", pid=10 + n, start_ticks=5)) for n in (1, 0)]
        self.members += [(2, Member(replica="rollout/2", rank=0, node="n", pid=20, start_ticks=6))]
        self.actuators: list[ExternalActuator] = []
        for replica, incarnation in (("rollout/1", 1), ("rollout/2", 2)):
            record = Desired(replica=ReplicaId(replica), incarnation=incarnation, node=NodeId("n"))
            self.journal.set_desired(record)
        self.lease = self.take("me")
        self.actuator = self.another()

    def take(self, holder: str) -> Lease:
        lease = self.journal.acquire("watch", holder, 5.0, lapsed=self.journal.lease("watch"))
        assert lease is not None
        return lease

    def another(self) -> ExternalActuator:
        """That of a watch that has just started."""
        made = ExternalActuator(self.target, self.journal, lambda: self.members, self.clock, deadline_seconds=DEADLINE)
        self.actuators.append(made)
        return made

    def perform(self, plan: Plan, until: Callable[[], object] = lambda: False) -> ActionResult | None:
        """Ticks until there is a result, or `until`."""
        results: list[ActionResult | None] = []

        def tick() -> bool:
            results.append(self.actuator.perform(plan, self.lease))
            return results[-1] is not None or bool(until())

        eventually(tick, "it has a result")
        return results[-1]

    def calls(self) -> list[str]:
        return [e.as_(CallStarted).call for e in self.journal.events(kinds=[K.CALL_STARTED])]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    it = World(tmp_path)
    yield it
    for actuator in it.actuators:
        actuator.close()
    it.journal.close()


def plan(*who: tuple[str, int], action: ActionKind = A.REPLACE_REPLICA, also_hit: tuple[str, ...] = ()) -> Plan:
    targets = tuple(PlanTarget(replica=ReplicaId(r), incarnation=i, node=NodeId("n")) for r, i in who)
    return Plan(
        incident_id=IncidentId("inc-1-x"), action=action, targets=targets, because="it hangs", also_hit=also_hit
    )


def test_each_change_is_an_event_before_it_is_made_and_one_with_its_reply(world: World) -> None:
    result = world.perform(plan(("rollout/1", 1)))
    assert result == ActionResult(done=True, because="rollout/1 ended", facts={"calls": 3})
    assert world.target.made == ["read", "drain", "end"] and world.calls() == ["do drain", "do end"]
    replies = [e.as_(CallEnded) for e in world.journal.events(kinds=[K.CALL_ENDED])]
    assert [(r.status, r.text) for r in replies] == [(0, "did drain"), (0, "did end")]
    assert {e.incident_id for e in world.journal.events(kinds=[K.CALL_STARTED, K.CALL_ENDED])} == {"inc-1-x"}


def test_the_order_has_the_processes_of_the_named_incarnation_only(world: World) -> None:
    world.perform(plan(("rollout/1", 1), action=A.REPLACE_NODE))
    (order,) = world.target.orders
    assert [m.pid for m in order.members] == [10, 11] and [m.pid for m in order.others] == [20]
    assert order.leave_node and (order.role, order.index, order.because) == ("rollout", 1, "it hangs")


def test_several_replicas_are_replaced_one_after_the_other(world: World) -> None:
    result = world.perform(plan(("rollout/1", 1), ("rollout/2", 2)))
    assert result is not None and result.because == "rollout/1 ended; rollout/2 ended"
    assert world.target.made == ["read", "drain", "end"] * 2


def test_a_call_that_fails_is_the_result_and_nothing_follows(world: World) -> None:
    world.target.statuses["drain"] = 5
    result = world.perform(plan(("rollout/1", 1)))
    assert result == ActionResult(done=False, because="drain: status 5: did drain")
    assert world.target.made == ["read", "drain"]


@pytest.mark.parametrize("incarnation", [0, 2])
def test_another_incarnation_than_the_named_one_is_left_alone(world: World, incarnation: int) -> None:
    record = Desired(replica=ReplicaId("rollout/1"), incarnation=incarnation + 1, node=NodeId("n"))
    world.journal.set_desired(record)
    result = world.perform(plan(("rollout/1", incarnation)))
    assert result is not None and not result.done and "runs by now" in result.because
    assert world.target.made == []


def test_a_replica_that_is_not_of_the_job_is_refused(world: World) -> None:
    result = world.perform(plan(("rollout/7", 1)))
    assert result == ActionResult(done=False, because="rollout/7 is not part of this job")


def test_an_action_that_the_target_does_not_have_is_refused(world: World) -> None:
    with pytest.raises(ActuatorError, match="fake cannot stop job"):
        world.actuator.perform(plan(action=A.STOP_JOB), world.lease)


def test_calls_with_a_reply_are_not_made_again_by_a_successor(world: World) -> None:
    one = plan(("rollout/1", 1))
    begin(world, one, "end")
    world.actuator, world.target.made[:] = world.another(), []
    # The call that ends it has an event and no reply: it may have had its effect.
    result = world.perform(one)
    assert result is not None and not result.done and "it is not repeated: end it" in result.because
    assert world.target.made == ["read"] and world.target.orders[-1].begun


def test_a_call_that_does_no_harm_is_repeated_by_a_successor(world: World) -> None:
    world.target.repeatable = True
    one = plan(("rollout/1", 1))
    begin(world, one, "end")
    world.actuator, world.target.made[:] = world.another(), []
    result = world.perform(one)
    assert result is not None and result.done and world.target.made == ["read", "end"]
    assert world.calls() == ["do drain", "do end"], "one event for each"


def test_a_successor_finds_what_was_begun_done_when_the_replacement_runs(world: World) -> None:
    one = plan(("rollout/1", 1))
    world.perform(one, until=lambda: len(world.calls()) == 2)
    eventually(lambda: world.target.made[-1:] == ["end"], "it is made, and the watch dies")
    world.journal.set_desired(Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("n")))
    world.actuator, world.target.made[:] = world.another(), []
    result = world.perform(one)
    assert result == ActionResult(done=True, because="rollout/1#2 runs by now") and world.target.made == []


def second(world: World, one: Plan) -> None:
    """The first of its two replicas was replaced, and is seen to run again; then the watch ends."""
    may_end = world.target.held["read rollout/2"] = threading.Event()
    world.perform(one, until=lambda: len(world.target.orders) == 2)
    world.journal.set_desired(Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("n")))
    world.actuator, world.target.orders[:] = world.another(), []
    may_end.set()


def test_a_successor_replaces_the_replicas_that_are_left(world: World) -> None:
    one = plan(("rollout/1", 1), ("rollout/2", 2))
    second(world, one)
    result = world.perform(one)
    assert result is not None and result.done and result.because == "rollout/1#2 runs by now; rollout/2 ended"
    (order,) = world.target.orders
    assert order.replica == "rollout/2" and not order.begun, "no call was made for it"
    assert world.calls() == ["do drain", "do end"] * 2


def test_what_was_replaced_before_is_told_when_the_rest_fails(world: World) -> None:
    one = plan(("rollout/1", 1), ("rollout/2", 2))
    second(world, one)
    world.target.statuses["end"] = 5
    result = world.perform(one)
    because = "end: status 5: did end; done before: rollout/1#2 runs by now; calls made before: drain it, end it"
    assert result == ActionResult(done=False, because=because)


def test_a_successor_finds_several_replicas_done_when_all_of_them_run(world: World) -> None:
    one = plan(("rollout/1", 1), ("rollout/2", 2))
    second(world, one)
    world.journal.set_desired(Desired(replica=ReplicaId("rollout/2"), incarnation=3, node=NodeId("n")))
    result = world.perform(one)
    assert result == ActionResult(done=True, because="rollout/1#2 runs by now; rollout/2#3 runs by now")
    assert not world.target.orders


def test_a_replica_that_came_back_before_anything_ended_it_was_not_replaced(world: World) -> None:
    """Its node was drained, which ends no process: it failed by itself, and may run on the same node."""
    world.target.prepares = True
    one = plan(("rollout/1", 1), action=A.REPLACE_NODE)
    begin(world, one, "drain")
    world.journal.set_desired(Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("n")))
    world.actuator, world.target.made[:] = world.another(), []
    result = world.perform(one)
    assert result == ActionResult(done=False, because="rollout/1#2 runs by now; calls made before: drain it")
    assert not world.target.made


def test_a_replica_of_several_that_nothing_has_ended_has_not_left_its_node(world: World) -> None:
    one = plan(("rollout/1", 1), ("rollout/2", 2), action=A.REPLACE_NODE)
    second(world, one)
    world.journal.set_desired(Desired(replica=ReplicaId("rollout/2"), incarnation=3, node=NodeId("n")))
    result = world.perform(one)
    assert result is not None and not result.done and "rollout/2#3 runs by now" in result.because


@pytest.mark.parametrize(("status", "begun"), [(NOT_SENT, False), (TOO_MANY, False), (NO_STATUS, True), (0, True)])
def test_a_call_that_had_no_effect_has_ended_nothing(world: World, status: int, begun: bool) -> None:
    world.target.statuses["drain"] = status
    one = plan(("rollout/1", 1))
    world.perform(one, until=lambda: world.journal.events(kinds=[K.CALL_ENDED]))
    world.actuator = world.another()
    world.perform(one)
    assert world.target.orders[-1].begun is begun


def test_which_processes_it_ends_is_known_before_their_replacements_are_seen(world: World) -> None:
    world.target.also, world.target.prepares = ("rollout/2",), True
    one = plan(("rollout/1", 1), also_hit=("rollout/2 ends too",))
    begin(world, one, "drain")
    assert not world.actuator.ended
    begin(world, one, "end")
    assert {p.pid for p in world.actuator.ended} == {10, 11, 20}


def test_without_the_lease_no_call_is_made(world: World) -> None:
    old = world.lease
    world.clock.advance(10.0)
    world.take("another")
    with pytest.raises(LeaseFenced):
        eventually(lambda: world.actuator.perform(plan(("rollout/1", 1)), old), "it is refused")
    assert world.target.made == ["read"], "what changes nothing"


def test_an_event_that_cannot_be_written_delays_and_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is busy before the call, and again when its reply is there."""
    append, failures = Journal.append, iter([True, False, True, True, False, False, True, False])

    def unsteady(journal: Journal, *args: object, **kwargs: object) -> object:
        if next(failures, False):
            raise JournalError("busy")
        return append(journal, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "append", unsteady)
    results: list[ActionResult | None] = []

    def tick() -> bool:
        with suppress(JournalError):
            results.append(world.actuator.perform(plan(("rollout/1", 1)), world.lease))
        return bool(results) and results[-1] is not None

    eventually(tick, "it is done")
    assert results[-1] is not None and results[-1].done
    assert world.target.made == ["read", "drain", "end"] and world.calls() == ["do drain", "do end"]
    assert next(failures, None) is None, "every failure was met"


def test_a_defect_of_a_target_is_no_success(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(order: Order) -> Procedure:
        yield FakeCall(key="read", words="read it", changes=False, made=world.target.made)
        raise KeyError("a defect")

    monkeypatch.setattr(world.target, "replace", broken)
    for _ in range(2):
        with pytest.raises(KeyError):
            world.perform(plan(("rollout/1", 1)))
    assert world.target.made == ["read"] * 2


def test_a_plan_ends_at_its_deadline(world: World) -> None:
    world.target.endless = True
    one = plan(("rollout/1", 1))
    world.perform(one, until=lambda: "wait" in world.target.made)
    world.clock.advance(DEADLINE + 1)
    result = world.perform(one)
    assert result == ActionResult(done=False, because="not done within 60 s; next would have been: wait for it")


def test_a_procedure_that_does_not_end_is_given_up(world: World) -> None:
    world.target.endless = True
    result = world.perform(plan(("rollout/1", 1)))
    assert result is not None and not result.done and result.because.startswith("given up after 200 calls")


@pytest.mark.parametrize("at_deadline", [True, False])
def test_what_was_done_is_told_when_a_plan_is_given_up(world: World, at_deadline: bool) -> None:
    world.target.endless, world.target.tells = True, "; node n is cordoned"
    one = plan(("rollout/1", 1))
    if at_deadline:
        world.perform(one, until=lambda: "wait" in world.target.made)
        world.clock.advance(DEADLINE + 1)
    result = world.perform(one)
    assert result is not None and result.because.endswith("would have been: wait for it; node n is cordoned")
    assert not result.done


def test_a_procedure_that_would_clean_up_when_it_is_given_up_makes_no_further_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untidy(order: Order) -> Procedure:
        made = world.target.made
        try:
            while True:
                yield FakeCall(key="wait", words="wait for it", changes=False, made=made)
        except ActuatorError as e:
            try:
                yield FakeCall(key="clear", words="clear it", made=made)
            except ActuatorError:
                raise ActuatorError(f"{e}; clear it by hand") from None
        return "cleared"

    monkeypatch.setattr(world.target, "replace", untidy)
    result = world.perform(plan(("rollout/1", 1)))
    assert result is not None and result.because.endswith("wait for it; clear it by hand")
    assert "clear" not in world.target.made


def test_a_replica_whose_role_may_not_be_replaced_is_not_taken_down_with_another(world: World) -> None:
    world.target.also = ("rollout/2", "trainer/0")
    result = world.perform(plan(("rollout/1", 1)))
    assert result is not None and not result.done and world.target.made == []
    assert result.because.startswith("it would end trainer/0, too, whose role is not in `roles`")


def test_what_else_a_replacement_takes_down_is_told(world: World) -> None:
    world.target.also = ("rollout/2", "rollout/1", "trainer/0")
    assert world.actuator.also_hit(plan(("rollout/1", 1))) == ("rollout/2 ends too", "trainer/0 ends too")
    assert world.actuator.also_ends(plan(("rollout/1", 1))) == ("rollout/2", "trainer/0")


def test_a_dry_run_reads_and_changes_nothing(world: World) -> None:
    one = plan(("rollout/1", 1))
    calls, ends = calls_of(world.target, order_of(one, one.targets[0], world.members))
    assert [c.shown for c in calls] == ["do drain", "do end"] and ends == "rollout/1 ended"
    assert world.target.made == ["read"] and world.calls() == []


def begin(world: World, one: Plan, up_to: str = "read") -> None:
    """Up to the reply to this call, which is not taken yet."""
    may_end = world.target.held[up_to] = threading.Event()
    world.perform(one, until=lambda: up_to == "read" or f"do {up_to}" in world.calls())
    may_end.set()
    eventually(lambda: world.target.made[-1:] == [up_to], "it is made")


def test_nothing_is_changed_because_of_what_was_read_before_a_gap(world: World) -> None:
    """The watch stood still, or its journal was away: another process may have the place of the named one."""
    one = plan(("rollout/1", 1))
    begin(world, one)
    world.clock.advance(STALE_SECONDS + 1)
    result = world.perform(one)
    assert result is not None and result.done and world.target.made == ["read", "read", "drain", "end"]


def test_after_a_gap_the_newer_incarnation_is_found(world: World) -> None:
    one = plan(("rollout/1", 1))
    begin(world, one)
    world.journal.set_desired(Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("n")))
    world.clock.advance(STALE_SECONDS + 1)
    assert world.perform(one) == ActionResult(done=False, because="rollout/1#2 runs by now")
    assert world.target.made == ["read"]


def test_a_busy_journal_makes_a_gap_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan(("rollout/1", 1))
    begin(world, one)
    append = Journal.append

    def busy(*args: object, **kwargs: object) -> object:
        raise JournalError("busy")

    monkeypatch.setattr(Journal, "append", busy)
    met: list[str] = []

    def tick() -> bool:
        try:
            world.actuator.perform(one, world.lease)
        except JournalError as e:
            met.append(str(e))
        return len(met) > 1

    eventually(tick, "the change cannot be written")
    monkeypatch.setattr(Journal, "append", append)
    world.clock.advance(STALE_SECONDS + 1)
    result = world.perform(one)
    assert result is not None and result.done and world.target.made == ["read", "read", "drain", "end"]


def test_a_reply_that_is_due_survives_a_gap(world: World) -> None:
    one = plan(("rollout/1", 1))
    begin(world, one, "drain")
    world.clock.advance(STALE_SECONDS + 1)
    result = world.perform(one)
    assert result is not None and result.done and world.target.made == ["read", "drain", "read", "end"]


def test_a_gap_gives_no_more_time(world: World) -> None:
    world.target.endless = True
    one = plan(("rollout/1", 1))
    begin(world, one)
    world.clock.advance(STALE_SECONDS + 1)
    world.perform(one, until=lambda: "wait" in world.target.made)
    world.clock.advance(DEADLINE - STALE_SECONDS)
    result = world.perform(one)
    assert result is not None and result.because.startswith("not done within 60 s")


def test_a_watch_that_leads_again_reads_again(world: World) -> None:
    """Another watch has led in between, and may have performed the plan."""
    one = plan(("rollout/1", 1))
    begin(world, one)
    for holder in ("another", "me"):
        world.clock.advance(6.0)
        world.lease = world.take(holder)
    result = world.perform(one)
    assert result is not None and result.done and world.target.made == ["read", "read", "drain", "end"]


def test_a_replica_that_the_plan_does_not_name_is_not_taken_down_with_another(world: World) -> None:
    """It came there after the plan was made, and perhaps approved."""
    world.target.also = ("rollout/2",)
    result = world.perform(plan(("rollout/1", 1)))
    because = "it would end rollout/2, too, which the plan does not name"
    assert result == ActionResult(done=False, because=because) and world.target.made == []
    result = world.perform(plan(("rollout/1", 1), also_hit=("rollout/2 ends too",)))
    assert result is not None and result.done


def test_a_replica_of_another_job_is_not_taken_down_whatever_its_name(world: World) -> None:
    foreign = Member(replica="rollout/2", rank=0, node="n", pid=30, start_ticks=6, foreign=True)
    world.target.also = (foreign.label,)
    result = world.perform(plan(("rollout/1", 1), also_hit=(f"{foreign.label} ends too",)))
    assert result is not None and not result.done and world.target.made == []
    assert "rollout/2 of another job" in result.because and result.because.endswith("or which is not of this job")


def test_processes_of_another_job_are_others_also_under_the_same_name(world: World) -> None:
    world.members.append((0, Member(replica="rollout/1", rank=0, node="n", pid=30, start_ticks=6, foreign=True)))
    world.perform(plan(("rollout/1", 1)))
    (order,) = world.target.orders
    assert [m.pid for m in order.members] == [10, 11] and [m.pid for m in order.others] == [20, 30]


def test_a_call_that_cannot_be_read_in_the_journal_may_have_been_made(world: World) -> None:
    world.journal.append_unchecked(K.CALL_STARTED, {"x": 1}, incident_id="inc-1-x")
    result = world.perform(plan(("rollout/1", 1)))
    assert result is not None and not result.done and "it is not repeated: drain it" in result.because
    world.target.repeatable = True
    result = world.perform(plan(("rollout/1", 1)))
    assert result is not None and result.done


def test_a_damaged_call_of_another_incident_says_nothing(world: World) -> None:
    world.journal.append_unchecked(K.CALL_STARTED, {"x": 1}, incident_id="inc-2-x")
    result = world.perform(plan(("rollout/1", 1)))
    assert result is not None and result.done
