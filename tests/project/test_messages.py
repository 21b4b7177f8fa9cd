"""No residue of a template in what a person reads: every message of an incident, with every class, action and outcome."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.recovery import (
    ActionDone,
    ActionFailed,
    ActionStarted,
    DiagnosisReviewed,
    HoldLifted,
    HoldPlaced,
    IncidentClosed,
    IncidentOpened,
    IncidentUpdated,
    IncidentVerified,
    OncallPaged,
    PlanApproved,
    PlanBlocked,
    PlanCreated,
    PlanExpired,
    PlanProposed,
    PlanRejected,
)
from rolecall.core.text import counted, in_words, node_text
from rolecall.dashboards.pages.incidents.material import IncidentPageInputs
from rolecall.dashboards.pages.incidents.table import row_of
from rolecall.dashboards.pages.incidents.timeline import build_timeline
from rolecall.dashboards.pages.incidents.view import findings, head, plan_sections
from rolecall.detector.base.findings import COLLAPSE, WRONG_NUMBERS, WRONG_NUMBERS_ONCE
from rolecall.recovery.incidents import OPERATOR, ActionFailure, IncidentOutcome, fold
from rolecall.recovery.notifications.outbox import message
from rolecall.recovery.operators import queries
from rolecall.recovery.policy import FailedAttempt, PolicyInput, decide
from rolecall.recovery.projection import IncidentProjection
from rolecall.terminal.run import render
from rolecall.views.incidents import IncidentSummary
from rolecall.views.snapshot import RunSnapshotProjection
from tests.recovery.test_policy import fleet
from tests.terminal.test_run import printed
from tests.terminal.texts import incidents_text

UNDERSCORED = "|".join(
    sorted(
        {str(v) for of in (FaultClass, ActionKind, IncidentOutcome, ActionFailure, EventKind) for v in of if "_" in v}
    )
)
RESIDUE = {
    "empty parentheses": re.compile(r"\(\s*\)"),
    "a doubled word": re.compile(r"\b([a-z]{2,})[ ]\1\b(?!-)|\bnode node-", re.IGNORECASE),
    "None": re.compile(r"\bNone\b|#None"),
    "a brace": re.compile(r"[{}]"),
    "a name of an enum": re.compile(rf"\b(?:{UNDERSCORED})\b"),
    "a plural of one": re.compile(
        r"\b1 (?:units|times|replicas|ranks|nodes|attempts|replacements|incidents|steps|s\b\w)"
    ),
    "a second reason": re.compile(r"because (?:tolerated|because)|because:"),
    "a mark without text": re.compile(r"[:;,] ?[.;,:]|: *$|\bby *:|\s[.,;:](?:\s|$)"),
}
SUSPECTS: dict[str, tuple[Suspect, ...]] = {
    "replica": (Suspect(node=NodeId("node-2"), role="rollout", replica="rollout/1", incarnation=1),),
    "no incarnation": (Suspect(node=NodeId("node-2"), role="rollout", replica="rollout/1"),),
    "node": (Suspect(node=NodeId("node-2")),),
    "none": (),
}
NOW = 1_700_000_100.0


def check(text: str) -> None:
    for what, pattern in RESIDUE.items():
        found = pattern.search(text)
        assert found is None, f"{what}: {found.group(0)!r} in {text!r}"


def _diagnosis(fault: FaultClass, suspects: str, **more: Any) -> Diagnosis:
    values: dict[str, Any] = {
        "suspects": SUSPECTS[suspects],
        "fault_class": fault,
        "onset": NOW - 60.0,
        "detected_at": NOW - 50.0,
        "confidence": 0.9,
        "because": "it stands still",
        "detectors": ("nccl_ras",),
    }
    return Diagnosis(**{**values, **more})


def _plans(diagnosis: Diagnosis) -> Iterator[Plan]:
    """What policy makes of a diagnosis, with every failure before it and with and without an actuator and a horizon."""
    target = PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("node-2"))
    failures = [
        FailedAttempt(failure=f, action=ActionKind.REPLACE_REPLICA, targets=(target,), because="it ended")
        for f in ActionFailure
    ]
    pasts: list[tuple[FailedAttempt, ...]] = [(), *((f,) for f in failures), tuple(failures[:1]) * 2]
    supports = (frozenset(ActionKind), frozenset[ActionKind](), frozenset({ActionKind.REPLACE_REPLICA}))
    configs = (RecoveryConfig(), RecoveryConfig(horizon_seconds=100.0), RecoveryConfig(horizon_seconds=1e6))
    for past, can, config in product(pasts, supports, configs):
        question = PolicyInput(
            incident_id=IncidentId("inc-1-rollout-1"),
            diagnosis=diagnosis,
            fleet=fleet(),
            config=config,
            past=past,
            supports=can,
        )
        yield decide(question).plan


@pytest.mark.parametrize("suspects", SUSPECTS)
@pytest.mark.parametrize("fault", FaultClass)
def test_reasons_of_policy(fault: FaultClass, suspects: str) -> None:
    of = _diagnosis(fault, suspects)
    kinds = [
        of,
        replace(of, settle="a stack of it"),
        replace(of, detectors=(OPERATOR,)),
        *(replace(of, detectors=(name,)) for name in (COLLAPSE, WRONG_NUMBERS, WRONG_NUMBERS_ONCE)),
        *(replace(of, gain_ratio=ratio) for ratio in (1.0, 1.01, 4.0)),
    ]
    for diagnosis in kinds:
        for plan in _plans(diagnosis):
            check(plan.words)
            check(plan.because)
            check(f"{plan.words}, because {plan.because}")
            # Pages show the reason without the diagnosis, which is above it.
            check(plan.because.replace(diagnosis.because, "").strip(" :;,."))


def _journal(diagnosis: Diagnosis, action: ActionKind, outcome: IncidentOutcome, reason: str) -> list[Event]:
    """Every kind of event of an incident, in an order in which most of them count."""
    target = PlanTarget(replica=ReplicaId("rollout/1"), incarnation=1, node=NodeId("node-2"))
    targets = () if action in (ActionKind.TOLERATE, ActionKind.STOP_JOB) else (target,)
    plan = Plan(incident_id=IncidentId("inc-1"), action=action, targets=targets, because=diagnosis.because)
    d = plan.digest
    created = PlanCreated(plan=plan, page_oncall=True, outcome="tolerated", question={})
    payloads: list[Payload] = [
        IncidentOpened(diagnosis=diagnosis, window=""),
        IncidentUpdated(diagnosis=diagnosis),
        created,
        PlanBlocked(digest=d, guard="at_once", because="another repair is in progress"),
        HoldPlaced(digest=d, by="ada", because="a core dump", until=NOW - 30.0),
        HoldLifted(digest=d, by="ada", because=reason),
        PlanProposed(digest=d, plan=plan, expires_at=NOW + 60.0),
        PlanRejected(digest=d, by="ada", because=reason),
        PlanExpired(digest=d, because="not approved for 600 s"),
        PlanApproved(digest=d, by="ada"),
        ActionStarted(digest=d, plan=plan),
        *(ActionFailed(digest=d, failure=str(f), because="it ended") for f in ActionFailure),
        OncallPaged(topic="nothing_helps", because="it ended", channel="log"),
        created,
        ActionStarted(digest=d, plan=plan),
        ActionDone(digest=d, result={"done": True, **({"because": reason} if reason else {})}),
        IncidentVerified(digest=d, because=f"rollout/1#2 has finished {counted(1, 'unit')} of work", serving_at=NOW),
        IncidentClosed(outcome=str(outcome), because=reason),
        DiagnosisReviewed(verdict="wrong", by="ada", because=reason),
    ]
    return [
        Event(seq=n, payload=payload, incident_id="inc-1", wall_at=NOW - 50.0 + n)
        for n, payload in enumerate(payloads, start=1)
    ]


@pytest.mark.parametrize("fault", FaultClass)
@pytest.mark.parametrize("suspects", SUSPECTS)
def test_every_screen_at_every_moment_of_an_incident(fault: FaultClass, suspects: str) -> None:
    events = _journal(
        _diagnosis(fault, suspects), ActionKind.REPLACE_REPLICA, IncidentOutcome.SELF_RECOVERED, reason=""
    )
    for number in range(1, len(events) + 1):
        for text in _screens(events[:number]):
            check(text)


@pytest.mark.parametrize("outcome", IncidentOutcome)
@pytest.mark.parametrize("action", ActionKind)
def test_every_outcome_of_every_action(action: ActionKind, outcome: IncidentOutcome) -> None:
    for reason in ("", "it ended"):
        for text in _screens(_journal(_diagnosis(FaultClass.HANG, "replica"), action, outcome, reason)):
            check(text)


def _screens(events: list[Event]) -> Iterator[str]:
    """What command line, page, terminal, report and notifications show of it, line by line."""
    incident = fold(events, strict=False)["inc-1"]
    projection = IncidentProjection()
    value = {**queries.summary(incident, projection, NOW), "diagnosis": incident.diagnosis.to_dict()}
    shown_events = [
        {"seq": e.seq, "wall_at": e.wall_at, "kind": str(e.kind), "body": e.payload.to_body()} for e in events
    ]
    yield from incidents_text([{**value, "events": shown_events}]).splitlines()
    material = IncidentPageInputs(
        incident_id="inc-1",
        now=NOW,
        incident=incident,
        set_aside="",
        others=(),
        events=tuple(events),
        around=tuple(events),
        known={},
        window=None,
        faults=(),
        missing=(),
    )
    story = IncidentSummary(incident=incident)
    header = head(material, story)
    yield from (header.sentence, header.status, header.state, *header.who, *(v for _, v in header.facts))
    for finding in findings(material):
        yield from (finding.title, finding.because)
    for section in plan_sections(material):
        yield from (section.title, section.because, section.outcome, *section.held, *section.commands)
    for moment in build_timeline(material, story).moments:
        yield f"{moment.kind}: {moment.words}"
    row = row_of(incident)
    yield from (row.words, row.who, row.because)
    memory = RunSnapshotProjection()
    memory.read(events)
    for line in printed(render(memory.snapshot(NOW, {}, {}, None, incidents=[incident]), width=300), 300).splitlines():
        yield line.strip()
    yield story.durations(NOW).words
    note = message(events[-1], incident, "run-1")
    if note is not None:
        yield note.because


@pytest.mark.parametrize(
    "text", ["was not measured ()", "node node-2", "because tolerated: it", "finished 1 units", "#None"]
)
def test_the_check_finds_residue(text: str) -> None:
    with pytest.raises(AssertionError):
        check(text)


def test_the_words_that_messages_are_made_of() -> None:
    assert [counted(n, "unit") for n in (0, 1, 2000)] == ["0 units", "1 unit", "2,000 units"]
    assert [node_text(n) for n in ("node-2", "Node7", "m07")] == ["node-2", "Node7", "node m07"]
    assert in_words(ActionKind.REPLACE_REPLICA) == "replace replica"
