"""A small run with plans in every state, made through the journal's own events; and a page of the dashboard over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from rolecall.core.diagnosis import ActionKind, Diagnosis, Evidence, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.dashboards import settings, users
from rolecall.recovery.incidents import Incident, fold
from tests.events import filled
from tests.support import PATIENCE_SECONDS

K = EventKind
APP = Path(settings.__file__).parent / "scripts" / "app.py"
HOMES = {
    "rollout/0": "node-1",
    "rollout/1": "node-2",
    "rollout/2": "node-3",
    "trainer/0": "node-4",
    "trainer/1": "node-5",
}
HOSTILE = "<img src=x onerror=alert(1)> **bold** [link](javascript:alert(1)) $x$ :red[r]"
"""What a log line may hold: HTML, Markdown, a directive of Streamlit."""


@dataclass
class World:
    """A run directory and its journal."""

    run: RunDir
    users_path: Path

    @property
    def journal(self) -> Journal:
        return Journal(self.run.database_url)

    def say(self, kind: EventKind, body: dict[str, Any], incident: str | None = None) -> Event:
        journal = self.journal
        try:
            return journal.append(filled(kind, body), incident_id=incident)
        finally:
            journal.close()

    def events(self, *kinds: EventKind) -> list[Event]:
        journal = self.journal
        try:
            return journal.events(kinds=kinds or None)
        finally:
            journal.close()

    def incidents(self) -> dict[str, Incident]:
        return fold(self.events())

    def open(self, name: str, replica: str = "rollout/1", because: str = "it ended by signal 9", **more: Any) -> None:
        self.say(K.INCIDENT_OPENED, {"diagnosis": diagnosis(replica, because, **more).to_dict()}, name)

    def plan(self, name: str, replica: str = "rollout/1", because: str = "a new process resolves it") -> Plan:
        made = plan(name, replica, because)
        self.say(K.PLAN_CREATED, {"plan": made.to_dict()}, name)
        return made

    def propose(
        self, name: str, replica: str = "rollout/1", *, seconds: float = 600.0, because: str = "it died"
    ) -> Plan:
        """An incident whose plan waits for an operator."""
        self.open(name, replica, because)
        made = self.plan(name, replica)
        now = self.journal.clock.wall()
        self.say(K.PLAN_PROPOSED, {"plan": made.to_dict(), "digest": made.digest, "expires_at": now + seconds}, name)
        return made

    def add_user(self, name: str) -> str:
        """Returns the token."""
        return users.add(self.users_path, name)


def world(folder: Path, homes: dict[str, str] | None = None) -> World:
    run = create_run_dir(folder / "runs", "acted-on")
    run.write({"run_id": "acted-on", "seed": 1, "config": {}})
    journal = Journal(run.database_url)
    homes = HOMES if homes is None else homes
    nodes = sorted({*homes.values(), "node-9"}) if homes else []  # one of them is free
    journal.append(filled(K.RUN_STARTED, {"seed": 1, "roles": {}, "nodes": nodes}))
    journal.append(filled(K.LEASE_ACQUIRED, {"holder": "watch@host", "fence": 1, "mode": "approve"}))
    journal.acquire("watch", "watch@host", 3600.0)
    for replica, node in homes.items():
        journal.set_desired(Desired(replica=ReplicaId(replica), incarnation=1, node=NodeId(node)))
        journal.set_actual(
            Actual(replica=ReplicaId(replica), incarnation=1, node=NodeId(node), state=ReplicaState.SERVING)
        )
    journal.close()
    return World(run=run, users_path=folder / "users.yaml")


def diagnosis(
    replica: str,
    because: str,
    *,
    fault_class: FaultClass = FaultClass.CRASH,
    node: str = "",
    at: float = 1.0,
    evidence: Sequence[str] = ("its agent saw it end",),
    detectors: tuple[str, ...] = ("crash",),
) -> Diagnosis:
    suspect = Suspect(
        node=NodeId(node or HOMES.get(replica, "node-1")),
        role=replica.partition("/")[0],
        replica=replica,
        incarnation=1,
    )
    return Diagnosis(
        suspects=(suspect,),
        fault_class=fault_class,
        onset=at,
        detected_at=at,
        confidence=0.97,
        because=because,
        evidence=tuple(Evidence(kind="exit", text=text) for text in evidence),
        detectors=detectors,
    )


def plan(name: str, replica: str, because: str) -> Plan:
    target = PlanTarget(replica=ReplicaId(replica), incarnation=1, node=NodeId(HOMES[replica]))
    return Plan(
        incident_id=IncidentId(name),
        action=ActionKind.REPLACE_REPLICA,
        targets=(target,),
        because=because,
        also_hit=("rollout/2 takes its requests",),
    )


def page(name: str, made: World, *, acting: bool = True, prometheus_url: str = "", url_only: bool = False) -> AppTest:
    """The page, drawn once, for a guest."""
    settings.use(
        settings.Settings(
            journal_url=made.run.database_url,
            run=None if url_only else made.run,
            users_path=made.users_path if acting else None,
            prometheus_url=prometheus_url,
            patience_seconds=PATIENCE_SECONDS,
        )
    )
    return AppTest.from_file(str(APP), default_timeout=60).switch_page(f"{name}.py").run()


def session(at: AppTest) -> str:
    """All that the session keeps, widgets among it."""
    return repr(at.session_state._state.filtered_state)


def sign_in(at: AppTest, token: str) -> AppTest:
    at.text_input(key="rolecall.token").input(token)
    return button(at, "Sign in").click().run()


def button(at: AppTest, label: str) -> Any:
    found = [b for b in at.button if b.label == label]
    assert found, f"no button {label!r} among {[b.label for b in at.button]}"
    return found[0]


def texts(at: AppTest) -> str:
    """All that is shown as text."""
    shown = (*at.text, *at.success, *at.error, *at.info, *at.warning, *at.code, *at.caption, *at.subheader)
    return "\n".join(str(e.value) for e in shown)


def fill(at: AppTest, form: str, what: str, value: str) -> None:
    """Types into a field of the form whose name begins with `form`."""
    found = [t for t in at.text_input if t.key and t.key.startswith(f"form:{form}") and t.key.endswith(f":{what}")]
    assert found, f"no field {what} of {form} among {[t.key for t in at.text_input]}"
    found[0].input(value)
