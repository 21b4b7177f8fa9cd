"""A collapsed policy is shown as the run's fault, of no machine; what healthy runs do is not.

pytest tests/detector/live/test_collapse.py
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rolecall.core.config.job import DetectorConfig, RecoveryConfig
from rolecall.core.diagnosis import ActionKind, Diagnosis, Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.membership import ReplicaState
from rolecall.core.telemetry import ProcessSample
from rolecall.detector.base.observation import Observation
from rolecall.detector.live import fusion
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.history import decode, encode
from rolecall.detector.live.stages.numbers.collapse import (
    QUIET_STEPS,
    STEPS_KEPT,
    TrainingHistory,
    collapse_symptoms,
)
from rolecall.recovery.fleet_view import FleetView, ReplicaView
from rolecall.recovery.incidents import IncidentOutcome
from rolecall.recovery.policy import PolicyInput, decide
from rolecall.testing.synthetic_run import FakeFault, FakeFleet
from tests.detector.courses import Row, observation, points, reported, sample

CONFIG = DetectorConfig(mask_proc_state=True)
SUPPORTS = frozenset({ActionKind.REPLACE_REPLICA, ActionKind.REPLACE_NODE, ActionKind.STOP_JOB})
FLEET_VIEW = FleetView(
    replicas=tuple(
        ReplicaView(
            replica=ReplicaId(r), desired_incarnation=1, incarnation=1, state=ReplicaState.SERVING, node=NodeId(r)
        )
        for r in ("trainer/0", "trainer/1", "rollout/0")
    )
)


def learning(num_steps: int = 60, *, seed: int = 0, noise: float = 0.02) -> list[Row]:
    """As the built-in task is learned: reward up to 0.99, entropy down from 2.7 nats to 0.05."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for step in range(num_steps):
        gain = 1 / (1 + math.exp(-(step - 25) / 6))
        rows.append(
            {
                "reward": min(1.0, 0.05 + 0.94 * gain + rng.gauss(0, noise)),
                "entropy": 0.05 + 2.65 * (1 - gain),
                "response_length": 7.0 + 2 * (1 - gain),
                "truncated_fraction": 0.6 * (1 - gain),
                "kl_sampler": abs(rng.gauss(0.01, 0.01)),
                "log_ratio_max": 1e-6 if step % 3 else math.nan,
            }
        )
    return rows


def then(num_steps: int, *, before: int = 60, seed: int = 0, **changed: float | Callable[[int], float]) -> list[Row]:
    """A healthy course, and so many steps at which some signs are others."""
    rows = learning(before, seed=seed)
    for i in range(num_steps):
        new = {k: v(i) if callable(v) else v for k, v in changed.items()}
        rows.append({**rows[before - 1], "log_ratio_max": 1e-6, **new})
    return rows


def kinds(rows: Iterable[Row]) -> set[str]:
    """All signs at any step of the course."""
    there = points(rows)
    return {sign.kind for n in range(1, len(there) + 1) for sign in collapse_symptoms(there[:n])}


