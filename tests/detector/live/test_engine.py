"""What the engine promises as a whole: purity, stored windows, bounded cost, and the predicate 'healthy again'."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.core.config.job import DetectorConfig
from rolecall.core.config.watched import WatchedConfig
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import Phase
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.history import decode, encode
from rolecall.detector.live.monitored_process import (
    GAPS_KEPT,
    GAPS_MIN,
    MonitoredProcess,
    ProgressGaps,
    learned_deadline,
    least_of_long_units,
    single_deadline,
)
from rolecall.detector.live.processes import CLOSED_SECONDS, MonitoredProcesses
from rolecall.detector.live.stages.stage import phase_deadline
from rolecall.testing.synthetic_run import FakeFault, FakeFleet

CONFIG = DetectorConfig(mask_proc_state=True)


def test_the_same_observations_give_the_same_diagnoses_and_state() -> None:
    fleet = FakeFleet(seed=1)
    observations = list(fleet.run(30.0))
    fleet.processes["rollout/1"].fault = FakeFault("stopped")
    observations += fleet.run(8.0)
    stored = [Observation.from_dict(json.loads(json.dumps(o.to_dict()))) for o in observations]
    first, second = LiveDetector(CONFIG), LiveDetector(CONFIG)
    reported = [first.observe(o) for o in observations]
    assert [[d.to_dict() for d in second.observe(o)] for o in stored] == [[d.to_dict() for d in ds] for ds in reported]
    assert first.state() == second.state()
    assert [d.key for d in reported[-1]] == ["hang:rollout/1#1"]


def test_a_window_is_json_covers_its_seconds_and_refuses_another_version() -> None:
    fleet, detector = FakeFleet(seed=2), LiveDetector(CONFIG)
    for o in fleet.run(70.0):
        detector.observe(o)
    window = json.loads(json.dumps(detector.window(), allow_nan=False))
    walls = [o["wall_at"] for o in window["observations"]]
    assert CONFIG.window_seconds / 2 <= walls[-1] - walls[0] <= CONFIG.window_seconds + 1
    assert LiveDetector.replay_window(window)[-1] == []
    with pytest.raises(ValueError, match="version"):
        LiveDetector.replay_window({**window, "version": 99})


def test_learned_state_survives_a_restart_of_the_watcher() -> None:
    fleet, detector = FakeFleet(seed=3), LiveDetector(CONFIG)
    for o in fleet.run(45.0):
        detector.observe(o)
    again = LiveDetector.resumed(CONFIG, None, json.loads(json.dumps(detector.state())))
    gaps = detector.state()["fleet"]["gaps"]
    assert again.state()["fleet"]["gaps"] == gaps and gaps["values"]["v"]
    assert again.state() == detector.state()


def test_loads_are_those_of_the_newest_samples() -> None:
    fleet, detector = FakeFleet(seed=3), LiveDetector(CONFIG)
    newest = {}
    for o in fleet.run(10.0):
        detector.observe(o)
        newest |= {s.replica: s.requests_active for batch in o.batches for s in batch.processes}
    loads = detector.loads()
    assert {r: load.requests for r, load in loads.items()} == newest and any(newest.values())
    assert all(load.available_bytes is not None for load in loads.values())
    assert LiveDetector(CONFIG).loads() == {}
    gone = fleet.kill("rollout/1")
    for o in fleet.run(5.0):
        detector.observe(o)
    assert "rollout/1" not in detector.loads() and not detector.waits("rollout/1", gone.incarnation)
    assert detector.has_worked("rollout/1", gone.incarnation) and not detector.has_worked("rollout/1", 2)


def test_who_waits_for_work() -> None:
    fleet, detector = FakeFleet(seed=3), LiveDetector(CONFIG)
    for o in fleet.run(20.0):
        detector.observe(o)
    phases = {r: p.phase for r, p in fleet.processes.items() if r.startswith(("rollout/", "trainer/", "standby/"))}
    assert {r: detector.waits(r, 1) for r in phases} == {r: phase in ("idle", "wait") for r, phase in phases.items()}
    assert detector.waits("standby/0", 1) and not detector.waits("standby/0", 2)


def test_stored_state_makes_only_the_values_it_knows() -> None:
    with pytest.raises(ValueError, match="unknown tag"):
        decode({"@": "Popen", "args": ["true"]})
    with pytest.raises(TypeError, match="no stored form"):
        encode(object())


def test_an_observation_of_a_run_costs_about_a_millisecond() -> None:
    """The goal is 1 ms on a quiet machine (0.4 ms measured); five times that here, where tests share the CPUs."""
    fleet, detector = FakeFleet(seed=4), LiveDetector(CONFIG)
    seconds = []
    for o in fleet.run(60.0):
        begun = time.thread_time()
        detector.observe(o)
        seconds.append(time.thread_time() - begun)
    assert median(seconds) < 5e-3


def test_deadlines_are_reported_in_words() -> None:
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    for o in fleet.run(45.0):
        detector.observe(o)
    deadline = learned_deadline(detector._fleet.gaps.p99("rollout", "generate"), CONFIG)
    assert deadline.text.startswith("2.5 s = max(2.5, 5 x P99 0.")


@pytest.mark.parametrize(
    ("units", "text"),
    [
        pytest.param([1.0] * 31 + [90.0], "60.0 s = max(2.5, min(60, 5 x P99 90.00))", id="one outlier"),
        pytest.param([70.0] * 20, "210.0 s = 3 x median 70.00, above the ceiling", id="all are long"),
        pytest.param([1.0] * 30 + [90.0, 80.0], "160.0 s = 2 x second longest 80.00, above the ceiling", id="two"),
        pytest.param([30.0] * 30 + [80.0] * 2, "160.0 s = 2 x second longest 80.00, above the ceiling", id="long tail"),
    ],
)
def test_units_may_be_longer_than_the_ceiling_and_one_outlier_raises_no_deadline(units: list[float], text: str) -> None:
    gaps = ProgressGaps()
    for seconds in units:
        gaps.add("trainer", "step", seconds)
    least = least_of_long_units(gaps, "trainer", "step")
    assert learned_deadline(gaps.p99("trainer", "step"), CONFIG, least).text == text


@pytest.mark.parametrize(
    ("floor", "p99", "words"),
    [
        (2.5, 1.0, "5.0 s = max(2.5, 5 x P99 1.00)"),
        (2.5, 18.87, "60.0 s = max(2.5, min(60, 5 x P99 18.87))"),
        (120.0, 18.87, "120.0 s = max(120, min(60, 5 x P99 18.87))"),
    ],
)
def test_no_deadline_is_below_the_floor(floor: float, p99: float, words: str) -> None:
    assert learned_deadline(p99, CONFIG.model_copy(update={"hang_floor_seconds": floor})).text == words


def test_a_role_of_long_units_has_a_long_deadline() -> None:
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    for o in fleet.run(45.0):
        detector.observe(o)
    processes = detector._fleet
    (generating, *_) = [p for p in processes.current() if p.role == "rollout" and p.phase == "generate"]
    assert phase_deadline(processes, generating, CONFIG).seconds < CONFIG.hang_ceiling_seconds
    for _ in range(GAPS_KEPT):
        processes.gaps.add("rollout", "generate", 70.0)
    assert phase_deadline(processes, generating, CONFIG).seconds == 210.0


@given(st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_the_deadline_of_a_replacement_is_three_times_the_longest_start(one: float, other: float) -> None:
    shorter, longer = sorted((one, other))
    deadline = single_deadline(longer, False, CONFIG)
    assert deadline.learned and min(30.0, CONFIG.first_unit_seconds) <= deadline.seconds <= CONFIG.first_unit_seconds
    assert deadline.seconds >= min(3 * longer, CONFIG.first_unit_seconds)
    assert single_deadline(shorter, False, CONFIG).seconds <= deadline.seconds
    short = DetectorConfig(first_unit_seconds=5.0)
    assert single_deadline(longer, False, short).seconds == short.first_unit_seconds, "the setting is the upper bound"


def observed_trainer(seconds: float) -> tuple[MonitoredProcesses, MonitoredProcess]:
    """What a detector knows after so long, and one of its trainers."""
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    for o in fleet.run(seconds):
        detector.observe(o)
    processes = detector._fleet
    return processes, next(p for p in processes.current() if p.role == "trainer")


def test_a_phase_that_was_hardly_seen_has_the_deadline_of_the_longest_other_phase() -> None:
    """As docs/howto/frameworks.md says it of a reward function that returns at once."""
    processes, trainer = observed_trainer(45.0)
    assert trainer.sample is not None
    trainer.sample = replace(trainer.sample, phase=Phase.SCORE)
    trainer.stall.cpu = 0.0  # one that uses CPU has more time
    for _ in range(GAPS_MIN - 1):
        processes.gaps.add("trainer", Phase.SCORE, 0.01)
    longest = processes.gaps.p99_of_role("trainer")
    assert longest is not None and CONFIG.hang_p99_factor * longest > CONFIG.hang_floor_seconds
    assert phase_deadline(processes, trainer, CONFIG) == learned_deadline(longest, CONFIG)
    processes.gaps.add("trainer", Phase.SCORE, 0.01)
    assert phase_deadline(processes, trainer, CONFIG) == learned_deadline(0.01, CONFIG), "eight times: its own"
    processes.gaps = ProgressGaps()
    assert phase_deadline(processes, trainer, CONFIG).seconds == CONFIG.first_unit_seconds, "nothing was seen"


def test_a_phase_that_was_seldom_seen_may_take_three_times_its_longest() -> None:
    """A trainer generates once for several steps: many short steps say nothing of a long generation."""
    watched = WatchedConfig().detector
    processes, trainer = observed_trainer(45.0)
    assert trainer.sample is not None
    trainer.sample = replace(trainer.sample, phase=Phase.SCORE, progress=0)
    processes.gaps.add("trainer", Phase.SCORE, 100.0)
    assert phase_deadline(processes, trainer, CONFIG).seconds == 300.0
    processes.gaps = ProgressGaps()
    assert phase_deadline(processes, trainer, watched).seconds == 1800.0, "nothing was seen"
    processes.gaps.add("trainer", Phase.SCORE, 1.0)
    assert phase_deadline(processes, trainer, watched).seconds == 120.0
    processes.gaps.add("trainer", Phase.SCORE, 100.0)
    deadline = phase_deadline(processes, trainer, watched)
    assert deadline.text == "300.0 s = 3 x longest 100.00, little history yet"


@pytest.mark.parametrize(
    ("progress", "step", "seconds", "expected"),
    [
        pytest.param(0, 0, 900.0, 1800.0, id="the first step of a job"),
        pytest.param(40, 40, 20.0, 120.0, id="a watch that began after 40 short steps"),
        pytest.param(40, 40, 24_000.0, 1800.0, id="a watch that began after 40 steps of ten minutes"),
        pytest.param(40, 9040, 24_000.0, 1800.0, id="the same of a job that went on from a checkpoint"),
        pytest.param(640, 10, 6_000.0, 1800.0, id="after 10 steps of ten minutes, of 64 units each"),
        pytest.param(40, -1, 20.0, 120.0, id="steps are not numbered"),
    ],
)
def test_a_watch_that_has_seen_nothing_goes_by_what_the_process_has_counted(
    progress: int, step: int, seconds: float, expected: float
) -> None:
    processes, trainer = observed_trainer(1.0)
    assert trainer.sample is not None and not trainer.phases_done
    started = ProcessId(node=NodeId("node-1"), pid=1, start_ticks=100_00)
    at = 100.0 + seconds
    trainer.sample = replace(
        trainer.sample, phase=Phase.STEP, process=started, progress=progress, step=step, progress_at=at, at=at
    )
    assert phase_deadline(processes, trainer, WatchedConfig().detector).seconds == expected


@given(st.none() | st.floats(0.0, 1e4), st.integers(0, 99), st.booleans())
def test_the_first_starts_of_a_run_are_not_compared(longest: float | None, incarnation: int, foreign: bool) -> None:
    """Nor those of another launcher."""
    _, trainer = observed_trainer(1.0)
    started = replace(trainer, incarnation=incarnation, foreign=foreign)
    deadline = single_deadline(longest, started.is_first, CONFIG)
    if longest is None or incarnation <= 1 or foreign:
        assert (deadline.seconds, deadline.learned) == (CONFIG.first_unit_seconds, False)


def test_starts_are_learned_by_role_and_do_not_raise_the_deadlines_of_work() -> None:
    fleet, detector = FakeFleet(seed=5), LiveDetector(CONFIG)
    for o in fleet.run(45.0):
        detector.observe(o)
    gaps = detector._fleet.gaps
    for role in ("trainer", "rollout", "standby"):
        longest = gaps.longest(role, Phase.START)
        assert longest is not None and 1.0 < longest < 7.0
    before = gaps.p99_of_role("trainer")
    for _ in range(GAPS_KEPT):
        gaps.add("trainer", Phase.START, 100.0)
    assert gaps.p99_of_role("trainer") == before


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.floats(5.0, 29.0))
def test_a_replacement_that_starts_slowly_is_not_accused(seed: int, seconds: float) -> None:
    """The first starts took 2 to 6 s, this one takes up to 29 s, beside a neighbour that takes both CPUs."""
    fleet, detector = FakeFleet(seed=seed), LiveDetector(CONFIG)
    for o in fleet.run(30.0):
        detector.observe(o)
    fleet.kill("rollout/1")
    detector.observe(fleet.poll())
    detector.forget("rollout/1", 2)
    late = fleet.start("rollout", 1, incarnation=2)
    late.until = fleet.now + seconds
    fleet.burst(seconds, 2.0)
    named = {s.replica for o in fleet.run(seconds) for d in detector.observe(o) for s in d.suspects}
    assert "rollout/1" not in named


def test_what_is_forgotten_and_runs_on_is_watched_again_as_if_it_never_was_forgotten() -> None:
    """However long an action takes until it fails."""
    fleet, detector = FakeFleet(seed=6), LiveDetector(CONFIG)
    for o in fleet.run(45.0):
        detector.observe(o)
    fleet.processes["rollout/1"].fault = FakeFault("stopped")
    before = [d for o in fleet.run(8.0) for d in detector.observe(o)][-1]
    for replica in ("rollout/0", "rollout/1"):
        detector.forget(replica, 2)
    assert not [d for o in fleet.run(CLOSED_SECONDS + 5.0) for d in detector.observe(o)]
    assert not detector.progressing("rollout/0", 1)[0]
    for replica in ("rollout/0", "rollout/1"):
        detector.unforget(replica, 1)
    (again,) = [detector.observe(o) for o in fleet.run(2.0)][-1]
    assert again.key == before.key == "hang:rollout/1#1" and again.onset == pytest.approx(before.onset, abs=1.0)
    assert detector.progressing("rollout/0", 1)[0]
    fleet.processes["rollout/0"].fault = FakeFault("stopped")
    assert "hang:rollout/0#1" in {d.key for o in fleet.run(8.0) for d in detector.observe(o)}


def test_progressing_states_what_is_missing() -> None:
    fleet, detector = FakeFleet(seed=6), LiveDetector(CONFIG)
    for o in fleet.run(45.0):
        detector.observe(o)
    healthy, because = detector.progressing("rollout/1", 1)
    assert healthy and "units of work, last seen in " in because
    fleet.processes["rollout/1"].fault = FakeFault("lock")
    for o in fleet.run(5.0):
        detector.observe(o)
    healthy, because = detector.progressing("rollout/1", 1)
    assert not healthy and "diagnosed with hang" in because
    assert not detector.progressing("standby/0", 1)[0]
    fleet.kill("rollout/2")
    detector.observe(fleet.poll())
    assert "its process exited" in detector.progressing("rollout/2", 1)[1]


def test_it_imports_without_the_heavy_ones_and_quickly() -> None:
    code = (
        "import sys, rolecall.detector.live.engine, rolecall.detector.sources.agents, rolecall.testing.synthetic_run;"
        "print([m for m in ('torch', 'ray', 'vllm', 'sqlalchemy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def _never_sampled(seen: Observation, role: str, phase: str) -> Observation:
    """Without the samples of a phase: it is much shorter than the time between two of them."""
    batches = tuple(
        replace(b, processes=tuple(s for s in b.processes if (s.role, s.phase) != (role, phase))) for b in seen.batches
    )
    return replace(seen, batches=batches)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["lock", "read"])
def test_a_hang_in_a_phase_too_short_to_have_been_sampled_is_found_in_time(kind: str, seed: int) -> None:
    """A reward worker scores for a millisecond, a few times a second, and waits otherwise."""
    fleet, detector = FakeFleet(seed=seed), LiveDetector(CONFIG)
    for o in fleet.run(60.0):
        assert detector.observe(_never_sampled(o, "reward", Phase.SCORE)) == []
    worker = fleet.processes["reward/1"]
    worker.enter(Phase.SCORE, fleet.now, units=8)
    worker.fault = FakeFault(kind)
    reported = [d for o in fleet.run(8.0) for d in detector.observe(o)]
    assert {d.key for d in reported} == {"hang:reward/1#1"}


def _without_seconds(seen: Observation, role: str) -> Observation:
    batches = tuple(
        replace(b, processes=tuple(replace(s, busy_seconds=0.0) if s.role == role else s for s in b.processes))
        for b in seen.batches
    )
    return replace(seen, batches=batches)


def test_units_whose_seconds_are_not_measured_give_no_deadline() -> None:
    """A reward worker that counts its answers and no more. One that takes seconds may be a long one."""
    fleet, detector = FakeFleet(), LiveDetector(CONFIG)
    for o in fleet.run(60.0):
        assert detector.observe(_never_sampled(_without_seconds(o, "reward"), "reward", Phase.SCORE)) == []
    worker = fleet.processes["reward/1"]
    worker.enter(Phase.SCORE, fleet.now, units=8)
    worker.fault = FakeFault("read")
    assert [d for o in fleet.run(8.0) for d in detector.observe(_without_seconds(o, "reward"))] == []
