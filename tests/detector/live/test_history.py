"""Windows: the state with which one begins is the state that there was, though no one copied it then."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.core.config.job import DetectorConfig
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live import history
from rolecall.detector.live.engine import LiveDetector
from rolecall.testing.synthetic_run import FakeFault, FakeFleet

CONFIG = DetectorConfig(mask_proc_state=True)


def plain(state: dict[str, Any]) -> Any:
    """As it is stored; in which order subjects stand says nothing."""
    found = json.loads(json.dumps(state))
    return {**found, "subjects": sorted(found["subjects"], key=lambda s: (s["replica"], s["rank"], s["incarnation"]))}


@pytest.mark.parametrize("seed", range(3))
def test_a_window_begins_with_the_state_of_its_first_observation(seed: int) -> None:
    fleet, detector = FakeFleet(seed=seed), LiveDetector(CONFIG)
    before: dict[float, Any] = {}  # by the time of the observation that follows
    num_windows, faults = set(), iter(("stopped", "stopped"))
    for n, o in enumerate(fleet.run(100.0)):
        before[o.wall_at] = detector.state()
        detector.observe(o)
        if n in (170, 330):
            fleet.processes[f"rollout/{n % 2}"].fault = FakeFault(next(faults))
        if n == 350:
            detector.forget("rollout/0", 2)  # closes one between two observations
        if n % 20 == 19:
            window = detector.window()
            first = window["observations"][0]["wall_at"]
            assert plain(window["start"]) == plain(before[first])
            num_windows.add(first)
    assert len(num_windows) > 4


def test_the_window_of_a_large_fleet_is_narrowed_and_replays_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "SUBJECTS_WHOLE_MAX", 2)
    monkeypatch.setattr(history, "PEERS_KEPT", 1)
    fleet, detector = FakeFleet(seed=1), LiveDetector(CONFIG)
    for o in fleet.run(30.0):
        detector.observe(o)
    fleet.processes["rollout/1"].fault = FakeFault("stopped")
    for o in fleet.run(8.0):
        standing = detector.observe(o)
    (reported,) = standing
    whole = detector.window(reported.suspects)
    there = {s["replica"] for s in whole["start"]["subjects"]}
    assert "rollout/1" in there and len(there) < len(fleet.processes)
    assert {p["replica"] for o in whole["observations"] for b in o["batches"] for p in b["processes"]} <= there
    assert [d.key for d in LiveDetector.replay_window(json.loads(json.dumps(whole)))[-1]] == [reported.key]


def test_many_samples_make_a_window_shorter_not_the_memory_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SAMPLES_KEPT_MAX", 100)
    fleet, detector = FakeFleet(seed=2), LiveDetector(CONFIG)
    for o in fleet.run(20.0):
        detector.observe(o)
    kept = sum(len(b["processes"]) for o in detector.window()["observations"] for b in o["batches"])
    assert 50 <= kept <= 120


def test_state_in_parts_equals_the_state() -> None:
    fleet, detector = FakeFleet(seed=3), LiveDetector(CONFIG)
    for o in fleet.run(45.0):
        detector.observe(o)
    *waiting, text = detector.state_in_parts(2)
    assert waiting and not any(waiting) and text is not None
    assert json.loads(text) == json.loads(json.dumps(detector.state()))
    (only,) = detector.state_in_parts(1000)
    assert only is not None and json.loads(only) == json.loads(text)


WHO = [("rollout/0", 10), ("rollout/1", 11), ("standby/0", 12), ("trainer/0", 13)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["sample", "dead", "exited", "finished", "registered", "forget", "promoted", "wait", "found", "left"]
        ),
        st.integers(0, len(WHO) - 1),
        st.integers(1, 3),
        st.sampled_from([0.5, 1.5, 130.0]),
    ),
    min_size=3,
    max_size=40,
)


def observation(step: tuple[str, int, int, float], wall: float, seq: int) -> Observation:
    what, n, incarnation, _ = step
    replica, pid = WHO[n]
    if what == "promoted":
        replica = "rollout/1"
    role = replica.partition("/")[0]
    process = ProcessId(node=NodeId("node-1"), pid=pid + 100 * incarnation, start_ticks=1)
    found = what == "found"  # a process that reports nothing
    if what in ("sample", "dead", "promoted", "found"):
        sample = ProcessSample(
            process=process,
            role=role,
            replica=replica,
            rank=0,
            incarnation=0 if found else incarnation,
            at=wall,
            wall_at=wall,
            alive=what != "dead",
            page_ok=True,
            phase="" if found else "compute",
            progress=seq,
            work_units=seq,
        )
        head = {"node": NodeId("node-1"), "agent_pid": 1, "cursor": seq, "lost": 0, "at": wall, "wall_at": wall}
        return Observation(wall_at=wall, batches=(SampleBatch(**head, processes=(sample,), hosts=()),))  # type: ignore[arg-type]
    if what in ("wait", "forget", "left"):
        return Observation(wall_at=wall, left=("node-1",) if what == "left" else ())
    event = AgentEvent(
        seq=seq,
        kind=AgentEventKind(what),
        node=NodeId("node-1"),
        at=wall,
        wall_at=wall,
        process=None if seq % 3 == 0 else process,  # some registrations name no one yet
        role=role,
        replica=replica,
        incarnation=incarnation,
    )
    return Observation(wall_at=wall, events=(event,))


@given(STEPS)
def test_whatever_happens_to_subjects_a_window_begins_with_them_as_they_were(
    steps: list[tuple[str, int, int, float]],
) -> None:
    detector, wall, before = LiveDetector(CONFIG), 1000.0, {}
    for seq, step in enumerate(steps, 1):
        wall += step[3]
        before[wall] = plain(detector.state())
        detector.observe(observation(step, wall, seq))
        if step[0] == "forget":
            detector.forget(WHO[step[1]][0], step[2])
        window = detector.window()
        assert plain(window["start"]) == before[window["observations"][0]["wall_at"]]


STAGES = Path(history.__file__).parent / "stages"


@pytest.mark.parametrize("path", sorted(STAGES.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_stage_keeps_has_a_stored_form(path: Path) -> None:
    """Else the detector ends with the first half of a window, and its watch finds nothing any more."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    kept = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "self.state"
        for name in ast.walk(node.annotation)
        if isinstance(name, ast.Name)
    }
    assert kept & own <= history.PLAIN.keys() | history.OWN.keys()