COLLAPSES: dict[str, tuple[list[Row], str]] = {
    "reward falls and stays": (then(9, reward=0.3), "reward_fell"),
    "one answer for everything": (
        then(10, before=25, entropy=0.002, reward=0.4, kl_sampler=0.0),
        "entropy_collapsed",
    ),
    "one answer without an end": (
        then(10, before=25, entropy=0.002, reward=0.6, truncated_fraction=1.0),
        "entropy_collapsed",
    ),
    "uniform": (then(10, reward=0.1, entropy=2.7, response_length=9.0), "reward_fell"),
    "answers of one token": (then(10, reward=0.1, response_length=1.1), "reward_fell"),
    "answers without an end": (then(10, reward=0.2, response_length=10.0, truncated_fraction=1.0), "reward_fell"),
    "a reward for nothing": (
        then(20, reward=lambda i: 0.1 if i < 4 else 1.0, response_length=lambda i: 7.0 if i < 4 else 1.3),
        "reward_dived",
    ),
    "three times as long for as much": (then(12, response_length=24.0), "length_collapsed"),
    "one token for as much": (then(12, response_length=1.1), "length_collapsed"),
    "no end for as much": (then(12, truncated_fraction=1.0), "length_collapsed"),
    "far from its sampler": (then(5, kl_sampler=1.5), "policy_diverged"),
    "wrong weights": (then(4, log_ratio_max=0.3), "engines_disagree"),
}
LAWFUL: dict[str, list[Row]] = {
    "learning": learning(200),
    "a noisy reward": learning(200, noise=0.08),
    "a slow start": [{"reward": 0.02, "entropy": 2.7, "kl_sampler": 0.0}] * 60 + learning(60),
    "shorter answers that earn more": then(30, before=25, reward=0.9, response_length=2.0),
    "an end is learned before anything else": [
        {"reward": 0.05 + 0.01 * (i % 3), "response_length": 15.0 if i < 30 else 4.0} for i in range(80)
    ],
    "other lengths for a moment": then(40, response_length=lambda i: 30.0 if 5 <= i < 9 else 7.0),
    "a dip of six steps": then(30, reward=lambda i: 0.5 if 3 <= i < 9 else 0.97),
    "a fifth less": then(40, reward=0.8),
    "a rollback": learning(60) + [{**row, "step": 21 + i} for i, row in enumerate(learning(60, seed=1)[21:])],
    "a fresh start": learning(60) + [{**row, "step": i} for i, row in enumerate(learning(60, seed=1))],
    "harder prompts left over": then(40, reward=0.5, filtered_fraction=lambda i: 0.7) ,
    "far from its sampler for a moment": then(30, kl_sampler=lambda i: 1.5 if i < 3 else 0.01),
    "one step of another version": then(30, log_ratio_max=lambda i: 0.3 if i == 5 else 1e-6),
    "an engine of half precision": [{**row, "log_ratio_max": 0.15 + 0.1 * (i % 3)} for i, row in enumerate(learning(80))],
    "nothing shown but the reward": [{"reward": row["reward"]} for row in learning(100)],
    "rewards below 0": [{"reward": row["reward"] - 5} for row in learning(100)],
    "constant": [{"reward": 0.0, "entropy": 1.0}] * 60,
    "always at the limit": [{**row, "truncated_fraction": 1.0} for row in learning(200)],
}  # fmt: skip
LAWFUL["harder prompts left over"] = [{"filtered_fraction": 0.1, **row} for row in LAWFUL["harder prompts left over"]]


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_has_its_sign(name: str) -> None:
    rows, kind = COLLAPSES[name]
    assert kind in kinds(rows)
    assert not kinds(rows[:25]), "nothing before"


@pytest.mark.parametrize("name", LAWFUL)
def test_healthy_runs_have_no_symptom(name: str) -> None:
    assert kinds(LAWFUL[name]) == set()


def test_a_difference_in_too_few_steps_is_stated_and_is_no_agreement() -> None:
    rows = then(20, reward=0.3, log_ratio_max=lambda i: 0.3 if i == 2 else 1e-6)
    because = the_one(stands(rows)).because
    assert "differ about tokens of the same version by up to 0.3, too rarely" in because and "agree" not in because


def test_how_soon() -> None:
    fell = points(then(20, reward=0.3))
    assert next(n for n in range(60, 80) if collapse_symptoms(fell[:n])) == 67  # one of eight may still be as before
    assert collapse_symptoms(fell)[0].since.step == 60


# --- the watch -------------------------------------------------------------------------------------------------------


def stands(rows: Sequence[Row], detector: LiveDetector | None = None, **how: Any) -> list[list[Diagnosis]]:
    one = detector or LiveDetector(CONFIG)
    return [one.observe(o) for o in reported(rows, **how)]


def the_one(diagnoses: Sequence[Sequence[Diagnosis]]) -> Diagnosis:
    found = {d.key: d for ds in diagnoses for d in ds}
    assert len(found) == 1, [d.because for d in found.values()]
    return next(iter(found.values()))


def test_a_collapse_concerns_the_run_and_gives_advice() -> None:
    d = the_one(stands(then(20, reward=0.3, log_ratio_max=1e-6)))
    assert (d.fault_class, d.suspects, d.role_at_fault) == (FaultClass.USER_CODE, (), "")
    assert "the policy collapsed, not a machine fault: mean reward fell from 0.98" in d.because
    assert "to 0.3, since step 60 (entropy 0.0" in d.because and "engines and trainers agree" in d.because
    assert "learning rate, reward function and data of step 60" in d.advice
    assert "stop the job" not in d.advice, "an operator must decide whether to stop the job"
    assert d.evidence[0].values == {"step": 60.0, "reward": 0.3, "reward_before": pytest.approx(0.98, abs=0.02)}


