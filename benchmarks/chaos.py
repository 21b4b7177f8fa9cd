"""Every kind of fault against every role, in a seeded order, and hours without any: the chaos scoreboard.

    python benchmarks/chaos.py faults --count 20        the next 20 faults of the schedule, in one run: 15 to 25 minutes
    python benchmarks/chaos.py quiet --minutes 60       an hour without faults
    python benchmarks/chaos.py schedule                 the cells, and why the others are not there
    python benchmarks/chaos.py report [--commit NAMES]  the report again

The schedule is a list of 1,000 faults that depends on the seed alone: every cell (kind of fault, role) once in random
order, then again. A piece is one run of the bundled job, mode act, that takes the next faults without a line in
`results/chaos.jsonl`. A fault comes when the run is whole, no incident is open and two more steps are committed. Each
injected fault is a line, written just before the next injection or at the end of the piece: what happens between two
faults counts with the first of them. If the run ends before that, or the journal cannot be read, the fault counts as
not named and not cured. The first injection of a fault counts, whatever came of it. Files of several machines are
joined by appending one to the other.

Named right: an incident names the process or node that was hit and nothing else, with a class that fits the fault; for
agent and watch, their restart is recorded. Cured: the replacement serves, or the incident is closed without one.
Innocent: a process of the run that was neither hit nor in a plan and is gone. In a plan: a replica that was replaced
although it was not hit. Alarm: an incident that names anything but what was hit. Elsewhere: a fault that did not meet
its target in the work that it should interrupt; it is no part of the share that is named right. Doubled and lost:
prompt groups trained twice, or issued and neither trained nor dropped with a reason, by the audit of the piece.

The run's directory is on a small file system of its own, so that its disk can be filled; where this process may not
mount one, that fault is not injected, and its line says so. Nodes in quarantine are returned after each fault, as by an
operator; a lost node stays lost, and a piece ends before the spare nodes do.
"""

import argparse
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import live
import soak
import soak_report

from rolecall.core.errors import InjectionRefused, JournalError, RolecallError
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads import ActionStarted, ComponentRestarted
from rolecall.core.membership import ReplicaState, is_standby
from rolecall.core.nodes import quarantined_nodes
from rolecall.core.rundir import RunDir
from rolecall.recovery.operators.commands import return_node
from rolecall.rl_runtime.faults.injector import _replicas, inject
from rolecall.rl_runtime.processes import RunProcess, find_processes, is_alive
from rolecall.session.session import HOLD_FLAG
from rolecall.views.audit import audit_run
from rolecall.views.incidents import CLOCK_SLACK_SECONDS, IncidentSummary, summarize_incidents
from rolecall.views.lifetimes import incarnation_records

LINES = common.RESULTS / "chaos.jsonl"
ROLES = ("trainer", "rollout", "reward", "controller", "standby")
NUM_FAULTS = 1000
NUM_NODES, SPARE_NODES = 9, 2
"""A node without a replica is spare."""
SETTINGS = (
    *soak.SETTINGS,
    *live.UNGUARDED,
    f"runtime.nodes={NUM_NODES}",
    "runtime.startup_timeout_seconds=300",  # of a standby, on a busy machine
    "recovery.verification_timeout_seconds=300",
    "runtime.reward_check_share=0.2",  # a wrong worker is compared within seconds
    # At the demo's rate the toy has learned its task after 300 steps, and its policy collapses after 500: no fault.
    "algorithm.learning_rate=1e-4",
)
DISK_BYTES = 512 << 20
BOUND_SECONDS = {"hang": 90.0, "slow": 90.0, "wrong": 150.0, "nan": 150.0, "corrupt": 20.0, "down": 15.0, "full": 45.0}
"""How long a fault lasts at most, by the last word of its kind."""
CALM_SECONDS = (2.0, 8.0)
CALM_STEPS = 2
START_SECONDS, WHOLE_SECONDS, CURE_SECONDS = 240.0, 240.0, 240.0
UNFOUND_SECONDS = 45.0
"""After the end of a fault; then it counts as not found."""
FAULT_MINUTES = 3.0
"""Of one fault and its recovery, at most, on average."""
ONE_FAULT_SECONDS = max(BOUND_SECONDS.values()) + CURE_SECONDS + WHOLE_SECONDS
"""Of any fault: with less time left in the run none is injected, so that the planned end of a run is no miss."""
COUNT_MAX = 150
"""Of a piece: a run lasts ten hours at most."""
LAST_LINE_SECONDS = 200.0
"""For the line of the last fault, after the end of the run: an injection may have to end first."""
POLL_SECONDS = 0.5
TRIES_MAX = 2
"""A fault that could not be injected is tried once more, in a later piece."""
BARS = (
    "at least 99 % named, all cured; 0 lost, 0 doubled, 0 innocent, 0 in plans that were not hit, 0 false alarms; "
    "24 hours without faults and without an eviction"
)
NAMED_SHARE_MIN, QUIET_HOURS_MIN = 0.99, 24.0

