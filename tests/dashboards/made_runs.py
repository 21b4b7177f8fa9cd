"""Small runs for the dashboard's tests, as they are now: on the real clock, so that a lease holds and ages make
sense."""

import sqlite3
from dataclasses import dataclass, field, replace
from pathlib import Path

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.diagnosis import ActionKind, Diagnosis, Evidence, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import Actual, ReplicaState
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.dashboards import settings
from rolecall.dashboards.data.reader import JournalSnapshot
from rolecall.dashboards.pages import shell
from rolecall.dashboards.settings import Settings
from tests.events import filled
from tests.support import PATIENCE_SECONDS

HOMES = {
    "trainer/0": "node-1",
    "trainer/1": "node-2",
    "rollout/0": "node-3",
    "rollout/1": "node-4",
    "standby/0": "node-6",
}


@dataclass
class MadeRun:
    """A run of five replicas that has committed `num_steps` steps and is watched. Say what happens next."""

    root: Path
    num_steps: int = 30
    mode: str = "act"
    run_id: str = "made"
    watched: bool = True
    clock: Clock = field(default_factory=SystemClock)
    run: RunDir = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        self.run = create_run_dir(self.root, self.run_id)
        self.run.write({"run_id": self.run_id})
        self.journal = Journal(self.run.database_url, clock=self.clock)
        self.journal.append(
            filled(K.RUN_STARTED, {"roles": {"trainer": 2, "rollout": 2, "standby": 1}, "num_steps": 120})
        )
        if self.watched:
            self.journal.acquire("watch", "watch@node-1", 3600.0)
            self.journal.append(filled(K.LEASE_ACQUIRED, {"holder": "watch@node-1", "fence": 1, "mode": self.mode}))
        for replica in HOMES:
            ready = replica.startswith("standby/")
            self.state(replica, ReplicaState.READY if ready else ReplicaState.SERVING)
        self.journal.grow_epoch([(ReplicaId(r), 1) for r in HOMES if not r.startswith("standby/")], because="start")
        for step in range(self.num_steps):
            body = {
                "step": step,
                "epoch": 1,
                "groups": [],
                "reward": step / 100,
                "loss": 0.1,
                "seconds": 0.5,
                "tokens": 768,
            }
            self.journal.append(filled(K.STEP_COMMITTED, body))

    def state(self, replica: str, state: ReplicaState, *, incarnation: int = 1, version: int = -1) -> None:
        version = self.num_steps if replica.startswith("rollout/") and version < 0 else version
        record = Actual(
            replica=ReplicaId(replica), incarnation=incarnation, node=NodeId(HOMES[replica]), state=state, pid=100,
            start_ticks=1, policy_version=version,
        )  # fmt: skip
        self.journal.set_actual(record)

    def open(self, replica: str = "rollout/1", because: str = "", name: str = "i-1", node: str = "") -> Plan:
        """An incident about a replica, and the plan to replace it (not yet written)."""
        now = self.clock.wall()
        suspect = Suspect(node=NodeId(node or HOMES[replica]), role="rollout", replica=replica, incarnation=1)
        found = Diagnosis(
            suspects=(suspect,), fault_class=FaultClass.HANG, onset=now - 3, detected_at=now, confidence=0.97,
            because=because or f"{replica}#1 has finished nothing for 2.9 s",
            evidence=(Evidence(kind="progress", text="it stands at 104"),), detectors=("progress",),
        )  # fmt: skip
        self.say(K.INCIDENT_OPENED, {"diagnosis": found.to_dict(), "window": "observations"}, name)
        target = PlanTarget(replica=ReplicaId(replica), incarnation=1, node=NodeId(HOMES[replica]))
        words = f"replace {replica}#1: the smallest unit that holds the suspect"
        return Plan(incident_id=IncidentId(name), action=ActionKind.REPLACE_REPLICA, targets=(target,), because=words)

    def plan(self, plan: Plan) -> None:
        self.say(
            K.PLAN_CREATED, {"plan": plan.to_dict(), "page_oncall": False, "outcome": "tolerated"}, plan.incident_id
        )

    def propose(self, plan: Plan, seconds: float = 900.0) -> None:
        body = {"plan": plan.to_dict(), "digest": plan.digest, "expires_at": self.clock.wall() + seconds}
        self.say(K.PLAN_PROPOSED, body, plan.incident_id)

    def act(self, plan: Plan) -> None:
        self.say(K.ACTION_STARTED, {"plan": plan.to_dict(), "digest": plan.digest}, plan.incident_id)

    def resolve(self, plan: Plan) -> None:
        self.say(K.ACTION_DONE, {"digest": plan.digest, "result": {"done": True, "because": "done"}}, plan.incident_id)
        self.say(K.INCIDENT_VERIFIED, {"because": "it works"}, plan.incident_id)
        self.say(K.INCIDENT_CLOSED, {"outcome": "resolved", "because": "it works"}, plan.incident_id)

    def say(self, kind: K, body: dict[str, object], incident: str | None = None) -> int:
        return self.journal.append(filled(kind, body), incident_id=incident).seq

    def settings(self) -> Settings:
        return Settings(
            journal_url=self.run.database_url, run=self.run, name=self.run_id, patience_seconds=PATIENCE_SECONDS
        )


def damage(run: RunDir, seq: int, body: str = "{") -> None:
    """Makes one line of the journal unreadable, as a bad disk would."""
    with sqlite3.connect(run.path / "journal.db") as conn:
        conn.execute("DROP TRIGGER IF EXISTS events_no_update")
        conn.execute("UPDATE events SET body = ? WHERE seq = ?", (body, seq))


def first_snapshot(what: Settings) -> JournalSnapshot:
    """Serves `what` in this process, and waits for its first snapshot."""
    settings.use(replace(what, patience_seconds=PATIENCE_SECONDS))
    return shell.reader().latest()
