"""Injects the faults of a piece into a run, one after the other, and writes their lines."""

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery.chaos.lines import add_line
from benchmarks.recovery.chaos.schedule import Fault
from benchmarks.recovery.chaos.scoring import Stopped, incidents_since, innocents, judged, restart_of, unjudged
from benchmarks.recovery.soak import run as soak
from rolecall.core.errors import InjectionRefused, JournalError, RolecallError
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import ActionStarted
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.nodes import quarantined_nodes
from rolecall.core.rundir import RunDir
from rolecall.recovery.operators.commands import return_node
from rolecall.rl_runtime.faults.injector import _replicas, inject
from rolecall.rl_runtime.processes import RunProcess, find_processes, is_alive
from rolecall.session.session import HOLD_FLAG
from rolecall.views.audit import audit_run
from rolecall.views.lifetimes import incarnation_records

BOUND_SECONDS = {"hang": 90.0, "slow": 90.0, "wrong": 150.0, "nan": 150.0, "corrupt": 20.0, "down": 15.0, "full": 45.0}
"""How long a fault lasts at most, by the last word of its kind."""
CALM_SECONDS = (2.0, 8.0)
CALM_STEPS = 2
START_SECONDS, WHOLE_SECONDS, CURE_SECONDS = 240.0, 240.0, 240.0
UNFOUND_SECONDS = 45.0
"""After the end of a fault; then it counts as not found."""
ONE_FAULT_SECONDS = max(BOUND_SECONDS.values()) + CURE_SECONDS + WHOLE_SECONDS
"""Of any fault: with less time left in the run none is injected, so that the planned end of a run is no miss."""
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault whose line is not written yet. `position`: of the journal, and `before`: the processes, at that time."""

    fault: Fault
    record: Mapping[str, Any]
    position: int
    before: Sequence[RunProcess]


class Piece:
    """Injects faults into one run, beside it, and writes their lines."""

    def __init__(
        self, faults: Sequence[Fault], facts: Mapping[str, Any], seconds: float, ends: threading.Event | None = None
    ) -> None:
        """`seconds`: how long the run lasts. `ends`: once set, no further fault is injected."""
        self._faults, self._facts, self._seconds = faults, facts, seconds
        self._ends = ends or threading.Event()
        self._lost_nodes: set[str] = set()
        self._last: Injected | None = None
        self.num_injected = 0
        self.failure = ""
        self.is_done = threading.Event()

    def __call__(self, path: Path, over: threading.Event) -> None:
        self._run, self._over = RunDir(path.resolve()), over
        deadline = time.monotonic() + self._seconds - ONE_FAULT_SECONDS
        rng = random.Random(f"chaos-calm-{self._faults[0].seed}")
        try:
            self._until("the first step", START_SECONDS, lambda: soak.has_trained(path))
            for fault in self._faults:
                self._calm(rng)
                self._write_last()
                if self._ends.is_set():
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError("the run is too short for the next fault")
                self._one(fault)
            else:
                self._calm(rng)
                self._write_last()
        except Exception as e:  # noqa: BLE001 whatever it is, the run must end, and the line of the piece names it
            self.failure = f"{type(e).__name__}: {e}"
            print(f"the piece ends early: {self.failure}", flush=True)
            self._write_last(e)
        self.is_done.set()
        if not over.is_set():
            with self._journal() as journal:
                journal.set_flag(HOLD_FLAG, None)

    @contextmanager
    def _journal(self) -> Iterator[Journal]:
        with closing(Journal(self._run.database_url, create=False)) as journal:
            yield journal

    def _calm(self, rng: random.Random) -> None:
        self._until("a whole run", WHOLE_SECONDS, self._is_whole)
        self._until_steps(CALM_STEPS)
        self._pause(rng.uniform(*CALM_SECONDS))

    def _pause(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise Stopped("the run ended")

    def _until(self, what: str, seconds: float, found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(JournalError):  # down, by a fault
                if found():
                    return
            self._pause(POLL_SECONDS)
        raise TimeoutError(f"{what}: not within {seconds:g} s")

    def _until_steps(self, number: int) -> None:
        with self._journal() as journal:
            last = journal.last(EventKind.STEP_COMMITTED)
        since = 0.0 if last is None else last.wall_at

        def committed() -> bool:
            with self._journal() as journal:
                events = journal.events(kinds=[EventKind.STEP_COMMITTED])
            return sum(e.wall_at > since for e in events) >= number

        self._until(f"{number} more steps", WHOLE_SECONDS, committed)

    def _is_whole(self) -> bool:
        """The process of every desired replica lives and works, and no incident is open."""
        with self._journal() as journal:
            current, desired = journal.current(), journal.desired()
            num_open = len(journal.events(kinds=[EventKind.INCIDENT_OPENED])) - len(
                journal.events(kinds=[EventKind.INCIDENT_CLOSED])
            )
        for replica, wanted in desired.items():
            record = current.get(replica)
            state = ReplicaState.READY if is_standby(replica) else ReplicaState.SERVING
            if record is None or (record.incarnation, record.state) != (wanted.incarnation, state):
                return False
            if not is_alive(record.pid, record.start_ticks):
                return False
        return not num_open

    def _one(self, fault: Fault) -> None:
        before = find_processes(self._run.path)
        with self._journal() as journal:
            position = journal.head().position
        try:
            record = inject(
                self._run,
                fault.kind,
                self._target(fault),
                fault.how,
                BOUND_SECONDS.get(fault.last_word),
                fault.seed,
            )
        except (RolecallError, sqlite3.OperationalError) as e:
            self._write(fault, {"injected": False, "reason": str(e)})
            return
        self.num_injected += 1
        self._last = Injected(fault=fault, record=record, position=position, before=before)
        self._until_cured(fault, record, position)
        if fault.kind == "node-kill":
            self._lost_nodes.add(str(record["node"]))
        self._return_nodes()

    def _write_last(self, failure: Exception | None = None) -> None:
        """Writes the line of the fault injected last, if it has none yet. `failure`: why the piece ends."""
        last, self._last = self._last, None
        if last is None:
            return
        found: dict[str, Any] | None = None
        if failure is None or isinstance(failure, TimeoutError):
            try:
                found = self._judged(last)
            except Exception as e:  # noqa: BLE001 the line is written in any case, with this as its reason
                failure = e
        if found is None:
            assert failure is not None
            found = unjudged(failure)
        elif failure is not None:  # the run has not become whole
            found |= {"cured_seconds": None, "reason": found["reason"] or str(failure)}
        about = {"injected": True, "target": last.record["target"], "met": last.record["met"]}
        self._write(last.fault, {**about, **found})

    def _judged(self, last: Injected) -> dict[str, Any]:
        """What became of a fault, by all that has happened since."""
        fault, record = last.fault, last.record
        with self._journal() as journal:
            events = journal.events(after=last.position)
            known = incarnation_records(events, journal.actual())
        injected_at, node = float(record["injected_at"]), str(record["node"])
        plans = [e.payload.plan for e in events if isinstance(e.payload, ActionStarted)]
        targets = [t for p in plans for t in (*p.targets, *(t for t in p.lent if not is_standby(t.replica)))]
        spare = [t for p in plans for t in p.lent if is_standby(t.replica)]  # standbys are there to be used up
        planned = {(str(t.replica), t.incarnation) for t in targets}
        hit = self._hit(fault, record)
        hit_names = {name.partition("#")[0] for name in hit}  # an attempt may be made again
        others = [f"{replica}#{incarnation}" for replica, incarnation in sorted(planned) if replica not in hit_names]
        used_up = planned | {(str(t.replica), t.incarnation) for t in spare}
        excused = {life.pid for key, life in known.items() if key in used_up} | {int(record["pid"])}
        lost = frozenset({node}) if fault.kind == "node-kill" else frozenset[str]()
        gone = innocents(last.before, find_processes(self._run.path), frozenset(excused), lost)
        restarted_at = restart_of(fault, events, injected_at, node)
        return {
            **judged(fault, hit, injected_at, incidents_since(events, injected_at), restarted_at),
            "innocent": gone,
            "others_in_plans": others,
            "problems": list(audit_run(self._run).problems),
        }

    def _target(self, fault: Fault) -> str | None:
        """A replica of the role, chosen by the fault's seed; for an agent or a node, the node of one.

        Raises:
            InjectionRefused: none is at work. The injector would choose the agent or node of another role.
        """
        if fault.of_helper == "watch":
            return None
        rng = random.Random(fault.seed)
        at_work = [r for r in _replicas(self._run, fault.role) if " rank " not in r.target]
        if not at_work:
            raise InjectionRefused(f"{fault.kind}: no replica of {fault.role} is at work")
        chosen = rng.choice(at_work)
        return chosen.node if fault.kind in ("agent-kill", "node-kill") else chosen.target

    def _hit(self, fault: Fault, record: Mapping[str, Any]) -> frozenset[str]:
        if fault.of_helper:
            return frozenset({str(record["target"])})
        if fault.kind != "node-kill":
            # All nodes of the bundled cluster have the disk that is filled.
            nodes = self._run.read()["nodes"] if fault.kind == "disk-full" else ()
            return frozenset({f"{record['target']}#{record['incarnation']}", *nodes})
        with self._journal() as journal:
            lives = journal.actual().values()
        on_it = {f"{a.replica}#{a.incarnation}" for a in lives if a.node == record["node"]}
        return frozenset({str(record["node"]), *on_it})

    def _until_cured(self, fault: Fault, record: Mapping[str, Any], position: int) -> None:
        """Until the run is whole again and the fault is found; or long enough after its end."""
        injected_at = float(record["injected_at"])
        unfound_at = float(record.get("ended_at", injected_at)) + UNFOUND_SECONDS

        def is_over() -> bool:
            with self._journal() as journal:
                events = journal.events(after=position)
            hit, node = self._hit(fault, record), str(record["node"])
            found = judged(
                fault,
                hit,
                injected_at,
                incidents_since(events, injected_at),
                restart_of(fault, events, injected_at, node),
            )
            settled = found["cured_seconds"] is not None or time.time() > unfound_at
            return settled and self._is_whole()

        with suppress(TimeoutError):  # the next wait for a whole run ends the piece; the line tells what was found
            self._until("the cure", CURE_SECONDS, is_over)

    def _return_nodes(self) -> None:
        with self._journal() as journal:
            quarantined = quarantined_nodes(journal)
        for node in sorted(set(map(str, quarantined)) - self._lost_nodes):
            with suppress(RolecallError):
                return_node(self._run, node, "chaos", "the fault was injected; the node is sound")

    def _write(self, fault: Fault, found: Mapping[str, Any]) -> None:
        about = {name: value for name, value in asdict(fault).items() if name != "seed"}
        add_line({"line": "fault", **self._facts, "run_id": self._run.run_id, **about, **found})
        what = found.get("reason") or f"found after {found['found_seconds']} s, cured after {found['cured_seconds']} s"
        print(f"{fault.number}: {fault.name}, {fault.role}, {found.get('target', '-')}: {what}", flush=True)