def test_an_agreement_of_before_is_not_reported_as_one_of_now() -> None:
    rows = [{**row, "log_ratio_max": math.nan} for row in then(20, reward=0.3)]
    rows[50] = {**rows[50], "log_ratio_max": 1e-6}
    assert (
        "last reported agreement about tokens of the same version at step 50 (within 1e-06)"
        in the_one(stands(rows)).because
    )
    rows[50] = {**rows[50], "log_ratio_max": math.nan}
    assert "is unknown (no log ratio reported)" in the_one(stands(rows)).because


def test_wrong_weights_are_silent_corruption_between_two_roles_and_name_no_replica() -> None:
    d = the_one(stands(then(20, reward=0.3, log_ratio_max=0.4)))
    assert (d.fault_class, d.suspects) == (FaultClass.SILENT_CORRUPTION, ())
    assert "between role trainer and role rollout" in d.because and "mean reward" not in d.because
    assert "the replica that differs is wrong" in d.settle


def test_wrong_weights_seen_after_a_fall_are_reported_on_top() -> None:
    found = stands(then(30, reward=0.3, log_ratio_max=lambda i: 1e-6 if i < 15 else 0.4))
    classes = [d.fault_class for d in {d.key: d for ds in found for d in ds}.values()]
    assert classes == [FaultClass.USER_CODE, FaultClass.SILENT_CORRUPTION]
    assert [d.fault_class for d in found[-1]] == [FaultClass.SILENT_CORRUPTION]


