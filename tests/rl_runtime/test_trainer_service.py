"""A trainer with what surrounds it, in this process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.agent import reporter
from rolecall.agent.pages import parse_page
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.protocol import Group, Microbatch
from rolecall.rl_runtime.spawn import make_spawn
from rolecall.rl_runtime.trainer_service import TrainerService
from tests.rl_runtime.trainer_process import LEDGER, make_microbatches, tiny_job

JOB = tiny_job()
TRAINER = ReplicaId("trainer/0")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TrainerService]:
    spawn = make_spawn(create_run_dir(tmp_path, "r"), TRAINER, 1, NodeId("node-1"))
    service = TrainerService(spawn, JOB)
    service.join(1, 1, 0, 1, "127.0.0.1", 0)
    yield service
    service.close()


def test_a_checkpoint_is_a_phase_of_its_own(service: TrainerService, tmp_path: Path) -> None:
    before = parse_page(reporter.page_bytes())
    path = Path(service.save_checkpoint(str(tmp_path / "checkpoints"), 1))
    after = parse_page(reporter.page_bytes())
    assert path.exists()
    assert after.phase == before.phase and after.phase_entries == before.phase_entries + 2
    # One that cannot be written is left, too: the trainer goes on.
    (tmp_path / "a-file").write_text("")
    with pytest.raises(OSError):
        service.save_checkpoint(str(tmp_path / "a-file"), 1)
    assert parse_page(reporter.page_bytes()).phase == before.phase


def made_by(version: int, microbatch: Microbatch) -> Microbatch:
    def aged(group: Group) -> Group:
        samples = (replace(s, versions=(version,) * len(s.tokens)) for s in group.samples)
        return replace(group, samples=tuple(samples))

    return replace(microbatch, groups=tuple(map(aged, microbatch.groups)))


def test_a_step_of_older_tokens_compares_nothing_and_says_so(service: TrainerService) -> None:
    found = []
    for step in (0, 1):
        microbatches = [made_by(0, m) for m in make_microbatches(JOB, step)]
        ids = [m.microbatch_id for m in microbatches]
        found.append(service.train_step(1, 1, step, microbatches, ids, LEDGER, [TRAINER]).log_ratio_max)
    assert found[0] is not None and found[0] > 0.0
    assert found[1] is None
