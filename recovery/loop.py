"""The recovery loop of `rolecall watch`: observe, diagnose, decide, act, verify; one tick after the other.

A tick polls the source, feeds the detector and, if this process holds the lease, performs every step that the incidents
in the journal need: from finding to desired record in one tick. Pure functions (`triage`, `policy` and `guards`,
combined in `next_step`) decide; this loop reads their inputs and performs their steps. All state is in the journal: if
the process is killed at any point, the next one continues. An incident that cannot be handled is isolated (`isolation`)
and the others continue.

Without the lease the loop observes and diagnoses but writes nothing, so that its windows are full if the leader dies.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from rolecall.core.clock import Clock, SteadyTime
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.config.section import RecoveryMode
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget
from rolecall.core.errors import (
    ActuatorError,
    ConcurrentWrite,
    JournalCorrupt,
    JournalError,
    JournalUnavailable,
    LeaseFenced,
)
from rolecall.core.faults import Remedy
from rolecall.core.ids import IncidentId, process_start_ticks
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal, Lease
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.recovery import (
    IncidentUpdated,
    LeaseAcquired,
    OncallPaged,
    PlanCreated,
)
from rolecall.core.journal.rows import DamagedLine
from rolecall.core.membership import ReplicaState
from rolecall.core.nodes import quarantined_nodes
from rolecall.recovery.actuators.base import ActionResult, Actuator
from rolecall.recovery.actuators.ray_runtime import STOP_FLAG
from rolecall.recovery.borrowing import comebacks
from rolecall.recovery.fleet_view import FleetView, RunPlaces, fleet_view
from rolecall.recovery.guards import Situation
from rolecall.recovery.incidents import UNDER_REPAIR, WINDOW_NAME, ActionFailure, Incident, IncidentState
from rolecall.recovery.interfaces import Detector, EvidenceCollector, Notifier, ObservationSource
from rolecall.recovery.isolation import EvidenceRecorder, FaultTolerantDetector, HandlingFailures, evidence_key
from rolecall.recovery.next_step import (
    Append,
    Decide,
    Perform,
    done,
    events_before_plan,
    failed,
    needs_node,
    next_step,
    restart_waits,
)
from rolecall.recovery.nodes import NODE_KINDS, fold_nodes, known_nodes, returned_nodes
from rolecall.recovery.notifications.outbox import NotificationSender
from rolecall.recovery.policy import FULL_DISK, PolicyInput, busy_replicas, decide, lost_nodes, question
from rolecall.recovery.projection import IncidentProjection, open_incident
from rolecall.recovery.triage import (
    TriageAction,
    failed_burn_ins,
    suspected_once,
    triage,
    unrepaired,
    with_runtime_reason,
)

logger = logging.getLogger(__name__)

LEASE_NAME = "watch"
PAUSED_FLAG = "paused"
RENEWALS_PER_LEASE = 3
"""Renewals per lease duration: two may fail before another watch can take over."""
MOVES_PER_TICK_MAX = 20
"""Steps of one incident in one tick; a complete recovery has 8. More indicates an endless loop."""
REPORTED_SECONDS = 5.0
"""A diagnosis that was absent for less than this never cleared."""
ADOPTED_SECONDS = 600.0
"""A new leader checks whether incidents younger than this lack the window that a dying watch did not store."""
UNHANDLED = "unhandled"
"""Topic of the page for an incident that cannot be handled."""
LENDERS_RESUMED = "the return of lenders"
"""Name under which failures of it are counted."""
FAILED_TICKS_MAX = 50
"""After this many failed ticks in a row the process exits with the error, for its supervisor to restart it."""
DAMAGED_TICKS_MAX = 5
"""The same for a damaged journal, which no retry repairs."""
UNAVAILABLE_TICKS_MAX = 300
"""The same for a journal that cannot be used (a full disk, a server that restarts), at least 150 s: a new process would
have the same journal and would have forgotten what the detectors have seen. A run waits 120 s for it."""
OUTAGE_PAGED_SECONDS = 30.0
"""A server that restarts or fails over is back by then."""
OUTAGE = "journal"
"""Topic of the page for a journal that cannot be used."""
FAILED_TICK_PAUSE_SECONDS = 0.5
LATE_EXIT_SECONDS = 60.0
"""What an action was to end and still runs so long after it failed, or after its incident closed, runs on. Until then
its end is no fault: processes get time to end, 30 s as a rule, and agents of a large fleet are asked every 10 s."""
REDISCOVERY_SECONDS = 60.0
"""The absence of a diagnosis that an earlier watch made says nothing for this long, unless its plan was performed: the
detectors of a restarted watch need up to 33 s for a slow replica."""


def holder_name() -> str:
    """`<host>:<pid>:<start_ticks>` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}:{process_start_ticks(os.getpid())}"


