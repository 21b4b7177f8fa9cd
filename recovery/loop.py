"""`rolecall watch`: looks, judges, decides, acts, verifies; one tick after the other.

A tick polls the source, feeds the detector, and - while this process holds the lease - makes every move that the
incidents in the journal ask for: from finding to the desired record in one tick. What an incident needs next is decided
by pure functions (`intake`, `policy`, `guards`, `verify`, put together in `moves`); this loop reads what they need and
performs what they say. It keeps nothing that it could not read again: killed at any point, the next one goes on. What
cannot be handled is set apart (`troubles`), and everything else goes on.

Without the lease it looks and judges too, so that its windows are full when the holder dies, and writes nothing.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from rolecall.core.clock import Clock
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan
from rolecall.core.errors import ActuatorError, ConcurrentWrite, JournalCorrupt, JournalError, LeaseFenced
from rolecall.core.faults import Remedy
from rolecall.core.ids import IncidentId, process_start_ticks
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads import IncidentUpdated, LeaseAcquired, OncallPaged, Payload
from rolecall.core.nodes import quarantined_nodes
from rolecall.recovery.actuators.base import ActionResult, Actuator
from rolecall.recovery.actuators.ray_runtime import STOP_FLAG
from rolecall.recovery.detection import FaultTolerantDetector
from rolecall.recovery.fleet import FleetView, fleet_view
from rolecall.recovery.incident_store import WINDOW_NAME, IncidentProjection, open_incident
from rolecall.recovery.incidents.evidence import EvidenceRecorder
from rolecall.recovery.incidents.incident import ActionFailure, Incident
from rolecall.recovery.incidents.unhandled import HandlingFailures
from rolecall.recovery.intake import TriageAction, triage, unrepaired
from rolecall.recovery.interfaces import Detector, EvidenceCollector, Notifier, ObservationSource
from rolecall.recovery.next_step import Append, Decide, Move, Perform, Situation, done, failed, next_step, plan_created
from rolecall.recovery.nodes import known_nodes
from rolecall.recovery.notifications.outbox import NotificationSender
from rolecall.recovery.policy import PolicyInput, decide, question
from rolecall.recovery.quarantine import events_before_plan

logger = logging.getLogger(__name__)

LEASE_NAME = "watch"
PAUSED_FLAG = "paused"
RENEWALS_PER_LEASE = 3
"""The lease is renewed this often within its life: two renewals may fail before anybody succeeds us."""
MOVES_PER_TICK_MAX = 20
"""Moves of one incident within one tick; a whole cure has 8. More is a loop that must not spin."""
STOOD_SECONDS = 5.0
"""A diagnosis that was absent for less than this never went away."""
ADOPTED_SECONDS = 600.0
"""A successor looks whether incidents younger than this lack the window that their watch died before it kept."""
UNHANDLED = "unhandled"
"""Topic of the call for a person when an incident cannot be handled."""
FAILED_TICKS_MAX = 50
"""After so many failed ticks in a row the process ends with the error, and who started it starts another."""
DAMAGED_TICKS_MAX = 5
"""The same for a journal that is damaged: no repetition mends that."""
FAILED_TICK_PAUSE_SECONDS = 0.5


def holder_name() -> str:
    """`<host>:<pid>:<start_ticks>` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}:{process_start_ticks(os.getpid())}"


