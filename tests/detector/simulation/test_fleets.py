"""Whole runs of a synthetic fleet: nothing is said while it is healthy, and each fault is named rightly and in time.

Faults are reported with the process state masked. `python -m pytest tests/detector/simulation/test_fleets.py -k healthy`
prints the seed of a run that fails.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis
from rolecall.core.telemetry import AgentEventKind
from rolecall.detector.live.engine import LiveDetector
from rolecall.testing.synthetic_run import HANGS, FakeFault, FakeFleet
from tests.support import some

ROLES = {"trainer": 2, "rollout": 3, "reward": 2, "controller": 1}
WARM_SECONDS = 45.0
"""By then every phase was learned: 10 steps."""


@dataclass
class Run:
    fleet: FakeFleet
    detector: LiveDetector
    reported: dict[str, tuple[float, Diagnosis]]

    def go(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        for observation in self.fleet.run(seconds):
            for d in self.detector.observe(observation):
                self.reported.setdefault(d.key, (self.fleet.now, d))
            if until():
                return

    def sentences(self) -> str:
        return f"seed {self.fleet.seed}: " + "\n".join(f"{at:.1f}: {d.because}" for at, d in self.reported.values())


def started(seed: int, warm_seconds: float = WARM_SECONDS, **settings: object) -> Run:
    fleet = FakeFleet(seed=seed, **settings)  # type: ignore[arg-type]
    run = Run(fleet, LiveDetector(DetectorConfig(mask_proc_state=True), ROLES), {})
    run.go(warm_seconds + seed % 7 / 7)
    assert not run.reported, run.sentences()
    return run


HEALTHY = [
    {"seed": 0},
    {"seed": 1, "microbatch_seconds": 0.05, "bursts_per_hour": 60.0},
    {"seed": 2, "microbatch_seconds": 0.5, "tokens_reported": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", some([(s,) for s in HEALTHY], [(HEALTHY[1],)]), ids=lambda s: f"seed{s['seed']}")
def test_twenty_healthy_minutes_give_no_finding(settings: dict[str, float]) -> None:
    started(warm_seconds=1200.0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_five_healthy_minutes_give_no_finding(seed: int) -> None:
    run = started(100 + seed, warm_seconds=300.0, bursts_per_hour=120.0)
    assert run.fleet.step > 20, "the fleet worked"


@pytest.mark.parametrize("target", ["trainer/1", "rollout/0"])
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_process_is_named_within_a_quarter_second(seed: int, target: str) -> None:
    run = started(seed)
    begun = run.fleet.now
    run.fleet.kill(target)
    run.go(1.0, until=lambda: bool(run.reported))
    at, diagnosis = run.reported[f"crash:{target}#1"]
    assert at - begun < 0.25
    assert diagnosis.because.startswith(f"{target} (")


@pytest.mark.parametrize("target", ["trainer/1", "rollout/0", "controller/0"])
@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_of_each_kind_is_named_within_five_seconds(kind: str, target: str) -> None:
    run = started(3)
    if target.startswith("trainer"):  # in the middle of a step
        run.go(30.0, until=lambda: run.fleet.processes[target].phase == "compute")
    begun = run.fleet.now
    run.fleet.processes[target].fault = FakeFault(kind)
    run.go(20.0, until=lambda: bool(run.reported))
    assert list(run.reported) == [f"hang:{target}#1"], run.sentences()
    assert 2.0 < run.reported[f"hang:{target}#1"][0] - begun < 5.0, run.sentences()
    run.go(5.0)
    assert list(run.reported) == [f"hang:{target}#1"], f"those who wait are not named\n{run.sentences()}"


@pytest.mark.parametrize("kind", ["duty_cycle", "cpu_quota", "unit_delay"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_slow_rollout_is_named_within_thirty_seconds(kind: str, seed: int) -> None:
    run = started(seed)
    begun = run.fleet.now
    run.fleet.processes["rollout/1"].fault = FakeFault(kind)
    run.go(30.0, until=lambda: bool(run.reported))
    assert list(run.reported) == ["slow:rollout/1#1"], run.sentences()
    at, diagnosis = run.reported["slow:rollout/1#1"]
    assert at - begun < 30.0
    assert diagnosis.gain_ratio is not None and diagnosis.gain_ratio > 1.5


def test_a_slow_trainer_is_named_though_its_only_peer_has_no_majority() -> None:
    run = started(4)
    run.fleet.processes["trainer/0"].fault = FakeFault("duty_cycle")
    run.go(90.0, until=lambda: bool(run.reported))
    assert list(run.reported) == ["slow:trainer/0#1"], run.sentences()


def test_a_single_rollout_is_compared_with_its_own_past() -> None:
    run = started(5, num_rollouts=1)
    run.fleet.processes["rollout/0"].fault = FakeFault("unit_delay")
    run.go(40.0, until=lambda: bool(run.reported))
    assert list(run.reported) == ["slow:rollout/0#1"], run.sentences()
    assert "its own history (no peer" in run.reported["slow:rollout/0#1"][1].because


def test_a_host_that_becomes_slower_as_a_whole_is_no_ones_fault() -> None:
    run = started(6)
    run.fleet.load.slowdown = 3.0
    run.go(120.0)
    assert not run.reported, run.sentences()


def test_a_neighbour_that_eats_the_cpus_for_ten_seconds_is_no_ones_fault() -> None:
    run = started(7)
    for _ in range(4):
        run.fleet.burst(10.0, cpus=4.0)
        run.go(25.0)
    assert not run.reported, run.sentences()


def test_a_rollout_is_replaced_by_a_standby_and_progresses() -> None:
    run = started(8)
    run.fleet.kill("rollout/2")
    run.go(1.0, until=lambda: bool(run.reported))
    run.detector.forget("rollout/2", 2)
    assert run.detector.progressing("rollout/2", 2) == (
        False,
        "rollout/2: no process of incarnation 2 or later has registered",
    )
    run.fleet.promote("standby/0", "rollout/2", 2)
    run.go(0.5)
    healthy, because = run.detector.progressing("rollout/2", 2)
    assert not healthy and "no unit of work finished yet" in because
    run.go(20.0, until=lambda: run.detector.progressing("rollout/2", 2)[0])
    assert run.detector.progressing("rollout/2", 2)[0]
    assert not run.detector.progressing("rollout/2", 3)[0]
    run.go(30.0)
    assert list(run.reported) == ["crash:rollout/2#1"], run.sentences()


def test_a_hung_trainer_is_killed_and_replaced_without_a_second_diagnosis() -> None:
    run = started(9)
    run.go(30.0, until=lambda: run.fleet.processes["trainer/0"].phase == "compute")
    run.fleet.processes["trainer/0"].fault = FakeFault("lock")
    run.go(10.0, until=lambda: bool(run.reported))
    run.detector.forget("trainer/0", 2)
    run.fleet.kill("trainer/0")
    run.fleet.start("trainer", 0, incarnation=2)
    run.go(60.0)
    assert list(run.reported) == ["hang:trainer/0#1"], run.sentences()
    assert run.detector.progressing("trainer/0", 2)[0]


def test_two_faults_at_once_are_two_diagnoses() -> None:
    run = started(10)
    run.fleet.processes["trainer/1"].fault = FakeFault("stopped")
    run.fleet.kill("rollout/0")
    run.go(8.0)
    assert sorted(run.reported) == ["crash:rollout/0#1", "hang:trainer/1#1"], run.sentences()


def test_two_equal_trainers_are_never_separated_by_chance() -> None:
    run = started(11, warm_seconds=240.0, microbatch_seconds=0.5, tokens_reported=False)
    assert not run.reported


def test_one_exception_on_all_trainers_names_no_suspect() -> None:
    run = started(12)
    for replica in ("trainer/0", "trainer/1"):
        p = run.fleet.processes[replica]
        detail = {"type": "ValueError", "message": "x", "fingerprint": "f", "step": str(p.step)}
        run.fleet.event(AgentEventKind.EXCEPTION, p, **detail)
        run.fleet.kill(replica, signal="")
        run.go(0.5)
    run.go(5.0)
    assert list(run.reported) == ["user_code:trainer:ValueError:f"], run.sentences()
    assert run.reported["user_code:trainer:ValueError:f"][1].suspects == ()


def test_a_window_replays_to_the_diagnosis_that_it_led_to() -> None:
    run = started(13)
    run.fleet.processes["rollout/1"].fault = FakeFault("lock")
    run.go(10.0, until=lambda: bool(run.reported))
    replayed = LiveDetector.replay_window(run.detector.window())
    assert [d.to_dict() for d in replayed[-1]] == [d.to_dict() for _, d in run.reported.values()]
