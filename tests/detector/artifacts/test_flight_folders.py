"""Dumps of several folders: those of the nodes of one job are joined, those of several jobs are not mixed."""

from pathlib import Path

import pytest

from rolecall.cli.main import main
from rolecall.detector.artifacts.flight_recorder.diagnosis import diagnose, summary
from rolecall.detector.artifacts.flight_recorder.dumps import read_many
from tests.detector.artifacts.test_flight_recorder import WORLD, WRITTEN_AT, Job, found, the_one


def job_in(folder: Path, num_ranks: int, num_operations: int) -> Job:
    folder.mkdir(parents=True)
    job = Job(folder, {WORLD: tuple(range(num_ranks))})
    job.all_did(*["all_reduce"] * num_operations)
    return job


def test_dumps_of_two_jobs_are_not_mixed_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks 4 to 7 of the trainer wait where the rollout's ranks 0 to 3 would be late."""
    trainer = job_in(tmp_path / "trainer", 8, 9)
    trainer.waits(range(8), WORLD, "all_reduce")
    paths = trainer.dump() + job_in(tmp_path / "rollout", 4, 3).dump(written_at=WRITTEN_AT + 50)
    assert found(paths) == []
    assert "12 Flight Recorder dumps" in summary(read_many(paths)[0])
    assert main(["diagnose", str(tmp_path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "cannot tell: ranks 0-3 have dumps in several folders" in told
    assert "/rollout" in told and "/trainer" in told


def test_the_newest_dump_of_a_rank_in_one_folder_counts(tmp_path: Path) -> None:
    job = job_in(tmp_path / "job", 4, 3)
    job.names = "early_rank_{}".format
    old = job.dump(written_at=WRITTEN_AT - 50)
    job.names = "late_rank_{}".format
    job.waits([0, 1, 3], WORLD, "all_reduce")
    assert the_one(found(old + job.dump()))[:2] == ("hang", [2])


def test_one_folder_for_each_node_is_one_job(tmp_path: Path) -> None:
    job = job_in(tmp_path / "job", 4, 3)
    job.names = lambda rank: f"node-{rank // 2}/nccl_trace_rank_{rank}"
    job.waits([0, 1, 3], WORLD, "all_reduce")
    (finding,) = diagnose(read_many(job.dump())[0])
    assert [(s.node, s.rank) for s in finding.suspects] == [("node-1", 2)]