STANDBY_WAITS = "a standby waits: it does no unit of work in which this could happen"
NO_CHECKPOINT = "the controller has no checkpoint at which a fault in the process could begin"
NO_UNITS = "the controller's work is not counted in units, so that no slowness of it is defined"
NO_NUMBERS = "the controller computes no numbers of the training"
DELAY_IS_OF_ENGINES = "the delay is one of engine steps; duty and quota slow this role"
HEAD = "its node is the first one: the loss of Ray's head there ends the run (docs/architecture.md)"
NOT_OF_A_ROLE = "not of one role: counted once, under the controller"
GIVES_NO_WEIGHTS = "it gives no weights to others"
SHARED_NETWORK = (
    "the nodes of the bundled cluster share one network, so that none can be cut off; measured between network "
    "namespaces instead (tests/rl_runtime/cluster/test_partition.py, tests/detector/live/test_partition.py)"
)
SHARED_CLOCK = "the nodes share the host's clock, and a jump of it would hit processes outside of the run"
SAME_NODE = "counted under the controller, whose node it shares at the start"

MATRIX: Mapping[str, Mapping[str, str]] = {
    "kill": {role: f"{role}-kill:kill" for role in ROLES},
    "stop": {role: f"{role}-hang:stop" for role in ROLES},
    **{
        name: {
            **{role: f"{role}-hang:{how}" for role in ("trainer", "rollout", "reward")},
            "controller": NO_CHECKPOINT,
            "standby": STANDBY_WAITS,
        }
        for name, how in (("GIL held", "gil"), ("lock never released", "lock"), ("read that never returns", "read"))
    },
    **{
        f"slow by {how}": {
            **{role: f"{role}-slow:{how}" for role in ("trainer", "rollout", "reward")},
            "controller": NO_UNITS,
            "standby": STANDBY_WAITS,
        }
        for how in ("duty", "quota")
    },
    "slow by delay": {
        "trainer": DELAY_IS_OF_ENGINES,
        "rollout": "rollout-slow:delay",
        "reward": DELAY_IS_OF_ENGINES,
        "controller": NO_UNITS,
        "standby": STANDBY_WAITS,
    },
    "NaN": {
        "trainer": "trainer-nan:nan",
        "rollout": "rollout-nan:nan",
        "reward": "reward-nan:nans",
        "controller": NO_NUMBERS,
        "standby": STANDBY_WAITS,
    },
    "wrong weights or numbers": {
        "trainer": "trainer-wrong:scale",
        "rollout": "rollout-wrong:skew",
        "reward": "reward-wrong:skew",
        "controller": NO_NUMBERS,
        "standby": STANDBY_WAITS,
    },
    "killed while it gives weights": {
        "trainer": "holder-kill:kill",
        "rollout": "relay-kill:kill",
        **dict.fromkeys(ROLES[2:], GIVES_NO_WEIGHTS),
    },
    "corrupted transfer": {
        "trainer": "holder-corrupt:flip",
        "rollout": "relay-corrupt:flip",
        **dict.fromkeys(ROLES[2:], GIVES_NO_WEIGHTS),
    },
    "node lost": {
        **{role: "node-kill:kill" for role in ("trainer", "rollout", "standby")},
        **dict.fromkeys(("reward", "controller"), HEAD),
    },
    "agent dead": {
        **{role: "agent-kill:kill" for role in ("trainer", "rollout", "controller", "standby")},
        "reward": SAME_NODE,
    },
    **{
        name: {**dict.fromkeys(ROLES, NOT_OF_A_ROLE), "controller": fault}
        for name, fault in (
            ("watch dead", "watch-kill:kill"),
            ("journal down", "journal-down:locked"),
            ("disk full", "disk-full:fill"),
        )
    },
    "partition": dict.fromkeys(ROLES, SHARED_NETWORK),
    "clock jump": dict.fromkeys(ROLES, SHARED_CLOCK),
}
"""Kind of fault -> role -> the injector's `kind:how`, or why there is none. Controller dead: kill of the controller."""
CLASSES: Mapping[str, frozenset[str]] = {
    "kill": frozenset({"crash"}),
    "hang": frozenset({"hang"}),
    "slow": frozenset({"slow"}),
    # An engine whose log-probabilities are no numbers is contained: its work ends.
    "nan": frozenset({"silent_corruption", "crash"}),
    "wrong": frozenset({"silent_corruption", "wrong_weights"}),
    "corrupt": frozenset({"silent_corruption", "wrong_weights", "network"}),
    # The controller ends at the first write that fails.
    "down": frozenset({"crash", "resource_exhausted"}),
    "full": frozenset({"crash", "resource_exhausted"}),
}
"""Fault classes that are right, by the last word of the injector's kind; a lost node's is `node_lost`."""
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    number: int
    name: str  # row of MATRIX
    role: str
    kind: str
    how: str
    seed: int

    @property
    def last_word(self) -> str:
        return self.kind.rpartition("-")[2]

    @property
    def classes(self) -> frozenset[str]:
        return frozenset({"node_lost"}) if self.kind == "node-kill" else CLASSES[self.last_word]

    @property
    def of_helper(self) -> str:
        """`agent` or `watch`: its restart is recorded, and is no incident."""
        helper = self.kind.partition("-")[0]
        return helper if helper in ("agent", "watch") else ""


