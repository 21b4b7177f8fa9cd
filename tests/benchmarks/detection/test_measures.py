"""What recordings say of slowness: on a synthetic fleet, of which the truth is known."""

import gzip
import json
import math
from pathlib import Path

import pytest

from benchmarks.detection.slowness import measures, recording
from benchmarks.detection.slowness.measures import DISTURBED, HEALTHY, Slowdown
from benchmarks.detection.slowness.recording import Recording
from rolecall.core.config.job import DetectorConfig
from rolecall.detector.base.observation import Observation
from rolecall.testing.synthetic_run import FakeFault, FakeFleet

HEALTHY_SECONDS, SLOW_SECONDS = 60.0, 20.0


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Slowdown]:
    """A minute of a healthy fleet, then one rollout that takes four times as long; written and read as a file."""
    fleet = FakeFleet(seed=3)
    observations = list(fleet.run(HEALTHY_SECONDS))
    since = observations[-1].wall_at
    fleet.processes["rollout/1"].fault = FakeFault("unit_delay")
    observations += list(fleet.run(SLOW_SECONDS))
    path = tmp_path_factory.mktemp("run") / recording.FILE_NAME
    write(path, observations)
    fault = Slowdown(
        kind="rollout-slow", how="delay", process=("rollout/1", 1), since=since, until=observations[-1].wall_at
    )
    return recording.read(path), fault


def write(path: Path, observations: list[Observation]) -> None:
    with gzip.open(path, "wb") as out:
        for o in observations:
            out.write(json.dumps(o.to_dict()).encode() + b"\n")


def test_a_recording_gives_back_every_sample_and_event(reported: tuple[Recording, Slowdown]) -> None:
    heard = reported[0]
    again = list(recording.replayed(heard, look_seconds=0.5))
    samples = [s for o in again for b in o.batches for s in b.processes]
    assert len(samples) == len(heard.samples) > 1000
    assert sum(len(o.events) for o in again) == sum(len(o.events) for o in heard.observations) > 5
    assert [o.wall_at for o in again] == sorted(o.wall_at for o in again)
    assert all(s.wall_at <= o.wall_at for o in again for b in o.batches for s in b.processes)


def test_of_a_recording_cut_short_the_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / recording.FILE_NAME
    write(path, list(FakeFleet(seed=1).run(20.0)))
    whole = len(recording.read(path).observations)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert 0 < len(recording.read(path).observations) < whole


def test_windows_tile_the_time_of_each_process_and_separate_the_slowed_one(
    reported: tuple[Recording, Slowdown],
) -> None:
    heard, fault = reported
    found = measures.windows(heard, [fault], 2.0)
    assert {w.label for w in found} == {HEALTHY, DISTURBED, "delay"}
    assert {w.process for w in found if w.label == "delay"} == {("rollout/1", 1)}
    assert all(fault.since <= w.at for w in found if w.label == "delay")
    relative = measures.against_peers(found, "rollout", "effective")
    assert measures.auc(relative[HEALTHY], relative["delay"]) > 0.9
    assert measures.d_prime(relative[HEALTHY], relative["delay"]) > 1.5
    assert all(ratio >= 1.0 for ratio in measures.peer_ratios(found, "rollout", "busy"))


def test_the_slow_test_replayed_finds_the_slowed_one_and_no_one_before(reported: tuple[Recording, Slowdown]) -> None:
    heard, fault = reported
    rows = measures.rows_of(measures.strides(heard, [fault], DetectorConfig()))
    drift = math.log(2.0) / 2
    for row in rows:
        alarms = measures.alarms(row, drift, h=4.0)
        assert bool(alarms) == (row[0].process == fault.process), row[0].process
        assert all(at > fault.since for at in alarms)


def test_auc_and_distance_of_known_samples() -> None:
    assert measures.auc([0.0, 1.0], [2.0, 3.0]) == 1.0
    assert measures.auc([0.0, 1.0], [0.0, 1.0]) == 0.5
    assert measures.auc([2.0, 3.0], [0.0, 1.0]) == 0.0
    assert measures.d_prime([-1.0, 1.0], [1.0, 3.0]) == pytest.approx(2.0)
