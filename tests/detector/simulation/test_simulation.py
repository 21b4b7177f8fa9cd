"""The simulated fleet is what it says: sizes, mixes, effects, noise, gaps; and it is written as a recording."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rolecall.core.errors import CommandRefused
from rolecall.detector.simulation import fleet as simulation
from rolecall.detector.simulation.fleet import (
    FAULT_KINDS,
    METRICS,
    Onset,
    SecondaryFault,
    SimulatedFault,
    SimulatedTask,
    chunks,
    fleet,
    panel,
)
from rolecall.detector.sources import recording
from rolecall.diagnose.simulate import simulate_fleet

SIGMA = np.array([simulation.SIGMA_OF_LEVEL * m.level for m in METRICS], dtype=np.float64)


@pytest.fixture(scope="module")
def healthy() -> SimulatedTask:
    return SimulatedTask(seed=3, index=0, mix="healthy", num_machines=64, num_ticks=1200, fault=None)


@pytest.fixture(scope="module")
def seen(healthy: SimulatedTask) -> simulation.Panel:
    return panel(healthy)


def test_a_fleet_has_the_published_sizes_mixes_effects_and_onsets() -> None:
    tasks = fleet(seed=1, num_tasks=300, num_healthy=20)
    faults = [t.fault for t in tasks if t.fault]
    assert len(faults) == 300
    assert all(t.fault is None for t in tasks[300:])
    sizes = sorted(t.num_machines for t in tasks[:300])
    assert sizes[0] == 4
    assert sizes[-1] > 1400
    assert sizes[150] == pytest.approx(np.sqrt(4 * 1500), rel=0.1), "log-uniform"
    effects = np.log([f.effect_sigmas for f in faults])
    counts = np.histogram(effects, np.linspace(0, np.log(20), 7))[0]
    assert np.abs(counts - 50).max() <= 1, "log-uniform from 1 to 20"
    assert Counter(f.how for f in faults) == dict.fromkeys(Onset, 100)
    assert {len(f.metrics) for f in faults} == {1, 2, 3}
    for mix in ("production", "evaluation"):
        found = Counter(t.fault.kind for t in tasks if t.fault and t.mix == mix)
        for kind in FAULT_KINDS:
            assert abs(found[kind.name] - 150 * getattr(kind, f"{mix}_share")) < 1.5, (mix, kind.name)


def test_the_shares_of_both_mixes_make_one() -> None:
    for mix in ("production", "evaluation"):
        assert sum(getattr(k, f"{mix}_share") for k in FAULT_KINDS) == pytest.approx(1.0, abs=1e-9)


def test_faults_last_as_in_minder_after_a_healthy_lead_in() -> None:
    tasks = [t for t in fleet(seed=2, num_tasks=200, num_healthy=0, num_machines_max=40)]
    faults = [t.fault for t in tasks if t.fault]
    longer = np.mean([f.end - f.onset > 300 for f in faults])
    assert 0.8 < longer < 0.97
    for task, fault in zip(tasks, faults, strict=True):
        assert fault.onset - simulation.EPOCH_SECONDS >= simulation.LEAD_IN_SECONDS
        assert simulation.EPOCH_SECONDS + task.num_ticks >= fault.end + simulation.AFTERMATH_SECONDS
        assert (1 + len(fault.victims)) * 3 <= max(task.num_machines, 3), "the hit ones are few among their peers"
        assert fault.machine not in {v.machine for v in fault.victims}
        assert all(v.share < 1 and v.delay_seconds > 0 for v in fault.victims)


def test_a_seed_means_the_same_fleet_and_another_one_another() -> None:
    task = fleet(seed=5, num_tasks=1, num_healthy=0, num_machines_max=12)[0]
    again = fleet(seed=5, num_tasks=1, num_healthy=0, num_machines_max=12)[0]
    assert task == again
    first = next(chunks(task))
    assert np.array_equal(first.values, next(chunks(again)).values, equal_nan=True)
    assert first.values.dtype == np.float32
    assert not np.array_equal(first.values, next(chunks(replace(task, seed=6))).values, equal_nan=True)


def test_a_task_is_one_panel_with_even_ticks(healthy: SimulatedTask, seen: simulation.Panel) -> None:
    assert seen.values.shape == (len(METRICS), healthy.num_ticks, healthy.num_machines) == (21, 1200, 64)
    assert np.array_equal(np.diff(seen.at), np.ones(healthy.num_ticks - 1))
    assert not np.isinf(seen.values).any()


@pytest.mark.parametrize("how", list(Onset))
def test_a_fault_adds_its_effect_and_nothing_else(how: Onset) -> None:
    onset = simulation.EPOCH_SECONDS + 100
    victim = SecondaryFault(machine=5, share=0.25, delay_seconds=10.0)
    fault = SimulatedFault(
        kind="other",
        machine=2,
        onset=onset,
        end=onset + 200,
        effect_sigmas=8.0,
        metrics=(0, 3),
        how=how,
        victims=(victim,),
    )
    task = SimulatedTask(seed=1, index=7, mix="production", num_machines=9, num_ticks=400, fault=fault)
    added = panel(task).values.astype(np.float64) - panel(replace(task, fault=None)).values
    added = np.nan_to_num(added / SIGMA[:, None, None])
    hit = np.zeros_like(added, dtype=bool)
    hit[[0, 3], 100:300, 2] = hit[[0, 3], 110:300, 5] = True
    assert np.abs(added[~hit]).max() < 1e-3
    whole = {Onset.STEP: (1.0, 1.0), Onset.RAMP: (0.5, 1.0), Onset.INTERMITTENT: (0.5, 0.5)}[how]
    for m in (0, 3):
        early, late = added[m, 100:160, 2], added[m, 240:300, 2]
        for part, share in zip((early, late), whole, strict=True):
            # 2 % of the samples are missing, and read 0 here.
            assert np.mean(part) == pytest.approx(METRICS[m].sign * 8.0 * share, rel=0.1)
        assert np.mean(added[m, 240:300, 5]) == pytest.approx(0.25 * np.mean(late), rel=0.25)


def test_an_intermittent_fault_is_there_for_half_of_the_time_from_its_onset_on() -> None:
    since = np.arange(-10.0, 100.0)
    there = simulation.envelope(Onset.INTERMITTENT, since, 60.0)
    assert there[since < 0].max() == there[since >= 60].max() == 0.0
    assert there[(since >= 0) & (since < 60)].reshape(4, 15).tolist() == [[1.0] * 15, [0.0] * 15] * 2


def test_the_peer_standard_deviation_is_that_of_the_healthy_residual(seen: simulation.Panel) -> None:
    """Over peers and time, offsets taken out. Skewed clocks at the edges of a step add some to what noise makes."""
    values = seen.values.astype(np.float64)
    residual = values - np.nanmedian(values, axis=2, keepdims=True)
    residual -= np.nanmean(residual, axis=1, keepdims=True)
    ratio = np.sqrt(np.nanmean(residual**2, axis=(1, 2))) / SIGMA
    assert 0.95 < np.median(ratio) < 1.2
    assert (ratio > 0.7).all() and (ratio < 1.6).all(), ratio.round(2)


def test_what_all_machines_do_alike_is_large_and_their_own_autocorrelated_with_heavy_tails(
    seen: simulation.Panel,
) -> None:
    values = seen.values.astype(np.float64)
    middle = np.nanmedian(values, axis=2)
    assert np.median(np.std(middle, axis=1) / SIGMA) > 1.0, "fleet-wide events"
    residual = values - middle[:, :, None]
    residual -= np.nanmean(residual, axis=1, keepdims=True)
    z = residual / np.nanstd(residual, axis=1, keepdims=True)
    lag1 = np.nanmean(z[:, 1:] * z[:, :-1], axis=(1, 2))
    assert np.median(lag1) > 0.2
    assert np.nanmean(np.abs(z) > 4) > 5 * 6.3e-5, "five times as many as a normal law has"


def test_two_percent_of_samples_are_missing_half_of_them_in_runs(seen: simulation.Panel) -> None:
    missing = np.isnan(seen.values)
    assert np.mean(missing) == pytest.approx(0.02, abs=0.004)
    whole = missing.all(axis=0)
    assert np.mean(whole) == pytest.approx(0.01, abs=0.004)
    ends = np.sum(whole[1:] < whole[:-1])
    assert np.sum(whole) / ends > 8, "runs of some length"


def test_an_empty_fleet_is_refused() -> None:
    with pytest.raises(ValueError, match="4 to 1500 machines, not 3"):
        fleet(seed=1, num_machines_max=3)


def test_a_fleet_is_written_as_recordings_with_labels(tmp_path: Path) -> None:
    out = tmp_path / "fleet"
    lines: list[str] = []
    num = simulate_fleet(out, seed=4, num_tasks=1, num_healthy=1, num_machines_max=4, progress=lines.append)
    assert num == len(lines) == 2
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*.*")) == [
        f"case-00{i}/{name}" for i in (0, 1) for name in ("label.json", "recording.parquet")
    ]
    faulty, fine = fleet(seed=4, num_tasks=1, num_healthy=1, num_machines_max=4)
    reported = json.loads((out / "case-000" / "label.json").read_text())
    assert faulty.fault
    assert not reported["healthy"] and json.loads((out / "case-001" / "label.json").read_text())["healthy"]
    event = reported["events"][0]
    assert (event["node"], event["onset"], event["end"]) == (
        f"m{faulty.fault.machine:04d}",
        faulty.fault.onset,
        faulty.fault.end,
    )
    read = recording.read(out / "case-001" / "recording.parquet").panels
    whole = panel(fine)
    assert len(read) == 1
    order = [whole.shape.metrics.index(m) for m in read[0].shape.metrics]
    assert read[0].shape.machines == whole.shape.machines
    assert np.array_equal(read[0].at, whole.at)
    assert np.array_equal(read[0].values, whole.values[order], equal_nan=True)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CommandRefused, match="not empty"):
        simulate_fleet(tmp_path, seed=1, num_tasks=1)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"num_tasks": 0}, "at least one"),
        ({"num_tasks": -1, "num_healthy": 5}, "at least one"),
        ({"num_tasks": 1, "seed": -1}, "seed"),
        ({"num_tasks": 1, "num_machines_max": 2000}, "4 to 1500 machines, not 2000"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, numbers: dict[str, int], said: str) -> None:
    with pytest.raises(CommandRefused, match=said):
        simulate_fleet(tmp_path / "fleet", **{"seed": 1, **numbers})
    assert not (tmp_path / "fleet").exists()


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandRefused, match="file"):
        simulate_fleet(tmp_path / "file" / "fleet", seed=1, num_tasks=1)