# --- the schedule -----------------------------------------------------------------------------------------------------


def is_reason(cell: str) -> bool:
    return " " in cell


def cells() -> list[tuple[str, str, str, str]]:
    """(row, role, kind, how) of every fault that can be injected."""
    return [
        (name, role, *cell.split(":"))  # type: ignore[misc]
        for name, row in MATRIX.items()
        for role, cell in row.items()
        if not is_reason(cell)
    ]


def not_there() -> Iterator[tuple[str, list[str], str]]:
    """(row, roles, reason) of the cells without a fault."""
    for name, row in MATRIX.items():
        by_reason: dict[str, list[str]] = defaultdict(list)
        for role, cell in row.items():
            if is_reason(cell):
                by_reason[cell].append(role)
        for reason, roles in by_reason.items():
            yield name, roles, reason


def schedule(seed: int, count: int = NUM_FAULTS) -> list[Fault]:
    """All cells in random order, then again, until there are `count` faults; the same for the same seed."""
    rng, found = random.Random(f"chaos-{seed}"), list[Fault]()
    while len(found) < count:
        turn = cells()
        rng.shuffle(turn)
        for name, role, kind, how in turn:
            fault = Fault(number=len(found), name=name, role=role, kind=kind, how=how, seed=rng.randrange(2**31))
            found.append(fault)
    return found[:count]


def counted(lines: Iterable[Line]) -> dict[tuple[int, int], Line]:
    """(seed, number) -> the line that counts: the first injection, or else the last refusal."""
    found: dict[tuple[int, int], Line] = {}
    for line in lines:
        if line["line"] == "fault":
            key = line["seed"], line["number"]
            if key not in found or not found[key]["injected"]:
                found[key] = line
    return found


