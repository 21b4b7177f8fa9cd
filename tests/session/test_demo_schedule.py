"""The demo's fault schedule: one fault after the other, each at a seeded moment, only on a whole fleet."""

import pytest

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.cluster.reconcile import place
from rolecall.session.demo import (
    GAP_SECONDS,
    WARM_STEPS,
    DemoStage,
    FaultSchedule,
    View,
    demo_job,
    parse_faults,
    scheduled_faults,
)

KNOWN = {"rollout-kill": ("kill",), "trainer-hang": ("stop", "gil"), "agent-kill": ("kill",)}


def view(now: float, **changes: object) -> View:
    values: dict[str, object] = {
        "now": now,
        "step": WARM_STEPS,
        "whole": True,
        "standbys_ready": True,
        "injected": 0,
        "injecting": False,
        "incident_closed_at": 0.0,
        "injected_at": 0.0,
        "restarted_at": 0.0,
    }
    return View(**{**values, **changes})  # type: ignore[arg-type]


def test_same_seed_same_moments() -> None:
    faults = ("rollout-kill", "trainer-hang:lock")
    assert list(scheduled_faults(7, faults)) == list(scheduled_faults(7, faults))
    assert list(scheduled_faults(7, faults)) != list(scheduled_faults(8, faults))
    assert [(s.kind, s.how) for s in scheduled_faults(7, faults)] == [("rollout-kill", None), ("trainer-hang", "lock")]
    assert all(GAP_SECONDS[0] <= s.gap_seconds <= GAP_SECONDS[1] for s in scheduled_faults(7, faults))


def test_faults_are_injected_only_into_a_healthy_warm_fleet_after_the_previous_recovery() -> None:
    schedule = FaultSchedule(1, ("rollout-kill", "agent-kill"))
    assert schedule.tick(view(0, step=WARM_STEPS - 1)) is None and schedule.stage is DemoStage.WARMING
    assert schedule.tick(view(1, standbys_ready=False)) is None and schedule.stage is DemoStage.WARMING
    assert schedule.tick(view(2)) is None and schedule.stage is DemoStage.WAITING
    assert schedule.tick(view(5, whole=False)) is None
    strike = schedule.tick(view(5 + GAP_SECONDS[1]))
    assert strike is not None and strike.kind == "rollout-kill"
    for not_resolved in ({"injected": 0}, {"injected": 1, "whole": False}, {"injected": 1, "incident_closed_at": 99.0}):
        assert schedule.tick(view(20, injected_at=100.0, **not_resolved)) is None and schedule.stage is DemoStage.STRUCK
    resolved = {"injected": 1, "injected_at": 100.0, "incident_closed_at": 101.0}
    assert schedule.tick(view(20, **resolved, injecting=True)) is None and schedule.stage is DemoStage.STRUCK, (
        "a first suspicion of a fault that lasts was tolerated"
    )
    assert schedule.tick(view(21, **resolved)) is None and schedule.stage is DemoStage.WAITING
    strike = schedule.tick(view(21 + GAP_SECONDS[1], **resolved))
    assert strike is not None and strike.kind == "agent-kill"
    # An agent has no incident of its own: its restart resolves the fault.
    after = {"injected": 2, "injected_at": 200.0, "incident_closed_at": 250.0}
    assert schedule.tick(view(50, **after)) is None and schedule.stage is DemoStage.STRUCK
    schedule.tick(view(51, **after, restarted_at=201.0))
    assert schedule.stage is DemoStage.DONE


def test_an_unresolved_fault_is_given_up() -> None:
    schedule = FaultSchedule(1, ("rollout-kill",))
    schedule.tick(view(0))
    assert schedule.tick(view(GAP_SECONDS[1])) is not None
    schedule.tick(view(10_000, injected=1, whole=False))
    assert schedule.stage is DemoStage.DONE


@pytest.mark.parametrize("text", ["none", "", " , "])
def test_no_faults(text: str) -> None:
    assert parse_faults(text, KNOWN) == ()


def test_unknown_faults_are_all_named() -> None:
    assert parse_faults("trainer-hang:gil, rollout-kill", KNOWN) == ("trainer-hang:gil", "rollout-kill")
    with pytest.raises(ConfigError) as caught:
        parse_faults("rollout-kill,nope,worse", KNOWN)
    assert [p.split(":")[1].strip() for p in caught.value.problems] == ["nope", "worse"]


