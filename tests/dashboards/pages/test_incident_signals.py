"""The suspect's series against its peers', from windows of the real detector and from made-up ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.diagnosis import Evidence, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.journal.events import EventKind
from rolecall.core.telemetry import GpuSample, ProcessSample, SampleBatch
from rolecall.dashboards.pages.incidents.cache import page_model
from rolecall.dashboards.pages.incidents.signals import (
    STANDING,
    Signal,
    from_window,
    kinds_for,
    of_commits,
    of_the_policy,
)
from rolecall.detector.base.observation import Observation
from rolecall.testing.recovery_world import diagnosis
from tests.dashboards.incident_cases import found, material_of, world_of
from tests.events import made_event

F = FaultClass


def sample(replica: str, second: int, *, node: str = "n", **more: Any) -> ProcessSample:
    fixed: dict[str, Any] = {"progress": 10 * second, "phase": "generate", "progress_at": float(second)}
    return ProcessSample(
        process=ProcessId(node=NodeId(node), pid=int(replica[-1]) + 1, start_ticks=1),
        role=replica.partition("/")[0],
        replica=replica,
        rank=0,
        incarnation=1,
        at=float(second),
        wall_at=1000.0 + second,
        alive=True,
        page_ok=True,
        **{**fixed, **more},
    )


def window(samples: list[ProcessSample], *, offset: float = 0.0, gpus: tuple[GpuSample, ...] = ()) -> dict[str, Any]:
    seconds = sorted({s.wall_at for s in samples})
    observations = []
    for at in seconds:
        by_node: dict[str, list[ProcessSample]] = {}
        for s in samples:
            if s.wall_at == at:
                by_node.setdefault(s.process.node, []).append(s)
        batches = tuple(
            SampleBatch(node=NodeId(n), agent_pid=1, cursor=1, lost=0, at=at, wall_at=at, processes=tuple(found), hosts=(),
                        gpus=tuple(g for g in gpus if g.wall_at == at))
            for n, found in by_node.items()
        )  # fmt: skip
        observations.append(Observation(wall_at=at + offset, batches=batches).to_dict())
    return {"observations": observations}


def signal(signals: tuple[Signal, ...], key: str) -> Signal:
    (one,) = [s for s in signals if s.key == key]
    return one


def test_a_hung_trainer_stands_still_beyond_its_deadline_while_its_peer_does_not_count() -> None:
    d, stored = found("stopped", "trainer/1")
    reported = from_window(stored, d)
    standing = signal(reported.signals, "standing")
    assert standing.limit is not None and standing.limit.label == "deadline"
    assert [line.name for line in standing.lines] == ["trainer/1#1 (node-trainer-1)"]
    assert standing.num_peers == 1
    work = signal(reported.signals, "work")
    assert work.lines[0].points[-1][1] == 0.0
    assert reported.missing == "" and "snapshots over" in reported.source


def test_a_slow_rollout_takes_longer_than_the_band_of_its_peers() -> None:
    d, stored = found("duty_cycle", "rollout/1")
    per_unit = signal(from_window(stored, d).signals, "per_unit")
    last = [v for at, v in per_unit.lines[0].points if at > d.onset]
    peers = [high for at, _, _, high in per_unit.band if at > d.onset]
    assert sum(last) / len(last) > sum(peers) / len(peers)
    assert per_unit.num_peers == 2


def test_rates_are_per_second_and_the_band_is_min_median_max() -> None:
    samples = [sample(f"rollout/{n}", t, progress=(n + 1) * t) for n in range(4) for t in range(10)]
    reported = from_window(window(samples), diagnosis(F.CRASH, ("rollout/0", 1)))
    work = signal(reported.signals, "work")
    assert {round(v, 6) for _, v in work.lines[0].points} == {1.0}
    assert {row[1:] for row in work.band} == {(2.0, 3.0, 4.0)}


def test_node_clocks_are_brought_to_the_watch() -> None:
    samples = [sample("rollout/0", t) for t in range(5)]
    reported = from_window(window(samples, offset=7.0), diagnosis(F.CRASH, ("rollout/0", 1)))
    assert signal(reported.signals, "work").lines[0].points[0][0] == pytest.approx(1008.0)


def test_one_that_began_again_has_no_negative_rate() -> None:
    samples = [sample("rollout/0", t, progress=10 if t < 3 else 1) for t in range(6)]
    reported = from_window(
        window([*samples, *(sample("rollout/1", t) for t in range(6))]), diagnosis(F.CRASH, ("rollout/0", 1))
    )
    assert all(v >= 0 for _, v in signal(reported.signals, "work").lines[0].points)


def test_a_lost_node_is_all_who_worked_there() -> None:
    samples = [sample(f"rollout/{n}", t, node=f"node-{n % 2}") for n in range(4) for t in range(5)]
    d = replace(diagnosis(F.NODE_LOST), suspects=(Suspect(node=NodeId("node-1")),))
    work = signal(from_window(window(samples), d).signals, "work")
    assert [line.name for line in work.lines] == ["rollout/1#1 (node-1)", "rollout/3#1 (node-1)"]
    assert work.num_peers == 2


def test_metrics_that_the_evidence_names_come_first() -> None:
    evidence = (Evidence(kind="metric:rolecall_process_cpu_ratio", text=""), Evidence(kind="metric:unknown", text=""))
    d = diagnosis(F.SLOW, ("rollout/0", 1), evidence=evidence)
    assert [k.key for k in kinds_for(d)][:2] == ["cpu", "per_unit"]


def test_gpus_are_drawn_and_counted() -> None:
    samples = [sample(f"rollout/{n}", t) for n in range(2) for t in range(5)]
    gpus = tuple(
        GpuSample(
            node=NodeId("n"), gpu=g, at=float(t), wall_at=1000.0 + t, pids=(1 + g // 2,), sm_clock_hertz=1e9 * (g + 1)
        )
        for g in range(4)
        for t in range(5)
    )
    evidence = (Evidence(kind="metric:rolecall_gpu_sm_clock_hertz", text=""),)
    reported = from_window(window(samples, gpus=gpus), diagnosis(F.GPU, ("rollout/0", 1), evidence=evidence))
    clock = reported.signals[0]
    assert clock.unit == "hertz"
    assert clock.lines[0].points[0][1] == pytest.approx(1.5e9)
    assert reported.gpus_per_process == 2.0


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({}, "cannot be read (KeyError"),
        ({"observations": 7}, "cannot be read (TypeError"),
        ({"observations": [{"batches": [{"processes": [{}]}]}]}, "cannot be read"),
        ({"observations": []}, "has no process samples"),
    ],
)
def test_a_damaged_window_says_so(stored: dict[str, Any], words: str) -> None:
    reported = from_window(stored, diagnosis(F.CRASH, ("rollout/0", 1)))
    assert not reported.signals
    assert words in reported.missing


def test_a_window_without_the_suspect_says_so() -> None:
    reported = from_window(window([sample("rollout/1", 1)]), diagnosis(F.CRASH, ("rollout/0", 1)))
    assert reported.missing == "the stored window has no samples of rollout/0"


def test_the_pace_of_the_run_is_the_time_between_commits() -> None:
    events = [made_event(seq=n, kind=EventKind.STEP_COMMITTED, wall_at=at) for n, at in enumerate((1.0, 3.0, 9.0))]
    pace = of_commits(events)
    assert pace is not None and pace.of_run
    assert pace.lines[0].points == ((3.0, 2.0), (9.0, 6.0))
    assert of_commits(events[:2]) is None
    assert STANDING.needs_before is False


def test_of_a_collapse_the_policys_own_course_is_drawn(tmp_path: Path) -> None:
    drawn = page_model(material_of(world_of("collapsed", tmp_path))).run
    assert all(s.of_run for s in drawn)
    by_key = {s.key: [v for _, v in s.lines[0].points] for s in drawn}
    assert list(by_key) == ["reward", "entropy", "response_length", "kl_sampler", "log_ratio_max", "commits"]
    assert by_key["reward"][0] == 0.9 and by_key["reward"][-1] == 0.2
    assert by_key["entropy"][-1] == 0.02 and by_key["response_length"][-1] == 1.5


def test_of_other_faults_it_is_not(tmp_path: Path) -> None:
    assert {s.key for s in page_model(material_of(world_of("user code", tmp_path))).run} <= {"commits"}


def test_a_journal_of_before_there_were_signs_has_the_reward_alone() -> None:
    bodies = ({"reward": 0.5}, {"reward": None}, {"reward": 0.25, "health": {"entropy": "nan"}})
    events = [made_event(seq=n, kind=EventKind.STEP_COMMITTED, wall_at=float(n), body=b) for n, b in enumerate(bodies)]
    (reward,) = of_the_policy(events)
    assert reward.lines[0].points == ((0.0, 0.5), (2.0, 0.25))