def piece(seed: int, lines: Sequence[Line], size: int) -> list[Fault]:
    """The next faults of the schedule; no more lost nodes among them than there are spare ones."""
    done = {number for (of_seed, number), line in counted(lines).items() if of_seed == seed and line["injected"]}
    tries: dict[int, int] = defaultdict(int)
    for line in lines:
        if line["line"] == "fault" and line["seed"] == seed:
            tries[line["number"]] += 1
    found, lost = list[Fault](), 0
    for fault in schedule(seed):
        if fault.number in done or tries[fault.number] >= TRIES_MAX:
            continue
        lost += fault.kind == "node-kill"
        if len(found) == size or lost > SPARE_NODES:
            break
        found.append(fault)
    return found


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An incident that was opened after a fault. Times are wall seconds."""

    suspects: tuple[str, ...]
    fault_class: str
    found_at: float
    cured_at: float | None
    because: str

    @classmethod
    def of(cls, summary: IncidentSummary) -> "Seen":
        incident, resolved_at = summary.incident, summary.resolved_at
        return cls(
            suspects=tuple(sorted({s.name for s in incident.diagnosis.suspects})),
            fault_class=str(incident.diagnosis.fault_class),
            found_at=summary.detected_at,
            cured_at=incident.closed_at if resolved_at is None else resolved_at,
            because=incident.diagnosis.because,
        )


def judged(
    fault: Fault, hit: frozenset[str], injected_at: float, incidents: Sequence[Seen], restarted_at: float | None
) -> dict[str, Any]:
    """What became of a fault. `hit`: names of the replicas with their incarnation, or of the node, that it hit.
    `incidents`: opened since, up to the next fault. `restarted_at`: of the helper that it hit, wall seconds."""
    after = [i for i in incidents if i.found_at >= injected_at - CLOCK_SLACK_SECONDS]
    about = [i for i in after if i.suspects and hit.issuperset(i.suspects)]
    beside = [i for i in after if i not in about]
    found_at, cured_at, reason = restarted_at, restarted_at, ""
    if fault.of_helper:
        if restarted_at is None:
            reason = f"no restart of the {fault.of_helper} is recorded"
    else:
        right = [i for i in about if i.fault_class in fault.classes]
        found_at = min((i.found_at for i in right), default=None)
        cures = [i.cured_at for i in about]
        cured_at = None if None in cures else max((at for at in cures if at is not None), default=None)
        if not right and about:
            reason = f"called {about[0].fault_class}: {about[0].because}"
        elif not right and beside:
            reason = f"another was named, {', '.join(beside[0].suspects) or 'none'}: {beside[0].because}"
        elif not right:
            reason = "no incident"
        elif cured_at is None:
            reason = "named, and not cured"
    return {
        "named": found_at is not None,
        "found_seconds": None if found_at is None else round(max(0.0, found_at - injected_at), 2),
        "cured_seconds": None if cured_at is None else round(max(0.0, cured_at - injected_at), 2),
        "classes": sorted({i.fault_class for i in about}),
        "alarms": [f"{i.fault_class}, {', '.join(i.suspects) or 'no suspect'}: {i.because}" for i in beside],
        "reason": reason,
    }


def innocents(
    before: Sequence[RunProcess], alive: Iterable[RunProcess], excused: frozenset[int], nodes: frozenset[str]
) -> list[str]:
    """Processes that are gone although they were neither hit nor in a plan (`excused`), nor on a lost node."""
    still = {(p.pid, p.start_ticks) for p in alive}
    gone = [p for p in before if (p.pid, p.start_ticks) not in still]
    return [str(p) for p in gone if p.pid not in excused and (not p.node or p.node not in nodes)]


def unjudged(error: Exception) -> dict[str, Any]:
    """What is written of a fault if nothing could be found out: it counts as not named and not cured."""
    reason = str(error) if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"
    nothing = {key: [] for key in ("classes", "alarms", "innocent", "others_in_plans", "problems")}
    return {"named": False, "found_seconds": None, "cured_seconds": None, **nothing, "reason": reason}


# --- a piece ----------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """The run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault whose line is not written yet. `position`: of the journal, and `before`: the processes, at that time."""

    fault: Fault
    record: Mapping[str, Any]
    position: int
    before: Sequence[RunProcess]


class Piece:
    """Injects faults into one run, beside it, and writes their lines."""

    def __init__(self, faults: Sequence[Fault], facts: Mapping[str, Any], seconds: float) -> None:
        """`seconds`: how long the run lasts."""
        self._faults, self._facts, self._seconds = faults, facts, seconds
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
            self._until("the first step", START_SECONDS, lambda: live._has_trained(path))
            for fault in self._faults:
                self._calm(rng)
                self._write_last()
                if time.monotonic() > deadline:
                    raise TimeoutError("the run is too short for the next fault")
                self._one(fault)
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
        planned = {(str(t.replica), t.incarnation) for p in plans for t in p.targets}
        hit = self._hit(fault, record)
        hit_names = {name.partition("#")[0] for name in hit}  # an attempt may be made again
        others = [f"{replica}#{incarnation}" for replica, incarnation in sorted(planned) if replica not in hit_names]
        excused = {life.pid for key, life in known.items() if key in planned} | {int(record["pid"])}
        lost = frozenset({node}) if fault.kind == "node-kill" else frozenset[str]()
        gone = innocents(last.before, find_processes(self._run.path), frozenset(excused), lost)
        restarted_at = _restarted_at(fault, events, injected_at, node)
        return {
            **judged(fault, hit, injected_at, _incidents(events, injected_at), restarted_at),
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
                _incidents(events, injected_at),
                _restarted_at(fault, events, injected_at, node),
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


def _incidents(events: Sequence[Event], since: float) -> list[Seen]:
    joined = summarize_incidents(events, incarnation_records(events, {}), ())
    return [Seen.of(s) for s in joined.summaries if s.incident.opened_at >= since - CLOCK_SLACK_SECONDS]


def _restarted_at(fault: Fault, events: Sequence[Event], since: float, node: str) -> float | None:
    """When the killed helper was started again."""
    for event in events:
        said = event.payload
        restarted = isinstance(said, ComponentRestarted) and said.what == fault.of_helper and said.node in (node, "")
        if restarted and event.wall_at >= since:
            return event.wall_at
    return None


@contextmanager
def disk_of_its_own(path: Path) -> Iterator[None]:
    """Mounts a small file system at `path`, where this process may; keeps what matters of the runs on it."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=10)
    if mounted.returncode:
        print(f"no disk can be filled: {mounted.stderr.strip()}", flush=True)
        yield
        return
    try:
        yield
    finally:
        left_out = shutil.ignore_patterns("*.sock", "checkpoints", "model", "inject")
        for run in [p for p in path.iterdir() if p.is_dir()]:
            with suppress(shutil.Error):  # some file cannot be copied: the others are
                shutil.copytree(run, soak.RUNS / run.name, ignore=left_out, dirs_exist_ok=True)
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=10)