def holder_pid(holder: str) -> int | None:
    """The PID in a `holder_name`."""
    parts = holder.rsplit(":", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else None


def failed_ticks_max(error: Exception) -> int:
    """How many failures in a row end the process, the last of them being `error`."""
    if isinstance(error, JournalCorrupt):
        return DAMAGED_TICKS_MAX
    return UNAVAILABLE_TICKS_MAX if isinstance(error, JournalUnavailable) else FAILED_TICKS_MAX


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
        evidence_collector: EvidenceCollector | None = None,
        reaper: Actuator | None = None,
        orphans_mode: RecoveryMode = "observe",
    ) -> None:
        """`poll_seconds`: longest wait of one poll for new data. `reaper`: acts on incidents of orphans, in
        `orphans_mode`; None: `actuator` does, in the mode of `config`."""
        self._journal, self._actuator = journal, actuator
        self._detector = FaultTolerantDetector(source, detector, clock)
        if not actuator.supports:
            config = config.model_copy(update={"mode": "observe"})
        self._config, self._notifier, self._clock, self._holder = config, notifier, clock, holder
        self._reaper = reaper
        self._orphans_config = config if reaper is None else config.model_copy(update={"mode": orphans_mode})
        self._poll_seconds = poll_seconds
        self._time = SteadyTime(clock)
        self._projection = IncidentProjection(self._time)
        self._notifications = NotificationSender(notifier, clock, run_id=run_id, deadman_seconds=config.deadman_seconds)
        self._lease: Lease | None = None
        self._renew_at = 0.0
        self._followed: Lease | None = None  # of another watch, as last read
        self._lapses_at = 0.0  # unless it is renewed, monotonic seconds
        self._reported_at: dict[str, float] = {}  # diagnosis key -> when it last stood, monotonic seconds
        self._lost_at: dict[tuple[str, int], float] = {}  # incarnation -> when it was first seen lost, the same
        self._diagnoses: list[Diagnosis] = []  # of this tick
        self._paged_of: set[tuple[str, float]] = set()  # full disks of which on-call was told without the journal
        self._outage_since: float | None = None  # of the journal, monotonic seconds
        self._outage_paged = False
        self._cached_fleet: FleetView | None = None
        self._places = RunPlaces(scheduled=actuator.schedules)
        self._windows_to_keep: list[str] = []
        self._failures = HandlingFailures(clock)
        self._evidence = EvidenceRecorder(evidence_collector)

    @property
    def acting(self) -> bool:
        """Whether this process holds the lease."""
        return self._lease is not None

    @property
    def lease(self) -> Lease | None:
        """Under which this process writes, as it last knew; another watch may hold it by now."""
        return self._lease

    @property
    def finished(self) -> bool:
        """Whether the run ended and every incident is closed."""
        return self._projection.ended is not None and not self._projection.open_incidents()

    def run(self, stop: threading.Event) -> None:
        """Ticks until `stop` is set or the run is over, then releases the lease."""
        failures = 0
        while not stop.is_set() and not (self.finished and self.acting):
            try:
                self.tick()
                failures = 0
                self._outage_since, self._outage_paged = None, False
            except Exception as e:
                # Deliberate: a busy or unavailable database, or a bug in one decision, must not end the watch. All
                # state is in the journal, so the next tick starts from it; repeated failure ends the process.
                failures += 1
                logger.exception("tick failed (%d in a row)", failures)
                if isinstance(e, JournalUnavailable):
                    self._page_of_outage(e)
                if failures >= failed_ticks_max(e):
                    raise
                stop.wait(FAILED_TICK_PAUSE_SECONDS)
        if self._lease is not None:
            with suppress(JournalError, LeaseFenced):  # what is complete by now
                self._write_evidence()
            self._journal.release(self._lease)
            self._lease = None

    def tick(self) -> None:
        """Observes, diagnoses and performs every step that is due. Raises JournalError: the journal cannot be read or
        written; the next tick continues from its state."""
        diagnoses = self._diagnoses = self._detector.poll(self._poll_seconds)
        self._cached_fleet = None
        self._projection.follow()
        try:
            held = self._hold_lease()
            with self._journal.view():
                self._projection.refresh(self._journal)
                fleet = self._fleet()
                stopping = self._journal.flag(STOP_FLAG) is not None or self._projection.ended is not None
            self._detector.forget_replaced(fleet, self._ending())
            if not held:
                return
            found = self._triage_all(diagnoses, stopping)
            for incident_id in [i.incident_id for i in self._projection.open_incidents()]:
                if self._failures.due(incident_id):
                    with self._failures.isolate(incident_id):
                        self._advance(incident_id)
            with self._failures.isolate(LENDERS_RESUMED):
                self._resume_lenders()
            self._report_troubles(found)
            self._keep_windows()
            self._write_evidence()
            self._notifications.send(self._journal, self._projection)
            self._notifications.heartbeat(self._facts)
        except LeaseFenced as e:
            # Another watch is the leader; nothing more is written under our fencing number.
            logger.warning("no longer recovery leader: %s", e)
            self._lease = None

    # --- the lease --------------------------------------------------------------------------------------------------

    def _hold_lease(self) -> bool:
        now, seconds = self._clock.monotonic(), self._config.lease_seconds
        if self._lease is not None and now < self._renew_at:
            return True
        if self._lease is None:
            # A read is cheaper than a write: a follower should not compete for the database.
            current, known = self._journal.lease(LEASE_NAME), self._followed
            if current != known:
                self._followed = current
                # Of one that was not seen before, the wall clock of its holder tells the age.
                left = current.expires_at - self._time.now() if current and known is None else seconds
                self._lapses_at = now + min(max(left, 0.0), seconds)
            if current and current.holder not in ("", self._holder) and now < self._lapses_at:
                return False
        lease = self._journal.acquire(LEASE_NAME, self._holder, seconds, lapsed=self._followed)
        self._renew_at = now + seconds / RENEWALS_PER_LEASE
        before, self._lease = self._lease, lease
        if lease is None:
            return False
        if before is None or before.fence != lease.fence:
            mode, orphans_mode = self._config.mode, self._orphans_config.mode
            acquired = LeaseAcquired(holder=self._holder, fence=lease.fence, mode=mode, orphans_mode=orphans_mode)
            self._write(acquired, key=f"lease:{LEASE_NAME}:{lease.fence}")
            self._notifications.adopt(self._journal)
            recent = self._time.now() - ADOPTED_SECONDS
            self._windows_to_keep = [i.incident_id for i in self._projection.incidents.values() if i.opened_at > recent]
            self._evidence.adopt(self._journal, (i for i in self._projection.open_incidents() if i.opened_at > recent))
        return True

    def _write(
        self, payload: Payload, *, key: str, incident: Incident | None = None, unless: Collection[EventKind] = ()
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
        logger.info("%s", json.dumps({name: value for name, value in line.items() if value is not None}))
        self._projection.refresh(self._journal)
        return event

    # --- triage -------------------------------------------------------------------------------------------------------

    def _triage_all(self, diagnoses: Sequence[Diagnosis], stopping: bool) -> list[Diagnosis]:
        """Returns all current diagnoses, with those that only the journal shows: lost replicas that no detector
        diagnosed, and suspected ones on a node whose burn-in failed.
        """
        now, wall_at = self._clock.monotonic(), self._time.now()
        found = list(diagnoses)
        if not stopping:
            fleet, incidents = self._fleet(), self._projection.incidents.values()
            lost = [(r.replica, r.incarnation) for r in fleet.replicas if r.state is ReplicaState.LOST]
            self._lost_at = {key: self._lost_at.get(key, now) for key in lost}
            lost_seconds = {replica: now - at for (replica, _), at in self._lost_at.items()}
            found += unrepaired(fleet, incidents, wall_at, lost_seconds)
            suspected = suspected_once(incidents, fleet)
            if suspected:
                damaged: list[DamagedLine] = []  # a line that cannot be read says nothing
                nodes = fold_nodes(self._journal.events(kinds=NODE_KINDS, damaged=damaged))
                found += failed_burn_ins(suspected, nodes, wall_at)
        for diagnosis in found:
            if self._failures.due(diagnosis.key):
                with self._failures.isolate(diagnosis.key):
                    self._triage(diagnosis, now, stopping)
            elif diagnosis.key in self._reported_at:
                self._reported_at[diagnosis.key] = now  # not handled, but still reported
        self._reported_at = {k: at for k, at in self._reported_at.items() if now - at < REPORTED_SECONDS}
        return found

    def _triage(self, diagnosis: Diagnosis, now: float, stopping: bool) -> None:
        fleet = self._fleet()
        diagnosis = with_runtime_reason(diagnosis, fleet)
        taken = triage(
            diagnosis,
            self._projection.incidents.values(),
            fleet,
            reported_before=diagnosis.key in self._reported_at,
            reconsider=self._would_act(diagnosis),
            worked=self._detector.worked({s.replica: s.incarnation for s in diagnosis.suspects if s.replica}),
        )
        self._reported_at[diagnosis.key] = now
        incident = self._projection.incidents.get(taken.incident_id)
        if taken.kind is TriageAction.OPEN and not stopping:
            # Processes of a stopping job end; that is no fault.
            name = open_incident(self._journal, self._projection, diagnosis, lease=self._lease)
            self._windows_to_keep.append(name)
            self._evidence.request(self._projection.incidents[name])
        elif taken.kind is TriageAction.FAIL and incident is not None and incident.attempt is not None:
            # The failure first: after a crash between the two, the update alone would hide it.
            self._append(incident, failed(incident, incident.attempt, ActionFailure.DIED, taken.because))
            self._update(self._projection.incidents[incident.incident_id], diagnosis, "its replacement failed")
        elif taken.kind is TriageAction.UPDATE and incident is not None:
            self._update(incident, diagnosis, taken.because)

    def _keep_windows(self) -> None:
        """Stores what the detectors had read: after acting, because it takes longer than a whole decision (0.2 s for 30
        s of 10 processes), and before the next poll changes it. The policy's input is in the plan's own event."""
        while self._windows_to_keep:
            name = self._windows_to_keep[-1]
            incident = self._projection.incidents.get(name)
            # A window that cannot be stored is dropped: its incident can be resolved without it.
            with self._failures.isolate(f"window of {name}"):
                if incident is not None and WINDOW_NAME not in self._journal.windows(name):
                    window = {**self._detector.window(incident.diagnosis.suspects)}
                    window["late_seconds"] = round(self._time.now() - incident.opened_at, 3)
                    self._journal.save_window(name, WINDOW_NAME, window)
            self._windows_to_keep.pop()

    def _write_evidence(self) -> None:
        """Writes evidence collected so far. The incident may already be closed when it arrives."""
        for collected in self._evidence.collected():
            incident = self._projection.incidents.get(collected.incident_id)
            if incident is not None:
                key = evidence_key(incident.incident_id, collected.part)
                self._write(collected.payload, key=key, incident=incident)
            self._evidence.written(collected)

    def _update(self, incident: Incident, diagnosis: Diagnosis, relation: str) -> None:
        ranks = ",".join(sorted(str(s.rank) for s in diagnosis.suspects))
        key = f"{incident.incident_id}:updated:{diagnosis.key}:{ranks}"
        self._write(IncidentUpdated(diagnosis=diagnosis, relation=relation), key=key, incident=incident)
        self._evidence.request(self._projection.incidents[incident.incident_id])

    def _would_act(self, diagnosis: Diagnosis) -> bool:
        """Whether policy would now act on what it tolerated before: a slow replica got slower, or there is a node by
        now for a lost one."""
        fleet, incidents = self._fleet(), self._projection.incidents.values()
        if diagnosis.fault_class.spec.remedy is not Remedy.WEIGH and not any(
            view is not None and view.lost for view in (fleet.find(s.replica) for s in diagnosis.suspects)
        ):
            return False
        facts = PolicyInput(
            incident_id=IncidentId("inc-0"),
            diagnosis=diagnosis,
            fleet=fleet,
            config=self._config,
            past=(),
            supports=self._actuator.supports,
            lost_nodes=lost_nodes(incidents, returned_nodes(self._journal)),
            quarantined_nodes=quarantined_nodes(self._journal),
            loads=self._detector.loads(),
            busy=busy_replicas(incidents),
        )
        return decide(facts).plan.action is not ActionKind.TOLERATE

    # --- steps of incidents -------------------------------------------------------------------------------------------

    def _actuator_of(self, incident: Incident) -> Actuator:
        return self._reaper if self._reaper is not None and incident.is_of_orphan else self._actuator

    def _config_of(self, incident: Incident) -> RecoveryConfig:
        """With the mode of this incident."""
        return self._orphans_config if incident.is_of_orphan else self._config

    def _advance(self, incident_id: str) -> None:
        for _ in range(MOVES_PER_TICK_MAX):
            incident = self._projection.incidents.get(incident_id)
            if incident is None:
                return
            situation = self._situation(incident)
            policy_input = question(
                incident,
                situation.incidents,
                fleet=situation.fleet,
                config=situation.config,
                # Of an orphan also what is possible for replicas: the dashboard reads it from the newest plan.
                supports=self._actuator.supports | self._actuator_of(incident).supports,
                quarantined_nodes=quarantined_nodes(self._journal),
                committed_seq=self._committed_seq() if incident.state is IncidentState.OPEN else 0,
                returned_seq=returned_nodes(self._journal),
                loads=self._detector.loads() if incident.state is IncidentState.OPEN else None,
                progress=situation.progress,
            )
            move = next_step(incident, situation, policy_input)
            if move is None:
                return
            if isinstance(move, Append):
                self._append(incident, move)
            elif isinstance(move, Decide):
                verdict = decide(move.question)
                created = PlanCreated(
                    plan=self._with_side_effects(verdict.plan, situation.fleet, self._actuator_of(incident)),
                    page_oncall=verdict.page_oncall,
                    outcome=str(verdict.outcome),
                    question=move.question.to_dict(),
                )
                self._write(created, key=move.key, incident=incident)
            elif not self._perform(incident, move):
                return
            self._cached_fleet = None
        logger.warning("%s: %d steps in one tick, continuing in the next", incident_id, MOVES_PER_TICK_MAX)

    def _with_side_effects(self, plan: Plan, fleet: FleetView, actuator: Actuator) -> Plan:
        """What the actuator would end besides. Of replicas that are not counted no number is known: the actuator
        refuses such a plan."""
        seen = [v for name in actuator.also_ends(plan) if (v := fleet.find(name)) is not None]
        ends = (PlanTarget(replica=v.replica, incarnation=v.desired_incarnation, node=v.node) for v in seen)
        return replace(plan, also_hit=tuple(actuator.also_hit(plan)), also_ends=tuple(ends))

    def _committed_seq(self) -> int:
        try:
            newest = self._journal.last(EventKind.STEP_COMMITTED)
        except JournalCorrupt:
            return self._journal.head().position  # a line that cannot be read escalates nothing
        return newest.seq if newest is not None else 0

    def _has_begun(self, incident: Incident) -> bool:
        """Whether a call of the newest plan was made."""
        digest = incident.attempt.plan.digest if incident.attempt else ""
        calls = self._journal.events(kinds=[EventKind.CALL_STARTED], incident_id=incident.incident_id, damaged=[])
        return any(f":{digest}:" in (e.key or "") for e in calls)

    def _append(self, incident: Incident, move: Append) -> None:
        try:
            self._write(move.payload, key=move.key, incident=incident, unless=move.unless)
        except ConcurrentWrite as e:
            logger.info("%s", e)
            self._projection.refresh(self._journal)

    def _perform(self, incident: Incident, move: Perform) -> bool:
        """Returns whether the action has ended; else it is under way, and is performed further in the next tick."""
        assert self._lease is not None and incident.attempt is not None
        actuator = self._actuator_of(incident)
        for event in events_before_plan(
            incident,
            move.plan,
            quarantined=quarantined_nodes(self._journal),
            known=known_nodes(self._journal),
            share_max=self._config.quarantined_share_max,
            channel=self._notifier.channel,
        ):
            self._append(incident, event)
        if not actuator.schedules:
            self._forget(move.plan)  # before it dies
        lost = lost_nodes(self._projection.incidents.values(), returned_nodes(self._journal))
        try:
            result = actuator.perform(move.plan, self._lease, lost)
        except ActuatorError as e:
            result = ActionResult(done=False, because=str(e))
        except JournalError:
            raise
        except Exception as e:
            # Unexpected, perhaps transient, and performing again is idempotent. If it persists the action has failed:
            # an incident that acts forever would block the others.
            if not self._failures.last_try(incident.incident_id):
                raise
            logger.exception("%s: the actuator failed again", incident.incident_id)
            result = ActionResult(done=False, because=f"{actuator.name} raises {type(e).__name__}: {e}")
        if actuator.schedules and self._has_begun(incident):
            # Before the next look at its processes. What was refused before any call still runs, and may fail again.
            self._forget(move.plan)
        if result is None:
            return False
        if result.done:
            for lender in move.plan.lent:  # healthy until now
                self._detector.forget(lender.replica, lender.incarnation + 1)
            self._append(incident, done(incident, incident.attempt, result.to_dict()))
        else:
            self._append(incident, failed(incident, incident.attempt, ActionFailure.REFUSED, result.because))
        return True

    def _forget(self, plan: Plan) -> None:
        """From now on the end of its targets, and of what ends with them, is intended, no second fault."""
        for target in (*plan.targets, *plan.also_ends):
            self._detector.forget(target.replica, target.incarnation + 1)

    def _ending(self) -> set[str]:
        """Replicas that an action ends, or that may end because of one though it failed."""
        since = self._time.now() - LATE_EXIT_SECONDS
        return {
            replica
            for incident in self._projection.incidents.values()
            for attempt in incident.attempts
            if attempt.started_at is not None
            if max(attempt.failed_at or 0.0, incident.closed_at or 0.0) >= since or incident.state in UNDER_REPAIR
            for replica in attempt.plan.ends
        }

    def _resume_lenders(self) -> None:
        """Starts replicas again that had lent their nodes, once nodes are free. A plan that lends a node lends it until
        then: that needs no second approval."""
        assert self._lease is not None
        if self._config.mode == "observe" or not any(r.lent for r in self._fleet().replicas):
            return
        flags = (self._journal.flag(PAUSED_FLAG), self._journal.flag(STOP_FLAG), self._projection.ended)
        if any(flag is not None for flag in flags) or any(map(needs_node, self._projection.open_incidents())):
            return
        lost = lost_nodes(self._projection.incidents.values(), returned_nodes(self._journal))
        for comeback in comebacks(self._fleet(), quarantined_nodes(self._journal) | lost):
            logger.info("%s", json.dumps({"event": "lender_resumed", "because": comeback.because}))
            self._actuator.resume(comeback, self._lease)
        self._cached_fleet = None

    def _situation(self, incident: Incident) -> Situation:
        now, now_monotonic = self._time.now(), self._clock.monotonic()
        open_seconds, watched_seconds = now - incident.opened_at, now_monotonic - self._detector.since
        stood = [now_monotonic - self._reported_at[k] for k in incident.seen_keys if k in self._reported_at]
        config = self._config_of(incident)
        observing = config.mode == "observe"
        paused = self._journal.flag(PAUSED_FLAG)
        if incident.state is not IncidentState.VERIFYING and open_seconds > watched_seconds:
            watched_seconds -= REDISCOVERY_SECONDS
        return Situation(
            now=now,
            fleet=self._fleet(),
            config=config,
            incidents=tuple(self._projection.incidents.values()),
            paused=paused,
            begun=(paused is not None or observing)
            and incident.state is IncidentState.ACTING
            and self._has_begun(incident),
            stopping=self._journal.flag(STOP_FLAG),
            ended=self._projection.ended,
            absent_seconds=max(0.0, min([watched_seconds, open_seconds, *stood])),
            progress=self._detector.progress(incident),
            waiting=self._detector.waiting(incident) if incident.state is IncidentState.VERIFYING else frozenset(),
            worked=self._detector.worked(incident.touched)
            if incident.state is IncidentState.VERIFYING
            else frozenset(),
            fates=self._detector.fates(incident) if observing else None,
            code_survives=not observing or self._detector.code_survives(incident),
            channel=self._notifier.channel,
            committed_seq=self._committed_seq() if restart_waits(incident) else 0,
        )

    def _fleet(self) -> FleetView:
        # Read once per tick, and again after each step.
        if self._cached_fleet is None:
            if not self._places.nodes and not self._places.scheduled:
                self._places = RunPlaces.of_run(self._journal)
            self._cached_fleet = fleet_view(self._journal.desired(), self._journal.current(), self._places)
        return self._cached_fleet

    # --- notifications ------------------------------------------------------------------------------------------------

    def _report_troubles(self, found: Sequence[Diagnosis]) -> None:
        for name, error in self._projection.broken.items():
            self._page_once(f"broken:{name}", str(error))
        if self._detector.error and self._lease is not None:
            because = f"no diagnosis is possible: the source or a detector fails with {self._detector.error}"
            self._page_once(f"no_data:{self._lease.fence}:{self._detector.outage}", because)
        for failure in self._failures.exhausted():
            incident = self._projection.incidents.get(failure.name)
            self._page_once(f"{failure.name}:page:{UNHANDLED}", failure.because(), UNHANDLED, incident)
        self._failures.keep_only(
            {diagnosis.key for diagnosis in found}
            | {i.incident_id for i in self._projection.open_incidents()}
            | {LENDERS_RESUMED}
        )

    def _page_once(self, key: str, because: str, topic: str = "watch", incident: Incident | None = None) -> None:
        if not any(e.key == key for e in self._projection.to_notify):
            paged = OncallPaged(topic=topic, because=because, channel=self._notifier.channel)
            self._write(paged, key=key, incident=incident)

    def _page_of_outage(self, error: JournalUnavailable) -> None:
        """A journal comes back only if on-call is told, and the page's record must wait until then: the message is sent
        without it. Only by the leader, and once: at once for each time that a disk is full, which is reported again
        with its incident; else when the outage lasts."""
        now = self._clock.monotonic()
        since = self._outage_since = now if self._outage_since is None else self._outage_since
        if self._lease is None:
            return
        for diagnosis in self._diagnoses:
            if FULL_DISK in diagnosis.detectors and (diagnosis.key, diagnosis.onset) not in self._paged_of:
                because = f"{diagnosis.because}, and the journal cannot be written; {diagnosis.advice}"
                if self._notifications.send_unrecorded(FULL_DISK, because):
                    self._paged_of.add((diagnosis.key, diagnosis.onset))
                    self._outage_paged = True
        if not self._outage_paged and now - since >= OUTAGE_PAGED_SECONDS:
            because = f"nothing is repaired: for {now - since:.0f} s {error}"
            self._outage_paged = self._notifications.send_unrecorded(OUTAGE, because)

    def _facts(self) -> dict[str, object]:
        return {
            "holder": self._holder,
            "mode": self._config.mode,
            "orphans_mode": self._orphans_config.mode,
            "paused": self._journal.flag(PAUSED_FLAG) is not None,
            "open_incidents": len(self._projection.open_incidents()),
            "detection_error": self._detector.error,
            "unhandled": self._failures.errors(),
        }