@pytest.mark.parametrize("text", ["trainer-hang:nope", "trainer-hang:", "rollout-kill:gil"])
def test_a_known_fault_done_in_an_unknown_way_is_named_before_anything_runs(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text}: unknown, known for"):
        parse_faults(f"{text},trainer-hang", KNOWN)


def test_settings_change_the_job_and_bad_ones_are_named() -> None:
    job = demo_job(seed=1, num_steps=5, injection_allowed=True, settings=["detector.mask_proc_state=true", "name=x"])
    assert job.detector.mask_proc_state and job.name == "x" and job.recovery.mode == "act"
    for bad in ("detector.nope=1", "seed=x"):
        with pytest.raises(ConfigError):
            demo_job(seed=1, num_steps=5, injection_allowed=True, settings=[bad])


def test_settings_that_are_none_are_all_named_at_once() -> None:
    wrong = ["novalue", "=3", "seed.deeper=1", "a..b=1", "seed=[", "seed={a: 1, a: 2}", "seed.x=2020-13-45"]
    with pytest.raises(ConfigError) as caught:
        demo_job(seed=1, num_steps=5, injection_allowed=True, settings=["name=x", *wrong])
    assert [p.split(": ", 1)[0] for p in caught.value.problems] == [f"--set {w}".split(": ", 1)[0] for w in wrong]
    assert all("\n" not in p for p in caught.value.problems)


def demo_of(algorithm: str = "", task: str = "", *settings: str) -> JobConfig:
    return demo_job(seed=1, num_steps=5, injection_allowed=True, settings=settings, algorithm=algorithm, task=task)


@pytest.mark.parametrize(
    ("mode", "rollouts", "nodes"), [("", 3, 7), ("async", 3, 7), ("sync", 2, 3), ("semi_sync", 3, 5)]
)
def test_the_demo_of_a_mode_has_the_nodes_that_it_needs(mode: str, rollouts: int, nodes: int) -> None:
    job = demo_job(seed=1, num_steps=5, injection_allowed=True, mode=mode)
    assert (job.runtime.mode, job.roles.rollout, job.runtime.nodes) == (mode or "async", rollouts, nodes)
    assert len(set(place(job).values())) == nodes
    changed = demo_job(
        seed=1, num_steps=5, injection_allowed=True, mode=mode, settings=["runtime.nodes=9", "roles.reward=1"]
    )
    assert (changed.runtime.nodes, changed.roles.rollout, changed.roles.reward) == (9, rollouts, 1)


def test_a_mode_given_twice_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--mode sync: --set gives runtime\.mode=async"):
        demo_job(seed=1, num_steps=5, injection_allowed=True, mode="sync", settings=["runtime.mode=async"])
    with pytest.raises(ConfigError, match=r"runtime\.mode: Input should be"):
        demo_job(seed=1, num_steps=5, injection_allowed=True, mode="weekly")


def test_algorithm_and_task_are_picked_and_continue_when_the_task_is_solved() -> None:
    assert demo_of().learns == "grpo on digit_parity"
    assert demo_of("tppo", "long_addition", "algorithm.window_tokens=4").learns == "tppo on long_addition"
    assert demo_of("dapo").algorithm.at_refill_limit == "take"
    assert demo_of("", "", "algorithm.name=dapo").algorithm.at_refill_limit == "take"
    assert demo_of("dapo", "", "algorithm.at_refill_limit=fail").algorithm.at_refill_limit == "fail"
    assert demo_of("dapo", "", "algorithm.name=dapo").algorithm.name == "dapo"
    with pytest.raises(ConfigError, match=r"--algorithm dapo: --set gives algorithm\.name=ppo"):
        demo_of("dapo", "", "algorithm.name=ppo")
    with pytest.raises(
        ConfigError, match=r"task\.name: Input should be 'digit_parity' or 'long_addition', got 'chess'"
    ):
        demo_of("", "chess")
    with pytest.raises(ConfigError, match="algorithm"):
        demo_of("dapo", "", "algorithm=3")