def run_faults(faults: Sequence[Fault], facts: Mapping[str, Any], settings: Sequence[str]) -> None:
    minutes = (START_SECONDS + ONE_FAULT_SECONDS) / 60 + FAULT_MINUTES * len(faults)
    beside = Piece(faults, facts, minutes * 60)
    runs = soak.RUNS / "small-disk"
    with disk_of_its_own(runs):
        line = soak.one_run(
            int(facts["seed"]),
            "none",
            commit=str(facts["commit"]),
            steps=20,
            minutes=minutes + soak.RUN_MINUTES_MAX,
            hold=minutes,
            settings=[*SETTINGS, *settings],
            record=False,
            beside=beside,
            runs=runs,
        )
        beside.is_done.wait(LAST_LINE_SECONDS)
        if not line["audit"]:  # it was interrupted, and wrote no report
            with suppress(RolecallError):
                line["audit"] = audit_run(RunDir(runs / line["run_id"])).summary()
    kept = ("run_id", "exit_code", "wall_seconds", "audit", "ettr", "output_tail")
    add_line(
        {
            "line": "piece",
            **facts,
            **{name: line[name] for name in kept if name in line},
            "num_wanted": len(faults),
            "num_injected": beside.num_injected,
            "failure": beside.failure,
        }
    )


def run_quiet(minutes: float, facts: Mapping[str, Any], settings: Sequence[str]) -> None:
    line = soak.one_run(
        int(facts["seed"]),
        "none",
        commit=str(facts["commit"]),
        steps=20,
        minutes=minutes + soak.RUN_MINUTES_MAX,
        hold=minutes,
        settings=[*SETTINGS, *settings],
        record=False,
    )
    evicted = [t for i in line["incidents"] if i["replacements"] or i["action_failed"] for t in i["plan_targets"]]
    kept = ("run_id", "exit_code", "wall_seconds", "audit", "output_tail")
    add_line(
        {
            "line": "quiet",
            **facts,
            **{name: line[name] for name in kept if name in line},
            "evicted": evicted,
            "incidents": [f"{i['fault_class']}: {i['because']}" for i in line["incidents"]],
        }
    )


