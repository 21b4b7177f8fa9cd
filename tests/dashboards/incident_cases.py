"""Journals with an incident of every kind, made by the real watch on a fake clock; and windows made by the real
detector."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.core.journal.events import EventKind
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs, read
from rolecall.detector.live.engine import LiveDetector
from rolecall.recovery.operators import commands
from rolecall.recovery.operators.run_location import JournalLocation
from rolecall.recovery.projection import IncidentProjection
from rolecall.testing.recovery_world import diagnosis
from rolecall.testing.synthetic_run import FakeFault, FakeFleet
from tests.detector.courses import STEP_SECONDS, reported
from tests.events import filled
from tests.recovery.world import World

F, K = FaultClass, EventKind
HOSTILE = (
    "<script>alert(1)</script> **bold** $x^2$ :red[x] [a](http://b) \x1b[31mred\x1b[0m \u202eback `code` <img src=x>"
)
"""What a log line may hold: HTML, Markdown, LaTeX, Streamlit's own colours, control and direction characters."""


def resolved(world: World, fault: FaultClass = F.CRASH, replica: str = "rollout/1") -> None:
    watch = world.watch()
    world.run(2.0, watch)
    world.runtime.inject(replica, fault)
    world.until(world.all_closed, watch)


def hung_trainer(world: World) -> None:
    resolved(world, F.HANG, "trainer/1")


def slow(world: World) -> None:
    resolved(world, F.SLOW, "rollout/0")


def retried(world: World) -> None:
    """The first replacement dies before its first work."""
    world.runtime.starts_that_die["rollout/1"] = 1
    resolved(world)


def gave_up(world: World) -> None:
    world.runtime.starts_that_die["rollout/1"] = 9
    resolved(world)


def proposed(world: World) -> None:
    watch = world.watch(world.config.model_copy(update={"mode": "approve"}))
    world.run(2.0, watch)
    world.runtime.inject("rollout/1", F.CRASH)
    world.until(lambda: world.events(K.PLAN_PROPOSED), watch)


def approved(world: World) -> None:
    proposed(world)
    attempt = world.only().attempt
    assert attempt is not None
    commands.approve_plan(JournalLocation(world.url), attempt.plan.digest, "Ada", clock=world.clock)
    world.until(world.all_closed, world.watch(world.config.model_copy(update={"mode": "approve"})))


def held(world: World) -> None:
    watch = world.watch()
    world.run(2.0, watch)
    commands.pause_recovery(JournalLocation(world.url), "Ada", "let me look")
    world.runtime.inject("rollout/1", F.CRASH)
    world.until(lambda: world.events(K.PLAN_BLOCKED), watch)


def observed(world: World) -> None:
    watch = world.watch(world.config.model_copy(update={"mode": "observe"}))
    world.run(2.0, watch)
    world.runtime.inject("rollout/1", F.HANG)
    world.until(lambda: world.events(K.PLAN_BLOCKED), watch)
    world.runtime.processes["rollout/1"].fault = None
    world.until(world.all_closed, watch)


def asked_by_person(world: World) -> None:
    watch = world.watch()
    world.run(2.0, watch)
    commands.replace(JournalLocation(world.url), "rollout/1", "it looks odd", "Ada", clock=world.clock)
    world.until(world.all_closed, watch)


def said(world: World, d: Diagnosis) -> None:
    """A diagnosis of somebody else's making, for as long as it takes to close."""
    watch = world.watch()
    world.run(2.0, watch)
    world.detector.extra.append(replace(d, onset=world.clock.wall() - 3.0, detected_at=world.clock.wall()))
    world.until(lambda: world.events(K.INCIDENT_CLOSED) or world.events(K.ACTION_DONE), watch)


def node_lost(world: World) -> None:
    d = diagnosis(F.NODE_LOST, because="node-7's agent has been silent for 31 s, and so has its raylet")
    said(world, replace(d, suspects=(Suspect(node=NodeId("node-7")),)))


def user_code(world: World) -> None:
    because = "all trainers raised ValueError: shapes differ, at train.py:31"
    said(
        world, diagnosis(F.USER_CODE, ("trainer/0", 1), ("trainer/1", 1), because=because, about="trainer:ValueError:1")
    )


