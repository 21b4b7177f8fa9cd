"""A trainer with what surrounds it, in this process."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.agent.processes.state_pages import parse_page
from rolecall.agent.reporter import reporter
from rolecall.core.errors import CheckpointCorrupt, CheckpointUnwritable, ProofMismatch, StaleIncarnation, WireError
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.core.telemetry import Phase
from rolecall.rl_runtime.protocol.clients import is_code_error
from rolecall.rl_runtime.protocol.spawn import make_spawn
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.checkpoint import load
from rolecall.rl_runtime.trainer.ranks import Ranks
from rolecall.rl_runtime.trainer.service import TrainerService
from tests.full_disk import small_disk
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


def saved(service: TrainerService, folder: Path) -> Path:
    return Path(service.write_checkpoint(str(folder), service.take_snapshot()).path)


def test_the_copy_for_a_checkpoint_is_a_phase_of_its_own(service: TrainerService, tmp_path: Path) -> None:
    before = parse_page(reporter.page_bytes())
    assert service.take_snapshot() == -1
    after = parse_page(reporter.page_bytes())
    assert after.phase == before.phase and after.phase_entries == before.phase_entries + 2


def test_a_copy_of_the_state_is_a_phase_of_its_own(service: TrainerService, tmp_path: Path) -> None:
    seen: list[str] = []
    spawn = make_spawn(RunDir(tmp_path / "r"), TRAINER, 2, NodeId("node-1"))
    copy = TrainerService(spawn, JOB, on_stage=lambda _: seen.append(parse_page(reporter.page_bytes()).phase))
    try:
        before = parse_page(reporter.page_bytes()).phase
        copy.copy_from(service.info().holder)
        assert seen == [Phase.COPY] and parse_page(reporter.page_bytes()).phase == before
        nowhere = replace(service.info().holder, port=1)
        with pytest.raises(WireError):
            copy.copy_from(nowhere)
        assert parse_page(reporter.page_bytes()).phase == before
    finally:
        copy.close()


def test_a_checkpoint_has_the_state_of_its_snapshot_after_the_next_step(
    service: TrainerService, tmp_path: Path
) -> None:
    wanted, meta = service.replica.state.export()
    service.take_snapshot()
    microbatches = make_microbatches(JOB, 0)
    service.train_step(1, 1, 0, microbatches, [m.microbatch_id for m in microbatches], LEDGER, [TRAINER])
    written = load(Path(service.write_checkpoint(str(tmp_path), -1).path))
    assert (written.step, written.meta) == (-1, meta)
    assert written.tensors.keys() == wanted.keys() and all(written.tensors[n].equal(t) for n, t in wanted.items())
    with pytest.raises(StaleIncarnation, match="a snapshot"):
        service.write_checkpoint(str(tmp_path), -1)
    service.take_snapshot()
    with pytest.raises(StaleIncarnation, match="a snapshot of step 7"):
        service.write_checkpoint(str(tmp_path), 7)


def test_one_checkpoint_is_written_at_a_time(
    service: TrainerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.take_snapshot()
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_args: Any, **_kwargs: Any) -> Path:
        begun.set()
        assert go_on.wait(30)
        return tmp_path

    monkeypatch.setattr(checkpoint, "save", slow)
    writer = threading.Thread(target=service.write_checkpoint, args=(str(tmp_path), -1))
    writer.start()
    assert begun.wait(30)
    for call in (service.take_snapshot, lambda: service.write_checkpoint(str(tmp_path), -1)):
        with pytest.raises(CheckpointUnwritable, match="still being written"):
            call()
    go_on.set()
    writer.join(30)
    assert service.take_snapshot() == -1


def test_a_full_disk_ends_the_checkpoint_phase_and_is_no_error_of_the_code(
    service: TrainerService, tmp_path: Path
) -> None:
    before = parse_page(reporter.page_bytes())
    with small_disk(tmp_path / "disk", size_kib=32 * 1024) as disk:
        good = saved(service, disk.path / "checkpoints")
        disk.fill()
        with pytest.raises(CheckpointUnwritable, match="No space left") as caught:
            saved(service, disk.path / "checkpoints")
        assert not is_code_error(caught.value), "else the detector would blame the code on every trainer"
        assert [path.name for path in good.parent.iterdir()] == [good.name], "the earlier one stays, nothing else does"
        assert load(good).path == good
    assert parse_page(reporter.page_bytes()).phase == before.phase


def test_a_rank_that_cannot_read_a_checkpoint_lets_none_load_it(
    service: TrainerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    before = service.replica.state.export()
    microbatches = make_microbatches(JOB, 0)
    path = saved(service, folder)
    service.train_step(1, 1, 0, microbatches, [m.microbatch_id for m in microbatches], LEDGER, [TRAINER])
    after = service.replica.state.export()
    (path / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match="0 bytes"):
        service.load_checkpoint(str(path))
    path = saved(service, folder)

    class Second(Ranks):
        """The other rank of two has this failure."""

        def agree(self, failure: str = "") -> str:
            assert not failure
            return "rank 1: Input/output error"

    second = Second()
    second.size = 2
    with monkeypatch.context() as patch:
        patch.setattr(service, "_ranks", second)
        with pytest.raises(CheckpointCorrupt, match="step-00000000: rank 1: Input/output error"):
            service.load_checkpoint(str(path))
    assert same(service.replica.state.export(), after)
    service.load_checkpoint("")
    assert same(service.replica.state.export(), before)
    service.load_checkpoint(str(path))
    assert same(service.replica.state.export(), after)


def test_a_state_of_another_model_is_refused(service: TrainerService, tmp_path: Path) -> None:
    tensors, meta = service.replica.state.export()
    name = next(iter(tensors))
    path = checkpoint.save(tmp_path, 3, {**tensors, name: torch.zeros(2, 2)}, meta)
    with pytest.raises(ProofMismatch, match=r"expected .*, got torch.float32 \(2, 2\)"):
        service.load_checkpoint(str(path))
    assert same(service.replica.state.export(), (tensors, meta))


def same(one: tuple[dict[str, torch.Tensor], str], other: tuple[dict[str, torch.Tensor], str]) -> bool:
    return one[1] == other[1] and all(t.equal(other[0][n]) for n, t in one[0].items())
