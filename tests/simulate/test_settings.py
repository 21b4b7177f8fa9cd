"""Settings of a simulation: mistakes, sizes, times that grow with the fleet."""

from pathlib import Path

import pytest

from rolecall.core.errors import ConfigError
from rolecall.simulate.settings import Mode, ScaledSeconds, SimulationSettings, load_settings, parse_settings, resized


def test_every_mistake_is_reported_with_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({"days": -1, "faults": {"machine_share": 2}, "gpu": 8})
    assert {p.partition(":")[0] for p in caught.value.problems} == {"days", "faults.machine_share", "gpu"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"mode": "sync"}, "rollout.replicas: in sync mode all GPUs belong to trainer: 0 is needed"),
        ({"rollout": {"replicas": 0}}, "rollout.replicas: async needs at least one"),
        ({"trainer": {"replicas": 0}}, "trainer.replicas: at least one is needed"),
        ({"arms": {}}, "arms: at least one is needed"),
        ({"faults": {"burst_sizes": {}}}, "faults.burst_sizes: at least one is needed"),
        ([], "(top): expected a mapping, got list"),
        ({"trainer": 5}, "trainer: expected a mapping, got 5"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(value)
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize(
    ("rates", "number"),
    [
        ({"trainer_per_gpu_hour": 1}, "1,474,560"),
        ({"rollout_per_gpu_hour": 1}, "1,474,560"),
        ({"false_alarms_per_1000_machine_days": 1e8}, "1,536,000,000"),
    ],
)
def test_more_faults_than_can_be_simulated_are_refused(rates: dict[str, float], number: str) -> None:
    with pytest.raises(ConfigError, match=rf"^faults: about {number} .*, 1,000,000 can be simulated: lower "):
        parse_settings({"faults": {"trainer_per_gpu_hour": 0, "rollout_per_gpu_hour": 0, **rates}})


def test_a_file_names_its_own_arms(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "days: 3\narms:\n  mine: {fault_domain: replica, restart_trainer: 30, reconnect: {trainer: 1, rollout: 1}}\n"
    )
    found = load_settings(path)
    assert list(found.arms) == ["mine"] and found.arms["mine"].restart_trainer.of(10**6) == 30.0


def test_a_time_grows_with_each_doubling() -> None:
    time = ScaledSeconds(seconds=40.0, at_gpus=512, per_doubling=18.0)
    assert [time.of(n) for n in (8, 512, 1024, 4096)] == [40.0, 40.0, 58.0, 94.0]


@pytest.mark.parametrize("gpus", [128, 4096, 100_000])
def test_a_fleet_of_another_size_has_the_same_proportion(gpus: int) -> None:
    found = resized(SimulationSettings(), gpus)
    assert gpus - 64 <= found.gpus <= gpus
    assert found.trainer.gpus == pytest.approx(gpus / 2, abs=64)


def test_modes_can_be_changed_both_ways() -> None:
    sync = resized(SimulationSettings(), mode=Mode.SYNC)
    assert (sync.gpus, sync.rollout.replicas) == (4096, 0)
    back = resized(sync, mode=Mode.ASYNC)
    assert back.gpus == 4096 and back.rollout.replicas > 0


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus: 70 are too few: one replica of each role needs 72"):
        resized(SimulationSettings(), 70)


def test_large_rollout_replicas_leave_room_for_the_trainers() -> None:
    wide = parse_settings(
        {"trainer": {"replicas": 8, "gpus_per_replica": 1}, "rollout": {"replicas": 1, "gpus_per_replica": 8}}
    )
    found = resized(wide, 12)
    assert (found.trainer.replicas, found.rollout.replicas) == (4, 1)
