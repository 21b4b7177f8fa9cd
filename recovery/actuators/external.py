"""The actuator of jobs that rolecall did not start: performs a plan by the calls of a target.

Every call that changes something is an event before it is made, and another one with its reply, under the lease of the
watch. A watch that takes over runs the procedure again: calls with a reply are not made again, their recorded reply is
used; one without a reply is made again only if that does no harm, else the action has failed and on-call is paged.

Calls are made in a thread, one at a time for each plan: `perform` never waits, and returns None meanwhile.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from rolecall.core.clock import Clock
from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.errors import ActuatorError, JournalError, LeaseFenced
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted
from rolecall.core.journal.rows import DamagedLine
from rolecall.core.text import in_words
from rolecall.recovery.actuators.base import ActionResult
from rolecall.recovery.actuators.calls import WITHOUT_EFFECT, Call, Procedure, Reply
from rolecall.recovery.actuators.targets.target import OF_ANOTHER_JOB, Member, Order, Target
from rolecall.recovery.borrowing import Comeback
from rolecall.recovery.policy import ORPHAN

PLANS_AT_ONCE = 8
PREPARES = "prepares:"
"""Before the key of a call that ends no process, in the key of its events."""
CALLS_MAX = 200
"""Of one plan: a procedure that asks for more does not end."""
STALE_SECONDS = 15.0
"""What was read before a gap of this length, in which the watch stood still or the journal was away, may no longer
hold: nothing is changed because of it."""


@dataclass(slots=True)
class _UnderWay:
    """A plan that is being performed. `orders`: not finished; the first one is under way. `fence`: of the lease under
    which it was begun; `fresh_at`: up to when what was read holds. `done`: what each finished order did. `before`: the
    calls that were made before it was begun, to be added to a sentence. `call`: asked for and not answered; `waited`:
    until it was due; `reply`: to the one before, not given yet."""

    orders: list[Order]
    fence: int
    ends_at: float  # monotonic seconds
    fresh_at: float  # monotonic seconds
    done: list[str]
    before: str
    procedure: Procedure | None = None
    call: Call | None = None
    waited: Future[None] | None = None
    pending: Future[Reply] | None = None
    reply: Reply | None = None
    num_calls: int = 0


class ExternalActuator:
    """`members`: (incarnation, process) of all that run, as the watch sees them. `deadline_seconds`: of one plan."""

    schedules = True

    def __init__(
        self,
        target: Target,
        journal: Journal,
        members: Callable[[], Sequence[tuple[int, Member]]],
        clock: Clock,
        *,
        deadline_seconds: float,
    ) -> None:
        self.name, self.supports = target.name, target.supports
        self._target, self._journal, self._members, self._clock = target, journal, members, clock
        self._deadline_seconds = deadline_seconds
        self._pool = ThreadPoolExecutor(PLANS_AT_ONCE, thread_name_prefix="actuator")
        self._under_way: dict[str, _UnderWay] = {}
        self.ended: frozenset[ProcessId] = frozenset()
        """Processes that a call has ended, or may end. Replaced, never changed: another thread may read it."""

    def close(self) -> None:
        """Starts no further call, and does not wait for those that are being made."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        return tuple(map(_ends_too, self.also_ends(plan)))

    def also_ends(self, plan: Plan) -> tuple[str, ...]:
        named = {str(t.replica) for t in plan.targets}
        found = {r for t in plan.targets for r in self._target.also_hit(order_of(plan, t, self._members()))}
        return tuple(sorted(found - named))

    def resume(self, comeback: Comeback, lease: Lease) -> None:
        del lease
        raise ActuatorError(f"{self.name} cannot start {comeback.replica}: nothing lends its node here")

    def perform(self, plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult | None:
        del lost_nodes  # nothing is placed here: the job's own scheduler chooses
        if plan.action not in self.supports:
            raise ActuatorError(f"{self.name} cannot {in_words(plan.action)}")
        state = self._under_way.get(plan.digest)
        if state is None or state.fence != lease.fence or self._is_stale(state):
            # Of a plan that was under way, replies that are in the journal are used again; the rest is read anew.
            ends_at = self._clock.monotonic() + self._deadline_seconds if state is None else state.ends_at
            begun = self._begin(plan, lease, ends_at)
            if isinstance(begun, ActionResult):
                self._under_way.pop(plan.digest, None)
                return begun
            state = self._under_way[plan.digest] = begun
        try:
            finished = self._go_on(plan, state, lease)
        except ActuatorError as e:
            del self._under_way[plan.digest]
            return ActionResult(done=False, because=_why(state, e))
        except (JournalError, LeaseFenced):
            raise  # nothing is lost
        except Exception:
            del self._under_way[plan.digest]  # a defect of the target: its procedure cannot go on
            raise
        if not finished:
            return None
        del self._under_way[plan.digest]
        return ActionResult(done=True, because="; ".join(state.done), facts={"calls": state.num_calls})

    def _begin(self, plan: Plan, lease: Lease, ends_at: float) -> _UnderWay | ActionResult:
        made = self._made(plan)
        if plan.process is not None:
            return self._begin_orphan(plan, plan.process, lease, ends_at, made)
        desired, newer, due = self._journal.desired(), dict[str, str](), list[PlanTarget]()
        for target in plan.targets:
            current = desired.get(target.replica)
            if current is None:
                return ActionResult(done=False, because=f"{target.replica} is not part of this job")
            if current.incarnation > target.incarnation:
                newer[target.replica] = f"{target.replica}#{current.incarnation} runs by now"
            else:
                due.append(target)
        # One that was to leave its node, and that nothing has ended, may have come back there.
        begun = {t.replica for t in plan.targets if _has_begun(made, t.replica)}
        replaced = newer.keys() <= begun if plan.action is ActionKind.REPLACE_NODE else bool(begun)
        if newer and not (due and replaced):
            return ActionResult(done=replaced, because="; ".join(newer.values()) + ("" if replaced else _shown(made)))
        orders = [order_of(plan, t, self._members(), begun=t.replica in begun) for t in due]
        hit = {r for order in orders for r in self._target.also_hit(order)} - {str(t.replica) for t in plan.targets}
        beyond = hit - {*self._journal.desired()}
        if beyond:
            because = f"it would end {', '.join(sorted(beyond))}, too, whose role is not in `roles` of the watch file"
            because += " or which is not of this job" if any(r.endswith(OF_ANOTHER_JOB) for r in beyond) else ""
            return ActionResult(done=False, because=because + _shown(made))
        unnamed = {r for r in hit if _ends_too(r) not in plan.also_hit}
        if unnamed:
            because = f"it would end {', '.join(sorted(unnamed))}, too, which the plan does not name"
            return ActionResult(done=False, because=because + _shown(made))
        now = self._clock.monotonic()
        return _UnderWay(
            orders=orders, fence=lease.fence, ends_at=ends_at, fresh_at=now, done=[*newer.values()], before=_shown(made)
        )

    def _begin_orphan(
        self, plan: Plan, process: ProcessId, lease: Lease, ends_at: float, made: Mapping[str, str]
    ) -> _UnderWay | ActionResult:
        """An orphan belongs to no replica: a process that the watch knows as a rank, of whatever job, is none."""
        name, members = f"{ORPHAN}/{process.pid}", [m for _, m in self._members()]
        rank = next((m for m in members if (m.node, m.pid, m.start_ticks) == _identity(process)), None)
        if rank is not None:
            because = f"process {process.pid} on {process.node} is rank {rank.rank} of {rank.label}, and no orphan"
            return ActionResult(done=False, because=because)
        node, pid, start_ticks = _identity(process)
        order = Order(
            key=f"{plan.digest}:{name}",
            incident_id=str(plan.incident_id),
            replica=name,
            incarnation=0,
            node=node,
            because=plan.because,
            members=(Member(replica=name, rank=0, node=node, pid=pid, start_ticks=start_ticks),),
            others=tuple(members),
            begun=_has_begun(made, name),
        )
        now = self._clock.monotonic()
        return _UnderWay(orders=[order], fence=lease.fence, ends_at=ends_at, fresh_at=now, done=[], before=_shown(made))

    def _is_stale(self, state: _UnderWay) -> bool:
        """Whether what it has read may no longer hold, and there is time to read it anew. Not while the reply to a
        change is due, which is not lost."""
        now, changing = self._clock.monotonic(), state.pending is not None and state.call and state.call.changes
        return not changing and STALE_SECONDS < now - state.fresh_at and now <= state.ends_at

    def _made(self, plan: Plan) -> dict[str, str]:
        """Calls of this plan that were made, by whatever watch, and that may have had an effect: replica and key ->
        words."""
        kinds = [EventKind.CALL_STARTED, EventKind.CALL_ENDED]
        known = self._journal.events(kinds=kinds, incident_id=plan.incident_id, damaged=[])
        replies = {e.key: e.as_(CallEnded).status for e in known if e.kind is EventKind.CALL_ENDED}
        call, reply = (f"{plan.incident_id}:{what}:{plan.digest}:" for what in ("call", "reply"))
        return {
            made: e.as_(CallStarted).words
            for e in known
            if e.kind is EventKind.CALL_STARTED and (e.key or "").startswith(call)
            if replies.get(reply + (made := (e.key or "").removeprefix(call))) not in WITHOUT_EFFECT
        }

    def _go_on(self, plan: Plan, state: _UnderWay, lease: Lease) -> bool:
        """Makes what can be made without waiting. Returns whether all is done. Raises ActuatorError: it failed;
        JournalError, LeaseFenced: an event could not be written, and the same call is due again."""
        while True:
            if state.call is None:
                call = self._next_call(state)
                if call is None:
                    return True
                if state.num_calls >= CALLS_MAX:
                    raise ActuatorError(f"given up after {CALLS_MAX} calls; next would have been: {call.words}")
                state.call = call
                state.num_calls += 1
            call = state.call
            if state.pending is None:
                if self._clock.monotonic() > state.ends_at:
                    words = f"not done within {self._deadline_seconds:g} s; next would have been: {call.words}"
                    raise ActuatorError(words)
                if call.changes:
                    if self._is_stale(state):
                        return False  # the next tick reads anew
                    if not call.prepares:
                        self.ended |= self._ends(state.orders[0])
                    known = self._recorded(plan, state, call) if state.waited is None else None
                    if known is not None:
                        state.reply, state.call = known, None
                        continue
                    if not self._is_due(state, call):
                        return False
                    self._write_start(plan, state, call, lease)
                state.pending = self._pool.submit(call.make if call.changes else partial(_made, call))
            if not state.pending.done():
                state.fresh_at = self._clock.monotonic()
                return False
            reply = state.pending.result()
            if call.changes:
                self._write_reply(plan, state, call, reply, lease)
            state.reply, state.call, state.waited, state.pending = reply, None, None, None
            if not self._is_stale(state):
                state.fresh_at = self._clock.monotonic()

    def _next_call(self, state: _UnderWay) -> Call | None:
        """The next call of the orders; None: all are done."""
        reply, state.reply = state.reply, None
        while True:
            if state.procedure is None:
                if not state.orders:
                    return None
                state.procedure, reply = self._target.replace(state.orders[0]), None
            try:
                return next(state.procedure) if reply is None else state.procedure.send(reply)
            except StopIteration as e:
                state.done.append(str(e.value))
                state.procedure = None
                del state.orders[0]

    def _ends(self, order: Order) -> frozenset[ProcessId]:
        also = {*self._target.also_hit(order)}
        members = (*order.members, *(m for m in order.others if m.label in also))
        return frozenset(ProcessId(node=NodeId(m.node), pid=m.pid, start_ticks=m.start_ticks) for m in members)

    def _key(self, plan: Plan, state: _UnderWay, call: Call, what: str) -> str:
        key = f"{PREPARES}{call.key}" if call.prepares else call.key
        return f"{plan.incident_id}:{what}:{plan.digest}:{state.orders[0].replica}:{key}"

    def _is_due(self, state: _UnderWay, call: Call) -> bool:
        """Whether a change has waited for its time. It is no event before that: nothing was made yet."""
        if not call.after_seconds:
            return True
        if state.waited is None:
            state.waited = self._pool.submit(time.sleep, call.after_seconds)
        state.fresh_at = self._clock.monotonic()
        return state.waited.done()

    def _recorded(self, plan: Plan, state: _UnderWay, call: Call) -> Reply | None:
        """The reply to this call if it was made before, by this watch or another. Raises ActuatorError: that is not
        known, and it must not be made twice."""
        key, ended = self._key(plan, state, call, "call"), self._key(plan, state, call, "reply")
        kinds, damaged = [EventKind.CALL_STARTED, EventKind.CALL_ENDED], list[DamagedLine]()
        known = self._journal.events(kinds=kinds, incident_id=plan.incident_id, damaged=damaged)
        before = {e.key: e for e in known}
        if ended in before:
            replied = before[ended].as_(CallEnded)
            return Reply(status=replied.status, text=replied.text)
        if (key in before or damaged) and not call.repeatable:
            raise ActuatorError(f"it is not known whether this was done, and it is not repeated: {call.words}")
        return None

    def _write_start(self, plan: Plan, state: _UnderWay, call: Call, lease: Lease) -> None:
        started = CallStarted(actuator=self.name, call=call.shown, words=call.words)
        key = self._key(plan, state, call, "call")
        self._journal.append(started, incident_id=plan.incident_id, key=key, lease=lease)

    def _write_reply(self, plan: Plan, state: _UnderWay, call: Call, reply: Reply, lease: Lease) -> None:
        ended = CallEnded(actuator=self.name, status=reply.status, text=reply.short)
        key = self._key(plan, state, call, "reply")
        self._journal.append(ended, incident_id=plan.incident_id, key=key, lease=lease)


def _has_begun(made: Collection[str], replica: str) -> bool:
    """Whether a call of these may have ended the replica."""
    return any(key.startswith(f"{replica}:") and not key.startswith(f"{replica}:{PREPARES}") for key in made)


def _shown(made: Mapping[str, str]) -> str:
    """To be added to a sentence."""
    return f"; calls made before: {', '.join(dict.fromkeys(made.values()))}" if made else ""


def _why(state: _UnderWay, error: ActuatorError) -> str:
    """Why the plan failed, and what was done before."""
    told = _told(state.procedure, error) if state.procedure is not None else str(error)
    done = f"; done before: {'; '.join(state.done)}" if state.done else ""
    return f"{told}{done}{state.before}"


def _told(procedure: Procedure, error: ActuatorError) -> str:
    """What a procedure that is given up makes of the error: it alone knows what it has done. The calls that it would
    still make are not made."""
    with suppress(StopIteration):
        for _ in range(CALLS_MAX):
            try:
                procedure.throw(error)
            except ActuatorError as e:
                return str(e)
    return str(error)


def _identity(process: ProcessId) -> tuple[str, int, int]:
    return str(process.node), process.pid, process.start_ticks


def _ends_too(replica: str) -> str:
    """As in `Plan.also_hit`."""
    return f"{replica} ends too"


def _made(call: Call) -> Reply:
    if call.after_seconds:
        time.sleep(call.after_seconds)
    return call.make()


def order_of(plan: Plan, target: PlanTarget, known: Sequence[tuple[int, Member]], *, begun: bool = False) -> Order:
    """`known`: (incarnation, process) of all that run."""
    ours = [
        m
        for incarnation, m in known
        if m.replica == target.replica and incarnation == target.incarnation and not m.foreign
    ]
    return Order(
        key=f"{plan.digest}:{target.replica}",
        incident_id=str(plan.incident_id),
        replica=str(target.replica),
        incarnation=target.incarnation,
        node=str(target.node),
        because=plan.because,
        members=tuple(sorted(ours, key=lambda m: m.rank)),
        others=tuple(m for _, m in known if m.foreign or m.replica != target.replica),
        leave_node=plan.action is ActionKind.REPLACE_NODE,
        begun=begun,
    )


def calls_of(target: Target, order: Order) -> tuple[list[Call], str]:
    """A dry run: the calls that would change something, and how it ends. Calls that only read are made, unless they
    would wait for what the others change. Raises ActuatorError: the target refuses, with why."""
    procedure, changing = target.replace(order), list[Call]()
    reply: Reply | None = None
    for _ in range(CALLS_MAX):
        try:
            call = next(procedure) if reply is None else procedure.send(reply)
        except StopIteration as e:
            return changing, str(e.value)
        if call.changes:
            changing.append(call)
        reply = call.assumed or (call.success if call.changes else _made(replace(call, after_seconds=0.0)))
    raise ActuatorError(f"given up after {CALLS_MAX} calls")
