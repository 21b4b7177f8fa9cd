"""Ends the control loop at its n-th journal write or actuator call, as SIGKILL would."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import ActionKind, Plan
from rolecall.core.journal.events import Event
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.membership import Desired
from rolecall.recovery.actuators.base import ActionResult, Actuator
from rolecall.recovery.borrowing import Comeback


class SimulatedKill(BaseException):
    """SIGKILL, as far as one thread can play it: no handler of the product may catch it."""


class KillSwitch:
    """Counts the points where a watch may die: before and after each write, before and after each action."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.num_transactions = 0  # begun for writing, whichever method did it
        self.dies_at: int | None = None  # index into `points`; None: never
        self.dies_before = ""  # or: before the next call of this name

    def point(self, what: str) -> None:
        self.points.append(what)
        counted = self.dies_at is not None and len(self.points) - 1 == self.dies_at
        if counted or (self.dies_before and what == f"before {self.dies_before}"):
            raise SimulatedKill(what)

    def around(self, what: str, call: Callable[[], Any]) -> Any:
        self.point(f"before {what}")
        result = call()
        self.point(f"after {what}")
        return result


class KillableJournal(Journal):
    """A journal whose every write passes a `KillSwitch`."""

    def __init__(self, url: str, *, clock: FakeClock, switch: KillSwitch) -> None:
        super().__init__(url, clock=clock)
        self._switch = switch
        begin = self.store.write

        @contextmanager
        def counted() -> Iterator[sa.Connection]:
            switch.num_transactions += 1
            with begin() as conn:
                yield conn

        # What passes no switch shows in this count.
        self.store.write = counted  # type: ignore[method-assign]

    def append(self, payload: Payload, **more: Any) -> Event:
        event: Event = self._switch.around(
            f"append {payload.kind}", lambda: super(KillableJournal, self).append(payload, **more)
        )
        return event

    def acquire(self, name: str, holder: str, ttl_seconds: float, *, lapsed: Lease | None = None) -> Lease | None:
        lease: Lease | None = self._switch.around(
            "acquire", lambda: super(KillableJournal, self).acquire(name, holder, ttl_seconds, lapsed=lapsed)
        )
        return lease

    def release(self, lease: Lease) -> None:
        self._switch.around("release", lambda: super(KillableJournal, self).release(lease))

    def set_desired(self, record: Desired, **more: Any) -> bool:
        done: bool = self._switch.around(
            "set_desired", lambda: super(KillableJournal, self).set_desired(record, **more)
        )
        return done

    def set_flag(self, name: str, value: str | None) -> None:
        self._switch.around(f"set_flag {name}", lambda: super(KillableJournal, self).set_flag(name, value))

    def save_window(self, incident_id: str, name: str, value: Any) -> None:
        self._switch.around("save_window", lambda: super(KillableJournal, self).save_window(incident_id, name, value))


class KillableActuator:
    """An actuator whose every action passes a `KillSwitch`, and is counted."""

    def __init__(self, inner: Actuator, switch: KillSwitch) -> None:
        self._inner, self._switch = inner, switch
        self.performed: list[Plan] = []

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def supports(self) -> frozenset[ActionKind]:
        return self._inner.supports

    @property
    def schedules(self) -> bool:
        return self._inner.schedules

    def also_hit(self, plan: Plan) -> tuple[str, ...]:
        return self._inner.also_hit(plan)

    def also_ends(self, plan: Plan) -> tuple[str, ...]:
        return self._inner.also_ends(plan)

    def perform(self, plan: Plan, lease: Lease, lost_nodes: Collection[str] = ()) -> ActionResult | None:
        self.performed.append(plan)
        result: ActionResult | None = self._switch.around(
            "perform", lambda: self._inner.perform(plan, lease, lost_nodes)
        )
        return result

    def resume(self, comeback: Comeback, lease: Lease) -> None:
        self._switch.around("resume", lambda: self._inner.resume(comeback, lease))
