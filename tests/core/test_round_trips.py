"""Every value that is stored or sent comes back the same from its JSON: what a detector saw can be replayed."""

import json
import math
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.diagnosis import Diagnosis, Finding, Plan, PlanTarget, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import IncidentId, NodeId, ProcessId, ReplicaId
from rolecall.core.journal.events import Event
from rolecall.core.telemetry import AgentEvent, GpuSample, HostSample, ProcessSample, SampleBatch
from tests.core.strategies import (
    AGENT_EVENTS,
    BATCHES,
    DIAGNOSES,
    EVENTS,
    FINDINGS,
    GPU_SAMPLES,
    HOST_SAMPLES,
    PLANS,
    PROCESS_SAMPLES,
)


def _through_json(value: Any) -> Any:
    return type(value).from_dict(json.loads(json.dumps(value.to_dict(), allow_nan=False)))


@given(st.one_of(FINDINGS, DIAGNOSES, PLANS, EVENTS, AGENT_EVENTS, HOST_SAMPLES))
def test_values_survive_json(value: Finding | Diagnosis | Plan | Event | AgentEvent | HostSample) -> None:
    assert _through_json(value) == value


def _same_sample(a: ProcessSample | GpuSample, b: ProcessSample | GpuSample) -> bool:
    """Equality in which NaN equals NaN."""
    left, right = asdict(a), asdict(b)
    return all(
        left[k] == right[k] or (isinstance(left[k], float) and math.isnan(left[k]) and math.isnan(right[k]))
        for k in left
    )


@given(PROCESS_SAMPLES)
def test_a_process_sample_survives_json_and_nan_is_absence(sample: ProcessSample) -> None:
    assert _same_sample(_through_json(sample), sample)
    assert ("loss" in sample.to_dict()) == (not math.isnan(sample.loss))


@given(GPU_SAMPLES)
def test_a_gpu_sample_survives_json_and_nan_is_absence(sample: GpuSample) -> None:
    assert _same_sample(_through_json(sample), sample)
    assert ("sm_clock_hertz" in sample.to_dict()) == (not math.isnan(sample.sm_clock_hertz))
    assert "tensor_active_ratio" not in sample.to_dict()


@given(BATCHES)
def test_a_batch_survives_json(batch: SampleBatch) -> None:
    back = _through_json(batch)
    assert back.hosts == batch.hosts
    assert (back.node, back.cursor, back.lost) == (batch.node, batch.cursor, batch.lost)
    assert all(_same_sample(a, b) for a, b in zip(back.processes, batch.processes, strict=True))
    assert all(_same_sample(a, b) for a, b in zip(back.gpus, batch.gpus, strict=True))
    assert SampleBatch.from_dict({k: v for k, v in batch.to_dict().items() if k != "gpus"}).gpus == (), "an older agent"


@given(PROCESS_SAMPLES, AGENT_EVENTS, GPU_SAMPLES)
def test_fields_of_a_later_version_are_ignored(sample: ProcessSample, event: AgentEvent, gpu: GpuSample) -> None:
    # An agent may be newer than the watch that reads it.
    assert _same_sample(ProcessSample.from_dict({**sample.to_dict(), "invented_later": 1}), sample)
    assert _same_sample(GpuSample.from_dict({**gpu.to_dict(), "invented_later": 1}), gpu)
    assert AgentEvent.from_dict({**event.to_dict(), "invented_later": 1}) == event


def _diagnosis(**changes: Any) -> Diagnosis:
    suspect = Suspect(node=NodeId("node-3"), role="rollout", replica="rollout/0", incarnation=1)
    values = {
        "suspects": (suspect,),
        "fault_class": FaultClass.CRASH,
        "onset": 1.0,
        "detected_at": 2.0,
        "confidence": 0.9,
        "because": "it ended",
    }
    return Diagnosis(**{**values, **changes})


def test_the_key_of_a_diagnosis_is_its_suspects_and_class_not_its_words() -> None:
    other = Suspect(node=NodeId("node-4"), replica="rollout/1", incarnation=1)
    again = Suspect(node=NodeId("node-3"), replica="rollout/0", incarnation=2)
    base = _diagnosis()
    assert base.key == _diagnosis(because="other words", confidence=0.1, detected_at=9.0).key
    assert base.key != _diagnosis(fault_class=FaultClass.HANG).key
    assert base.key != _diagnosis(suspects=(again,)).key, "a later incarnation is another fault"
    both, reverse = (base.suspects[0], other), (other, base.suspects[0])
    assert _diagnosis(suspects=both).key == _diagnosis(suspects=reverse).key


@given(PLANS, PLANS)
def test_an_approval_is_bound_to_the_plans_action(a: Plan, b: Plan) -> None:
    same = (a.incident_id, a.action, a.targets) == (b.incident_id, b.action, b.targets)
    assert (a.digest == b.digest) == same


def test_the_digest_of_a_plan_changes_with_the_incarnation_and_not_with_the_words() -> None:
    def plan(incarnation: int, because: str) -> Plan:
        from rolecall.core.diagnosis import ActionKind

        target = PlanTarget(replica=ReplicaId("rollout/1"), incarnation=incarnation, node=NodeId("node-4"))
        return Plan(incident_id=IncidentId("i1"), action=ActionKind.REPLACE_REPLICA, targets=(target,), because=because)

    assert plan(1, "a").digest == plan(1, "b").digest
    assert plan(1, "a").digest != plan(2, "a").digest


def test_values_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        _diagnosis().because = "something else"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        ProcessId(node=NodeId("n"), pid=1, start_ticks=1).pid = 2  # type: ignore[misc]