def add_line(line: Line) -> None:
    LINES.parent.mkdir(parents=True, exist_ok=True)
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(text) for text in LINES.read_text().splitlines()] if LINES.exists() else []


# --- the report -------------------------------------------------------------------------------------------------------


def report(lines: Sequence[Line]) -> Iterator[str]:
    faults = [x for x in counted(lines).values() if x["injected"]]
    pieces = [x for x in lines if x["line"] == "piece"]
    quiet = [x for x in lines if x["line"] == "quiet"]
    audits = [x["audit"] for x in (*pieces, *quiet) if x.get("audit")]
    met = [x for x in faults if x["met"]]
    named = sum(x["named"] for x in met)
    uncured = sum(x["cured_seconds"] is None for x in faults)
    hours = sum(x["wall_seconds"] for x in quiet) / 3600
    evicted = sum(len(x["evicted"]) for x in quiet)
    yield f"Bars: {BARS}."
    yield ""
    yield "| what | measured | bar met |"
    yield "|---|---|---|"
    share = named / len(met) if met else 0.0
    rows = (
        (
            f"faults injected, of {NUM_FAULTS}",
            f"{len(faults)}, of them elsewhere than wanted: {len(faults) - len(met)}",
            len(faults) >= NUM_FAULTS,
        ),
        ("named right, of those where wanted", f"{named} of {len(met)}, {100 * share:.1f} %", share >= NAMED_SHARE_MIN),
        ("faults not cured", f"{uncured}", not uncured),
        *(
            (what, f"{sum(len(x[key]) for x in faults)}", not any(x[key] for x in faults))
            for what, key in (
                ("innocent processes", "innocent"),
                ("replicas in plans that were not hit", "others_in_plans"),
                ("false alarms", "alarms"),
            )
        ),
        ("prompt groups lost", f"{sum(a['unaccounted'] for a in audits)}", not any(a["unaccounted"] for a in audits)),
        ("prompt groups doubled", f"{sum(a['duplicates'] for a in audits)}", not any(a["duplicates"] for a in audits)),
        (
            "audits that hold",
            f"{sum(a['ok'] for a in audits)} of {len(pieces) + len(quiet)} runs",
            len(audits) == len(pieces) + len(quiet) and all(a["ok"] for a in audits),
        ),
        (
            "hours without faults, evictions",
            f"{hours:.2f} h, {evicted}",
            hours >= QUIET_HOURS_MIN and not evicted,
        ),
    )
    for what, value, is_met in rows:
        yield f"| {what} | {value} | {'yes' if is_met else '**no**'} |"
    yield from _table(faults)
    yield from _misses(lines, faults)
    yield from _quiet(quiet)
    yield ""
    yield "## Not in the schedule"
    yield ""
    for name, roles, reason in not_there():
        yield f"- {name}: {'every role' if len(roles) == len(ROLES) else ', '.join(roles)}: {reason}"


def _table(faults: Sequence[Line]) -> Iterator[str]:
    yield ""
    yield "## Faults"
    yield ""
    yield (
        "Seconds from the injection. n, named right, found and cured: of faults where wanted. Elsewhere: those that "
        "did not meet their target in the work to interrupt; the columns after it are of both. In plans: replicas "
        "replaced that were not hit. Alarms: incidents that name anything else. Audit: it held after the fault (groups "
        "lost are known at the end of a piece only)."
    )
    yield ""
    yield "| fault | role | n | named right | found | cured | elsewhere | innocent | in plans | alarms | audit |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for name, role, _, _ in cells():
        group = [x for x in faults if (x["name"], x["role"]) == (name, role)]
        if not group:
            yield f"| {name} | {role} | 0 | - | - | - | - | - | - | - | - |"
            continue
        met = [x for x in group if x["met"]]
        found, cured = (
            common.summary([x[key] for x in met if x[key] is not None], 1) for key in ("found_seconds", "cured_seconds")
        )
        sums = " | ".join(str(sum(len(x[key]) for x in group)) for key in ("innocent", "others_in_plans", "alarms"))
        named, held = sum(x["named"] for x in met), sum(not x["problems"] for x in group)
        apart = len(group) - len(met)
        yield f"| {name} | {role} | {len(met)} | {named} | {found} | {cured} | {apart} | {sums} | {held} |"


