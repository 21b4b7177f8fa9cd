"""Counterfactuals: each line is evaluated again, numbers on both sides of the stated value."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.diagnosis import ActionKind
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.dashboards.pages.incidents.what_if import (
    ACTS,
    NEEDS_APPROVAL,
    DecisionInputs,
    WhatIf,
    as_of,
    decision_inputs,
    margins,
    predict,
    what_if,
)
from rolecall.recovery.guards import Situation, check
from rolecall.recovery.incidents import IncidentState
from rolecall.recovery.policy import decide
from tests.dashboards.incident_cases import KINDS, found, material_of, world_of


def asked_of(kind: str, path: Path) -> DecisionInputs:
    a = decision_inputs(material_of(world_of(kind, path)))
    assert a is not None
    return a


def line(found: WhatIf, words: str) -> Any:
    (one,) = [x for x in found.lines if words in x.condition]
    return one


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"hostile"}))
def test_every_counterfactual_changes_the_decision(kind: str, tmp_path: Path) -> None:
    a = asked_of(kind, tmp_path)
    said = what_if(a)
    assert said.lines
    if kind == "collapsed":  # it names no one, so that nothing could be done; only observed, it would stay open
        assert [x.decision.words for x in said.lines] == ["no action (open until it is over, on-call is paged)"]
    for x in said.lines:
        assert predict(x.inputs).key != predict(a).key, x.text
        # Evaluated directly by policy and guards.
        verdict = decide(x.inputs.policy_input)
        assert verdict.plan.action == x.decision.action
        if x.decision.first not in (ACTS, NEEDS_APPROVAL) and verdict.plan.action is not ActionKind.TOLERATE:
            i = replace(x.inputs.incident, diagnosis=x.inputs.policy_input.diagnosis)
            situation = Situation(
                now=x.inputs.now,
                fleet=x.inputs.policy_input.fleet,
                config=x.inputs.policy_input.config,
                incidents=(*x.inputs.others, i),
                paused=x.inputs.paused,
            )
            guarded = check(verdict.plan, i, situation)
            assert guarded.guard == x.decision.first


def test_the_actual_decision_is_what_the_watch_did(tmp_path: Path) -> None:
    for kind, first in {
        "resolved": ACTS,
        "proposed": NEEDS_APPROVAL,
        "held": "paused",
        "observed": "mode",
        "gave up": "escalated",
    }.items():
        (tmp_path / kind).mkdir()
        assert predict(asked_of(kind, tmp_path / kind)).first == first, kind


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (
            "times slower",
            lambda a, v: replace(a.policy_input, diagnosis=replace(a.policy_input.diagnosis, gain_ratio=v)),
        ),
        (
            "horizon",
            lambda a, v: replace(
                a.policy_input, config=a.policy_input.config.model_copy(update={"horizon_seconds": v})
            ),
        ),
        (
            "cost",
            lambda a, v: replace(
                a.policy_input, config=a.policy_input.config.model_copy(update={"replacement_cost_seconds": v})
            ),
        ),
    ],
    ids=["ratio", "horizon", "cost"],
)
def test_of_a_slow_one_the_number_is_the_edge(words: str, changed: Any, tmp_path: Path) -> None:
    a = asked_of("slow", tmp_path)
    one = line(what_if(a), words)
    number = float(re.search(r"[\d.,]+", one.condition).group().replace(",", ""))  # type: ignore[union-attr]
    slack = 0.02 * (number - 1 if words == "times slower" else number)
    sign = 1 if "or more" in one.condition else -1
    assert decide(changed(a, number + sign * 1e-9 * number)).plan.action is ActionKind.TOLERATE
    assert decide(changed(a, number - sign * slack)).plan.action is ActionKind.REPLACE_REPLICA


def test_without_a_horizon_the_least_that_pays_is_named(tmp_path: Path) -> None:
    a = asked_of("slow", tmp_path)
    a = replace(
        a,
        policy_input=replace(a.policy_input, config=a.policy_input.config.model_copy(update={"horizon_seconds": None})),
    )
    one = line(what_if(a), "a horizon of")
    assert one.decision.action is ActionKind.REPLACE_REPLICA
    assert "40" in one.condition  # 40 s x (1 - 1/4) = 30 s, the cost


@pytest.mark.parametrize(
    ("words", "guard", "number"),
    [
        ("other replicas had been replaced in", "evictions", 6),
        ("it had been replaced", "retries", 3),
        ("were being replaced", "role_share", 1),
        ("suspected on peer evidence", "majority", 1),
    ],
)
def test_counts_are_the_smallest_that_hold_it(words: str, guard: str, number: int, tmp_path: Path) -> None:
    one = line(what_if(asked_of("slow", tmp_path)), words)
    assert one.decision.first == guard
    assert re.search(r"\d+", one.condition).group() == str(number)  # type: ignore[union-attr]


def test_two_that_die_on_start_restart_the_role(tmp_path: Path) -> None:
    one = line(what_if(asked_of("resolved", tmp_path)), "had died before doing any work")
    assert one.condition.startswith("2 replacements")
    assert (one.decision.action, one.decision.first, one.decision.page_oncall) == (
        ActionKind.RESTART_ROLE,
        "acts",
        False,
    )


def test_what_changes_nothing_is_said_too(tmp_path: Path) -> None:
    said = what_if(asked_of("resolved", tmp_path))
    assert any("hang" in text and "wrong weights" in text for text in said.without_effect)


def test_others_are_taken_as_they_stood_then(tmp_path: Path) -> None:
    i = world_of("resolved", tmp_path).only()
    attempt = i.attempts[0]
    assert attempt.started_at is not None and attempt.done_at is not None
    assert as_of(i, i.opened_at - 1) is None
    acting = as_of(i, attempt.started_at)
    assert acting is not None and acting.outcome is None
    assert acting.state in (IncidentState.ACTING, IncidentState.VERIFYING)
    assert as_of(i, i.closed_at or 0.0) == i


def test_a_plan_without_a_question_is_not_asked_again(tmp_path: Path) -> None:
    m = material_of(world_of("resolved", tmp_path))
    bare = [e for e in m.events if e.kind is not EventKind.PLAN_CREATED]
    assert decision_inputs(replace(m, events=tuple(bare))) is None
    broken = [
        replace(e, payload=replace(e.payload, question={"fleet": 7})) if e.kind is EventKind.PLAN_CREATED else e
        for e in m.events
    ]
    assert decision_inputs(replace(m, events=tuple(broken))) is None


@pytest.mark.parametrize("fault", ["stopped", "duty_cycle"])
def test_margins_come_from_the_evidence(fault: str) -> None:
    d, _ = found(fault, "trainer/1" if fault == "stopped" else "rollout/1")
    assert d.fault_class is (FaultClass.HANG if fault == "stopped" else FaultClass.SLOW)
    (margin,) = margins(d)
    assert margin.seen > margin.limit > 0
    assert f"{margin.limit:.3g}" in margin.text