def test_it_stands_until_the_reward_was_back_for_some_steps() -> None:
    found = stands(then(60, reward=lambda i: 0.3 if i < 12 else 0.97))
    assert len({d.key for ds in found for d in ds}) == 1, "once"
    standing = [bool(ds) for ds in found]
    assert not standing[-1] and standing[2 * (60 + 12 + QUIET_STEPS // 2)]


def test_a_rollback_ends_it() -> None:
    detector = LiveDetector(CONFIG)
    assert stands(then(12, reward=0.3), detector)[-1]
    again = [{**row, "step": 40 + i} for i, row in enumerate(learning(60)[40:])]
    assert not any(stands(again, detector, start=400.0))


def test_a_trainer_that_lags_or_is_gone_takes_nothing_back() -> None:
    detector = LiveDetector(CONFIG)
    rows = then(12, reward=0.3)
    assert stands(rows[:60], detector)[-1] == []
    late = sample("trainer/1", 200.0, 40, rows[39])
    assert detector.observe(observation(200.0, [late])) == []
    assert stands(rows[60:], detector, start=201.0, first=60, replicas=("trainer/0",))[-1]


def test_one_trainer_is_enough_and_a_controller_that_tells_the_reward_alone() -> None:
    rows = then(12, reward=0.3)
    assert stands(rows, replicas=("trainer/0",))[-1]
    assert stands([{"reward": row["reward"]} for row in rows], replicas=("controller/0",))[-1]


def test_a_sign_read_amid_an_update_is_not_kept() -> None:
    course, detector = TrainingHistory(), LiveDetector(CONFIG)
    for at, ratio in ((1.0, 0.5), (2.0, math.nan)):
        row = {"reward": 0.5, "entropy": 1.0, "log_ratio_max": ratio}
        detector.observe(observation(at, [sample("trainer/0", at, 1, row)]))
        course.take(detector._fleet)
    assert course.points[-1].values == {"reward": 0.5, "entropy": 1.0}


def test_stored_evidence_is_bounded() -> None:
    detector = LiveDetector(CONFIG)
    stands([{"reward": 0.5, "entropy": 1.0}] * (STEPS_KEPT + 50), detector, replicas=("trainer/0",))
    assert len(detector.state()["stages"]["collapse"]["history"]["v"]["points"]) == STEPS_KEPT + 1


def test_a_stored_window_replays_to_the_same_decisions() -> None:
    detector = LiveDetector(CONFIG)
    found = stands(then(14, reward=0.3, entropy=0.001), detector)
    window = json.loads(json.dumps(detector.window(), allow_nan=False))
    again = LiveDetector.replay_window(window)
    assert [[d.to_dict() for d in ds] for ds in again] == [[d.to_dict() for d in ds] for ds in found[-len(again) :]]
    assert again[-1] and len(again) < 40, "from what was known before it"


def test_a_restarted_watcher_reports_it_once() -> None:
    detector, rows = LiveDetector(CONFIG), then(16, reward=0.3)
    first = stands(rows[:70], detector)[-1]
    resumed = LiveDetector.resumed(CONFIG, None, json.loads(json.dumps(detector.state(), allow_nan=False)))
    assert stands(rows[70:], resumed, start=200.0, first=70)[-1] == first
    kept = detector.state()["stages"]["collapse"]
    assert encode(decode(kept)) == kept


# --- beside machines that fail ---------------------------------------------------------------------------------------


class Collapsing(FakeFleet):
    """A run whose trainers tell a course, one row a step; the last row goes on."""

    rows: Sequence[Row] = ()

    def poll(self) -> Observation:
        o = super().poll()
        return replace(
            o, batches=tuple(replace(b, processes=tuple(map(self._with_signs, b.processes))) for b in o.batches)
        )

    def _with_signs(self, p: ProcessSample) -> ProcessSample:
        if p.role != "trainer" or p.policy_version < 1:
            return p
        signs_then: dict[str, Any] = dict(self.rows[min(p.policy_version, len(self.rows)) - 1])
        return replace(p, healths=1, **signs_then)


@pytest.mark.parametrize("kind", ["stopped", "kill"])
def test_neither_swallows_the_other(kind: str) -> None:
    run = Collapsing(seed=3, groups_ready_seconds=0.2)
    run.rows = then(1, before=24, reward=0.01)
    detector = LiveDetector(CONFIG, {"trainer": 2, "rollout": 3, "reward": 2, "controller": 1})
    keys: set[str] = set()
    while "user_code::collapse" not in keys:
        assert run.now < 400, keys
        for o in run.run(5.0):
            keys |= {d.key for d in detector.observe(o)}
    if kind == "kill":
        run.kill("trainer/1")
    else:
        run.processes["trainer/1"].fault = FakeFault(kind)
    standing: list[Diagnosis] = []
    for o in run.run(20.0):
        standing = detector.observe(o)
    fault = "crash" if kind == "kill" else "hang"
    assert {d.key for d in standing} == {"user_code::collapse", f"{fault}:trainer/1#1"}


@pytest.mark.parametrize("role", ["trainer", ""])
def test_fusion_keeps_a_crash_beside_a_collapse(role: str) -> None:
    def found(fault: FaultClass, *suspects: Suspect, about: str = "") -> Finding:
        return Finding(
            detector="x", suspects=suspects, fault_class=fault, onset=0.0, detected_at=1.0, confidence=1.0,
            because="b", about=about,
        )  # fmt: skip

    crash = found(FaultClass.CRASH, Suspect(node=NodeId("n"), role=role, replica="a/0", incarnation=1))
    assert len(fusion.fuse([found(FaultClass.USER_CODE, about=":collapse"), crash], {}, {}, 1.0)) == 2


# --- what becomes of it ----------------------------------------------------------------------------------------------


@cache
def told_of(name: str) -> Diagnosis:
    return the_one([stands(COLLAPSES[name][0])[-1]])


@pytest.mark.parametrize("mode", ["observe", "approve", "act"])
@pytest.mark.parametrize("name", COLLAPSES)
def test_oncall_is_paged_nothing_is_evicted_and_the_job_continues(name: str, mode: str) -> None:
    d = told_of(name)
    question = PolicyInput(
        incident_id=IncidentId("inc-1-job"),
        diagnosis=d,
        fleet=FLEET_VIEW,
        config=RecoveryConfig(mode=mode),  # type: ignore[arg-type]
        past=(),
        supports=SUPPORTS,
    )
    verdict = decide(question)
    assert (verdict.plan.action, verdict.plan.targets) == (ActionKind.TOLERATE, ())
    assert verdict.page_oncall and verdict.outcome is IncidentOutcome.TOLERATED
    assert d.because in verdict.plan.because