def holder_pid(holder: str) -> int | None:
    """The PID in such a name."""
    parts = holder.rsplit(":", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else None


class Watch:
    """One watch process. `tick` does everything once; `run` repeats it."""

    def __init__(
        self,
        journal: Journal,
        source: ObservationSource,
        detector: Detector,
        actuator: Actuator,
        config: RecoveryConfig,
        notifier: Notifier,
        clock: Clock,
        holder: str,
        *,
        run_id: str = "",
        poll_seconds: float = 0.25,
        witnesses: EvidenceCollector | None = None,
    ) -> None:
        """`poll_seconds`: how long one look may wait for something new. `witnesses`: who is asked for evidence."""
        self._journal, self._actuator = journal, actuator
        self._judge = FaultTolerantDetector(source, detector, clock)
        self._config, self._notifier, self._clock, self._holder = config, notifier, clock, holder
        self._poll_seconds = poll_seconds
        self._book = IncidentProjection()
        self._teller = NotificationSender(notifier, clock, run_id=run_id, deadman_seconds=config.deadman_seconds)
        self._lease: Lease | None = None
        self._renew_at = 0.0
        self._stood: dict[str, float] = {}  # diagnosis key -> when it last stood, wall seconds
        self._seen_fleet: FleetView | None = None
        self._windows_to_keep: list[str] = []
        self._troubles = HandlingFailures(clock)
        self._file = EvidenceRecorder(witnesses)

    @property
    def acting(self) -> bool:
        """Whether this process holds the lease."""
        return self._lease is not None

    @property
    def finished(self) -> bool:
        """The run is over, and so is every incident."""
        return self._book.ended is not None and not self._book.open_incidents()

    def run(self, stop: threading.Event) -> None:
        """Ticks until `stop` is set or the run is over, then gives the lease back."""
        failures = 0
        while not stop.is_set() and not (self.finished and self.acting):
            try:
                self.tick()
                failures = 0
            except Exception as e:
                # Deliberate: a database that is busy or away, or a bug in one decision, must not end the watching.
                # All state is in the journal, so the next tick starts from what is true; endless failure ends us.
                failures += 1
                logger.exception("tick failed (%d in a row)", failures)
                if failures >= (DAMAGED_TICKS_MAX if isinstance(e, JournalCorrupt) else FAILED_TICKS_MAX):
                    raise
                stop.wait(FAILED_TICK_PAUSE_SECONDS)
        if self._lease is not None:
            with suppress(JournalError, LeaseFenced):  # what has come by now; nobody waits for the rest
                self._write_evidence()
            self._journal.release(self._lease)
            self._lease = None

    def tick(self) -> None:
        """Looks, judges, and makes every move that is due.

        Raises:
            JournalError: the journal cannot be read or written; the next tick goes on from there.
        """
        standing = self._judge.look(self._poll_seconds)
        self._seen_fleet = None
        try:
            held = self._hold_lease()
            self._book.refresh(self._journal)
            self._judge.forget_replaced(self._fleet())
            if not held:
                return
            found = self._take_in(standing)
            for incident_id in [i.incident_id for i in self._book.open_incidents()]:
                if self._troubles.due(incident_id):
                    with self._troubles.apart(incident_id):
                        self._advance(incident_id)
            self._report_broken()
            self._report_troubles(found)
            self._keep_windows()
            self._write_evidence()
            self._teller.tell(self._journal, self._book)
            self._teller.sign_of_life(self._sign_of_life)
        except LeaseFenced as e:
            # Somebody else acts now. Nothing was written under our number, and nothing will be.
            logger.warning("no longer acting: %s", e)
            self._lease = None

    # --- the lease --------------------------------------------------------------------------------------------------

    def _hold_lease(self) -> bool:
        now = self._clock.monotonic()
        if self._lease is not None and now < self._renew_at:
            return True
        if self._lease is None:
            # A look is cheaper than a write: the one that only observes should not compete for the database.
            stands = self._journal.lease(LEASE_NAME)
            if stands and stands.holder not in ("", self._holder) and stands.expires_at > self._clock.wall():
                return False
        lease = self._journal.acquire(LEASE_NAME, self._holder, self._config.lease_seconds)
        self._renew_at = now + self._config.lease_seconds / RENEWALS_PER_LEASE
        before, self._lease = self._lease, lease
        if lease is None:
            return False
        if before is None or before.fence != lease.fence:
            acquired = LeaseAcquired(holder=self._holder, fence=lease.fence, mode=self._config.mode)
            self._write(acquired, key=f"lease:{LEASE_NAME}:{lease.fence}")
            self._teller.adopt(self._journal)
            recent = self._clock.wall() - ADOPTED_SECONDS
            self._windows_to_keep = [i.incident_id for i in self._book.incidents.values() if i.opened_at > recent]
            self._file.adopt(self._journal, (i for i in self._book.open_incidents() if i.opened_at > recent))
        return True

    def _write(
        self,
        payload: Payload,
        *,
        key: str,
        incident: Incident | None = None,
        unless: Collection[EventKind] = (),
    ) -> Event:
        event = self._journal.append(
            payload,
            incident_id=incident.incident_id if incident else None,
            caused_by=incident.last_event_id if incident else None,
            key=key,
            lease=self._lease,
            unless=unless,
            since=incident.last_seq if incident else 0,
        )
        because = getattr(payload, "because", None)
        line = {"event": str(payload.kind), "incident": event.incident_id, "because": because, "seq": event.seq}
        logger.info("%s", json.dumps(line))
        self._book.refresh(self._journal)
        return event

    # --- taking in what stands ----------------------------------------------------------------------------------------

    def _take_in(self, standing: Sequence[Diagnosis]) -> list[Diagnosis]:
        """Returns all that asks to be handled: what stands, and what nobody diagnosed."""
        now = self._clock.wall()
        stopping = self._journal.flag(STOP_FLAG) is not None or self._book.ended is not None
        found = list(standing)
        if not stopping:
            found += unrepaired(self._fleet(), self._book.incidents.values(), now)
        for diagnosis in found:
            if self._troubles.due(diagnosis.key):
                with self._troubles.apart(diagnosis.key):
                    self._take_one(diagnosis, now, stopping)
            elif diagnosis.key in self._stood:
                self._stood[diagnosis.key] = now  # not handled, and not gone either
        self._stood = {k: at for k, at in self._stood.items() if now - at < STOOD_SECONDS}
        return found

    def _take_one(self, d: Diagnosis, now: float, stopping: bool) -> None:
        taken = triage(
            d,
            self._book.incidents.values(),
            self._fleet(),
            stood_before=d.key in self._stood,
            reconsider=self._would_act(d),
        )
        self._stood[d.key] = now
        incident = self._book.incidents.get(taken.incident_id)
        if taken.kind is TriageAction.OPEN and not stopping:
            # Processes of a job that is being stopped end, and that is no fault.
            name = open_incident(self._journal, self._book, d, lease=self._lease)
            self._windows_to_keep.append(name)
            self._file.ask(name, d)
        elif taken.kind is TriageAction.FAIL and incident is not None and incident.attempt is not None:
            # The failure first: one that dies after the update alone would find nothing left to tell.
            move = failed(incident, incident.attempt, ActionFailure.DIED, taken.because)
            self._append(incident, move)
            self._update(self._book.incidents[incident.incident_id], d)
        elif taken.kind is TriageAction.UPDATE and incident is not None:
            self._update(incident, d)

    def _keep_windows(self) -> None:
        """Keeps what the diagnoses had read: after acting, because it takes longer than all of a decision (0.2 s for 30 s
        of 10 processes), and before the next look, so that it is what they had read. What the decisions had read stands
        in their own events."""
        while self._windows_to_keep:
            name = self._windows_to_keep[-1]
            incident = self._book.incidents.get(name)
            # One that cannot be kept is let go: its incident can be resolved all the same.
            with self._troubles.apart(f"window of {name}"):
                if incident is not None and WINDOW_NAME not in self._journal.windows(name):
                    window = {**self._judge.window(incident.diagnosis.suspects)}
                    window["late_seconds"] = round(self._clock.wall() - incident.opened_at, 3)
                    self._journal.save_window(name, WINDOW_NAME, window)
            self._windows_to_keep.pop()

    def _write_evidence(self) -> None:
        """What witnesses have said by now. Nobody waits for it: an incident may be closed when it comes."""
        for account in self._file.heard():
            incident = self._book.incidents.get(account.incident_id)
            if incident is not None:
                key = f"{incident.incident_id}:evidence"
                self._write(account.payload, key=key, incident=incident)
            self._file.written(account)

    def _update(self, incident: Incident, d: Diagnosis) -> None:
        key = f"{incident.incident_id}:updated:{d.key}"
        self._write(IncidentUpdated(diagnosis=d), key=key, incident=incident)

    def _would_act(self, d: Diagnosis) -> bool:
        """Whether policy would now do something about what it tolerated before (a slow replica that got slower)."""
        if d.fault_class.spec.remedy is not Remedy.WEIGH:
            return False
        q = PolicyInput(
            incident_id=IncidentId("inc-0"),
            diagnosis=d,
            fleet=self._fleet(),
            config=self._config,
            past=(),
            supports=self._actuator.supports,
        )
        return decide(q).plan.action is not ActionKind.TOLERATE

    # --- moving incidents on -------------------------------------------------------------------------------------------

    def _advance(self, incident_id: str) -> None:
        for _ in range(MOVES_PER_TICK_MAX):
            incident = self._book.incidents.get(incident_id)
            if incident is None:
                return
            situation = self._situation(incident)
            asked = question(
                incident,
                situation.incidents,
                fleet=situation.fleet,
                config=self._config,
                supports=self._actuator.supports,
                quarantined_nodes=quarantined_nodes(self._journal),
            )
            move = next_step(incident, situation, asked)
            if move is None:
                return
            self._make(incident, move)
            self._seen_fleet = None
        logger.warning("%s: %d moves in one tick, it goes on in the next", incident_id, MOVES_PER_TICK_MAX)

    def _make(self, incident: Incident, move: Move) -> None:
        if isinstance(move, Append):
            self._append(incident, move)
        elif isinstance(move, Decide):
            verdict = decide(move.question)
            plan = replace(verdict.plan, also_hit=tuple(self._actuator.also_hit(verdict.plan)))
            created = plan_created(replace(verdict, plan=plan), move.question)
            self._write(created, key=move.key, incident=incident)
        else:
            self._perform(incident, move)

    def _append(self, incident: Incident, move: Append) -> None:
        try:
            self._write(move.payload, key=move.key, incident=incident, unless=move.unless)
        except ConcurrentWrite as e:
            logger.info("%s", e)
            self._book.refresh(self._journal)

    def _leave(self, incident: Incident, plan: Plan) -> None:
        said = events_before_plan(
            incident,
            plan,
            shut=quarantined_nodes(self._journal),
            known=known_nodes(self._journal),
            share_max=self._config.quarantined_share_max,
            channel=self._notifier.channel,
        )
        for word in said:
            self._append(incident, word)

    def _perform(self, incident: Incident, move: Perform) -> None:
        assert self._lease is not None and incident.attempt is not None
        self._leave(incident, move.plan)
        for target in move.plan.targets:
            # Before it dies: from now on its end is wanted, and no second fault.
            self._judge.forget(target.replica, target.incarnation + 1)
        try:
            result = self._actuator.perform(move.plan, self._lease)
        except ActuatorError as e:
            result = ActionResult(done=False, because=str(e))
        except JournalError:
            raise
        except Exception as e:
            # Not what an actuator may raise: it may pass, and performing again is idempotent. One that does not pass
            # has failed: an incident that acts for ever would hold the others back.
            if not self._troubles.last_try(incident.incident_id):
                raise
            logger.exception("%s: the actuator failed again", incident.incident_id)
            result = ActionResult(done=False, because=f"{self._actuator.name} raises {type(e).__name__}: {e}")
        if result.done:
            self._append(incident, done(incident, incident.attempt, result.to_dict()))
        else:
            self._append(incident, failed(incident, incident.attempt, ActionFailure.REFUSED, result.because))

    def _situation(self, incident: Incident) -> Situation:
        now = self._clock.wall()
        stood = [self._stood[k] for k in incident.seen_keys if k in self._stood]
        return Situation(
            now=now,
            fleet=self._fleet(),
            config=self._config,
            incidents=tuple(self._book.incidents.values()),
            paused=self._journal.flag(PAUSED_FLAG),
            stopping=self._journal.flag(STOP_FLAG),
            ended=self._book.ended,
            absent_seconds=max(0.0, now - max([self._judge.since, incident.opened_at, *stood])),
            progress=self._judge.progress(incident),
            channel=self._notifier.channel,
        )

    def _fleet(self) -> FleetView:
        # Read once a tick, and again after each move.
        if self._seen_fleet is None:
            self._seen_fleet = fleet_view(self._journal.desired(), self._journal.current())
        return self._seen_fleet

    # --- telling people -------------------------------------------------------------------------------------------------

    def _report_broken(self) -> None:
        for name, error in self._book.broken.items():
            if not any(e.key == f"broken:{name}" for e in self._book.to_tell):
                self._write(self._call(str(error)), key=f"broken:{name}")
        if self._judge.error and self._lease is not None:
            because = f"nothing is diagnosed: the source or a detector fails with {self._judge.error}"
            key = f"blind:{self._lease.fence}"
            if not any(e.key == key for e in self._book.to_tell):
                self._write(self._call(because), key=key)

    def _report_troubles(self, found: Sequence[Diagnosis]) -> None:
        for trouble in self._troubles.spent():
            incident = self._book.incidents.get(trouble.name)
            key = f"{trouble.name}:person:{UNHANDLED}"
            if not any(e.key == key for e in self._book.to_tell):
                self._write(self._call(trouble.because(), UNHANDLED), key=key, incident=incident)
        self._troubles.keep_only({d.key for d in found} | {i.incident_id for i in self._book.open_incidents()})

    def _call(self, because: str, topic: str = "watch") -> OncallPaged:
        return OncallPaged(topic=topic, because=because, channel=self._notifier.channel)

    def _sign_of_life(self) -> dict[str, object]:
        return {
            "holder": self._holder,
            "mode": self._config.mode,
            "paused": self._journal.flag(PAUSED_FLAG) is not None,
            "open_incidents": len(self._book.open_incidents()),
            "blind": self._judge.error,
            "unhandled": self._troubles.words(),
        }
