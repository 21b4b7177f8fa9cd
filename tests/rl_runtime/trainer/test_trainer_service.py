"""A trainer with what surrounds it, in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.agent.processes.state_pages import parse_page
from rolecall.agent.reporter import reporter
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.rundir import create_run_dir
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.trainer.service import TrainerService
from tests.rl_runtime.trainer_process import tiny_job

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
