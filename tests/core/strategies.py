"""Random values of the shared language, for round trips."""

from typing import Any

from hypothesis import strategies as st

from rolecall.core.diagnosis import ActionKind, Diagnosis, Evidence, Finding, Plan, PlanTarget, Suspect
from rolecall.core.faults import FAULTS
from rolecall.core.ids import IncidentId, NodeId, ProcessId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.telemetry import (
    HEALTH_SIGNS,
    AgentEvent,
    AgentEventKind,
    GpuSample,
    HostSample,
    Phase,
    ProcessSample,
    SampleBatch,
)
from tests.events import made_event

TEXT = st.text(max_size=20)
TIMES = st.floats(0, 4e9, allow_nan=False)
COUNTS = st.integers(0, 2**53)
NODES = st.integers(0, 99).map(lambda i: NodeId(f"node-{i}"))
REPLICAS = st.tuples(st.sampled_from(["trainer", "rollout", "reward"]), st.integers(0, 9)).map(
    lambda t: ReplicaId(f"{t[0]}/{t[1]}")
)
PROCESSES = st.builds(ProcessId, node=NODES, pid=st.integers(1, 2**22), start_ticks=COUNTS)
SUSPECTS = st.builds(
    Suspect,
    node=NODES,
    role=TEXT,
    replica=REPLICAS,
    rank=st.none() | st.integers(0, 7),
    incarnation=st.none() | st.integers(1, 9),
    gpu=st.none() | st.integers(0, 7),
    process=st.none() | PROCESSES,
)
EVIDENCE = st.builds(
    Evidence, kind=TEXT, text=TEXT, values=st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False))
)
_statement: dict[str, Any] = {
    "suspects": st.lists(SUSPECTS, max_size=3).map(tuple),
    "fault_class": st.sampled_from(list(FAULTS)),
    "onset": TIMES,
    "detected_at": TIMES,
    "confidence": st.floats(0, 1),
    "because": TEXT,
    "evidence": st.lists(EVIDENCE, max_size=2).map(tuple),
}
FINDINGS = st.builds(Finding, detector=TEXT, **_statement)
DIAGNOSES = st.builds(
    Diagnosis,
    detectors=st.lists(TEXT, max_size=2).map(tuple),
    advice=TEXT,
    settle=TEXT,
    gain_ratio=st.none() | st.floats(1, 100),
    **_statement,
)
TARGETS = st.builds(PlanTarget, replica=REPLICAS, incarnation=st.integers(1, 9), node=NODES)
PLANS = st.builds(
    Plan,
    incident_id=TEXT.map(IncidentId),
    action=st.sampled_from(ActionKind),
    targets=st.lists(TARGETS, max_size=3).map(tuple),
    because=TEXT,
    also_hit=st.lists(TEXT, max_size=2).map(tuple),
)
PROCESS_SAMPLES = st.builds(
    ProcessSample,
    process=PROCESSES,
    role=TEXT,
    replica=REPLICAS,
    rank=st.integers(0, 7),
    incarnation=st.integers(1, 9),
    at=TIMES,
    wall_at=TIMES,
    alive=st.booleans(),
    page_ok=st.booleans(),
    phase=st.sampled_from(Phase).map(str),
    tokens=COUNTS,
    loss=st.floats(allow_infinity=False),
    reward=st.floats(allow_infinity=False),
    healths=COUNTS,
    **{sign: st.floats(allow_infinity=False) for sign in HEALTH_SIGNS},
)
HOST_SAMPLES = st.builds(
    HostSample,
    node=NODES,
    at=TIMES,
    wall_at=TIMES,
    cpu_count=st.integers(1, 512),
    cpu_busy_seconds=TIMES,
    load_1m=TIMES,
    memory_total_bytes=COUNTS,
    memory_available_bytes=COUNTS,
)
GPU_SAMPLES = st.builds(
    GpuSample,
    node=NODES,
    gpu=st.integers(0, 15),
    uuid=TEXT,
    at=TIMES,
    wall_at=TIMES,
    pids=st.lists(st.integers(1, 2**22), max_size=3).map(tuple),
    sm_clock_hertz=st.floats(allow_infinity=False),
    thermal_throttle_seconds=TIMES,
)
AGENT_EVENTS = st.builds(
    AgentEvent,
    seq=COUNTS,
    kind=st.sampled_from(AgentEventKind),
    node=NODES,
    at=TIMES,
    wall_at=TIMES,
    process=st.none() | PROCESSES,
    replica=REPLICAS,
    detail=st.dictionaries(TEXT, TEXT),
)
BATCHES = st.builds(
    SampleBatch,
    node=NODES,
    agent_pid=st.integers(1, 2**22),
    cursor=COUNTS,
    lost=COUNTS,
    at=TIMES,
    wall_at=TIMES,
    processes=st.lists(PROCESS_SAMPLES, max_size=3).map(tuple),
    hosts=st.lists(HOST_SAMPLES, max_size=3).map(tuple),
    gpus=st.lists(GPU_SAMPLES, max_size=3).map(tuple),
)
JSON_BODIES = st.dictionaries(
    TEXT,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
EVENTS = st.builds(
    made_event,
    kind=st.sampled_from(EventKind),
    seq=COUNTS,
    wall_at=TIMES,
    incident_id=st.none() | TEXT,
    caused_by=st.none() | TEXT,
    key=st.none() | TEXT,
    hash=TEXT,
)