def _misses(lines: Sequence[Line], faults: Sequence[Line]) -> Iterator[str]:
    yield ""
    yield "## Misses"
    yield ""
    missed = [
        x
        for x in faults
        if not x["met"] or any(x[key] for key in ("reason", "innocent", "others_in_plans", "alarms", "problems"))
    ]
    if not missed:
        yield "None."
    for x in missed:
        parts = [] if x["met"] else ["not injected in the work to interrupt"]
        parts += [x["reason"]] if x["reason"] else []
        parts += [f"innocent: {', '.join(x['innocent'])}"] if x["innocent"] else []
        parts += [f"others in plans: {', '.join(x['others_in_plans'])}"] if x["others_in_plans"] else []
        parts += [f"alarm: {alarm}" for alarm in x["alarms"]] + [f"audit: {problem}" for problem in x["problems"]]
        yield f"- {x['seed']}/{x['number']}, {x['name']}, {x['target']}: {'; '.join(parts)}"
    refused = [x for x in counted(lines).values() if not x["injected"]]
    for x in refused:
        yield f"- not injected: {x['seed']}/{x['number']}, {x['name']}, {x['role']}: {x['reason']}"
    for x in lines:
        if x["line"] == "piece" and (x["failure"] or not (x.get("audit") or {}).get("ok")):
            problems = (x.get("audit") or {}).get("problems", ["no report"])
            said = "; ".join(filter(None, [x["failure"], *problems]))
            yield f"- piece {x['run_id']}, {x['num_injected']} of {x['num_wanted']} faults injected: {said}"


def _quiet(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    hours = sum(x["wall_seconds"] for x in lines) / 3600
    evicted = sum(len(x["evicted"]) for x in lines)
    bound = soak_report.poisson_upper(evicted) / hours if hours else float("inf")
    yield ""
    yield "## Without faults"
    yield ""
    yield f"{len(lines)} runs, {hours:.2f} hours, {evicted} evictions: at most {bound:.2f} an hour (95 %)."
    for x in lines:
        for said in x["incidents"]:
            yield f"- {x['run_id']}: {said}"


def write_report(commits: Sequence[str]) -> int:
    lines = [x for x in read_lines() if x["commit"] in commits]
    if not lines:
        print(f"no run of commit {', '.join(commits)}", file=sys.stderr)
        return 1
    seeds = ", ".join(sorted({str(x["seed"]) for x in lines}))
    text = common.header("Chaos", f"rolecall demo, {', '.join(SETTINGS)}", seeds, ", ".join(commits))
    text += report(lines)
    path = common.write("chaos", text)
    print("\n".join(text), f"\nwritten to {path.relative_to(common.ROOT)}", sep="\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "quiet", "schedule", "report"))
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--count", type=int, default=20, help="faults of the piece")
    parser.add_argument("--pieces", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of a run without faults")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="any setting of the job")
    parser.add_argument("--commit", default="", help="whose lines to report; one or more, by commas")
    args = parser.parse_args()
    if not 1 <= args.count <= COUNT_MAX:
        parser.error(f"--count: {args.count}: expected 1 to {COUNT_MAX}")
    if args.what == "schedule":
        for number, (name, role, kind, how) in enumerate(cells()):
            print(f"{number:3} {name}, {role}: {kind}:{how}")
        for name, roles, reason in not_there():
            print(f"  - {name}, {', '.join(roles)}: {reason}")
        return 0
    commit = common.commit()
    facts = {"commit": commit, "seed": args.seed, "host": common.hardware()}
    for _ in range(args.pieces):
        if args.what == "quiet":
            run_quiet(args.minutes, facts, args.settings)
        elif args.what == "faults":
            faults = piece(args.seed, read_lines(), args.count)
            if not faults:
                print("no fault of the schedule is left")
                break
            run_faults(faults, facts, args.settings)
    return write_report(args.commit.split(",") if args.commit else [commit])


if __name__ == "__main__":
    sys.exit(main())