def collapsed(world: World) -> None:
    """What the real detector says of a course, over the steps that it says it of."""
    rows = [{"reward": 0.9, "entropy": 0.6, "response_length": 9.0, "kl_sampler": 0.01, "log_ratio_max": 1e-6}] * 40
    rows += [{**rows[0], "reward": 0.2, "entropy": 0.02, "response_length": 1.5}] * 12
    for step, row in enumerate(rows):
        world.clock.advance(STEP_SECONDS)
        health = {k: v for k, v in row.items() if k != "reward"}
        world.journal.append(filled(K.STEP_COMMITTED, {"step": step, "reward": row["reward"], "health": health}))
    detector = LiveDetector(DetectorConfig(mask_proc_state=True))
    (d,) = [standing for o in reported(rows) for standing in detector.observe(o)][-1:]
    watch, now = world.watch(), world.clock.wall()
    world.detector.extra.append(replace(d, onset=now - 12 * STEP_SECONDS, detected_at=now))
    world.until(lambda: world.events(K.INCIDENT_CLOSED), watch)


def cannot_tell(world: World) -> None:
    because = "rollouts stand still together, and nothing is seen that they wait for"
    said(world, diagnosis(F.CANNOT_TELL, because=because, settle="the stacks of role rollout"))


def hostile(world: World) -> None:
    """Text of a log in every place that text of others can come to."""
    from rolecall.core.diagnosis import Evidence

    evidence = (Evidence(kind=HOSTILE, text=HOSTILE, values={HOSTILE: 1.0, "deadline_seconds": 2.0}),)
    d = diagnosis(F.CRASH, ("rollout/1", 1), because=HOSTILE, advice=HOSTILE, settle=HOSTILE, evidence=evidence)
    said(world, replace(d, detectors=(HOSTILE,)))
    name = world.only().incident_id
    hostile = Finding(
        detector=HOSTILE,
        suspects=(),
        fault_class=F.CRASH,
        onset=0.0,
        detected_at=0.0,
        confidence=1.0,
        because=HOSTILE,
        evidence=evidence,
    )
    body = {
        "because": HOSTILE,
        "statements": [HOSTILE],
        "missing": [HOSTILE],
        "files": [{"name": HOSTILE, "bytes": 1, "sha256": HOSTILE, "kind": HOSTILE}],
        "findings": [hostile.to_dict()],
        "seconds": 1.0,
    }
    world.journal.append(filled(K.EVIDENCE_COLLECTED, body), incident_id=name)
    world.journal.append(
        filled(K.DIAGNOSIS_REVIEWED, {"verdict": "wrong", "by": HOSTILE, "because": HOSTILE}), incident_id=name
    )
    weights = {"replica": "rollout/1", "incarnation": 2, "policy_version": 2}
    world.journal.append(filled(K.WEIGHTS_ADMITTED, {**weights, "holder": HOSTILE}))
    world.journal.append(filled(K.WEIGHTS_REJECTED, {**weights, "part": HOSTILE, "because": HOSTILE}))
    world.journal.append(filled(K.REPLICA_LOST, {"replica": "rollout/1", "incarnation": 2, "because": HOSTILE}))


KINDS: Mapping[str, Callable[[World], None]] = {
    "resolved": resolved,
    "hung trainer": hung_trainer,
    "slow": slow,
    "retried": retried,
    "gave up": gave_up,
    "proposed": proposed,
    "approved": approved,
    "held": held,
    "observed": observed,
    "asked by an operator": asked_by_person,
    "node lost": node_lost,
    "user code": user_code,
    "collapsed": collapsed,
    "cannot tell": cannot_tell,
    "hostile": hostile,
}


def world_of(kind: str, path: Path) -> World:
    world = World(path)
    KINDS[kind](world)
    return world


def material_of(world: World, *, window: Mapping[str, Any] | None = None) -> IncidentPageInputs:
    book = IncidentProjection()
    book.refresh(world.journal)
    (name,) = book.incidents
    if window is not None:
        world.journal.save_window(name, "observations", window)
    return read(world.journal, book, name, None, world.clock.wall())


@cache
def found(fault: str, replica: str) -> tuple[Diagnosis, Mapping[str, Any]]:
    """What the real detector says of a simulated run, and the window that it had read."""
    fleet = FakeFleet(seed=7)
    detector = LiveDetector(DetectorConfig(), {"trainer": 2, "rollout": 3, "reward": 2, "controller": 1})
    for o in fleet.run(60.0):
        detector.observe(o)
    if fault == "kill":
        fleet.kill(replica)
    else:
        fleet.processes[replica].fault = FakeFault(fault)
    for o in fleet.run(60.0):
        standing = detector.observe(o)
        if standing:
            return standing[0], detector.window(standing[0].suspects)
    raise AssertionError(f"nothing was found of {fault} at {replica}")
