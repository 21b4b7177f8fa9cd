"""The processes of a replica of several ranks: they live and die as one, copy by rank, and resume any checkpoint.

pytest tests/rl_runtime/trainer/test_rank_processes.py
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.core.config.job import JobConfig
from rolecall.core.errors import CheckpointCorrupt, CheckpointUnwritable, PeerLost, StaleIncarnation
from rolecall.core.ids import ReplicaId
from rolecall.core.membership import TRAINER_STANDBY_ROLE
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.processes import former_ranks
from rolecall.rl_runtime.rank_processes import RANK_EXIT
from rolecall.rl_runtime.trainer import checkpoint
from tests.rl_runtime.multi_rank_process import MultiRankProcess, join, tell_step
from tests.rl_runtime.trainer_process import tiny_job
from tests.support import some

REL_L2_MAX = 1e-6
Start = Callable[..., MultiRankProcess]


def job(ranks: int) -> JobConfig:
    return tiny_job(trainer_ranks=ranks, group_timeout_seconds=600.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "r")


@pytest.fixture
def start(run: RunDir) -> Iterator[Start]:
    with ExitStack() as stack:

        def started(index: int, ranks: int = 2, incarnation: int = 1, role: str = "trainer") -> MultiRankProcess:
            process = MultiRankProcess(run, index, job(ranks), incarnation, role=role)
            stack.callback(process.close)
            return process

        yield started


def stepped(epoch: int, step: int, *members: MultiRankProcess) -> list[Any]:
    tell_step(job(1), epoch, step, *members)
    return [m.answer() for m in members]


def saved(process: MultiRankProcess, folder: Path) -> checkpoint.Checkpoint:
    step = process.ask("take_snapshot")
    return checkpoint.load(Path(process.ask("write_checkpoint", str(folder / "checkpoints"), step).path))


def assert_close(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, wanted in other.tensors.items():
        apart = np.linalg.norm((one.tensors[name] - wanted).numpy())
        assert apart <= REL_L2_MAX * np.linalg.norm(wanted.numpy()), name


@pytest.mark.parametrize("stopped", [False, True])
def test_the_ranks_end_with_their_first_one(start: Start, stopped: bool) -> None:
    trainer = start(0)
    trainer.answer()
    [(pid, _)] = trainer.further_ranks()
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    trainer.process.kill()
    trainer.assert_gone()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_promoted_standby_copies_the_state_and_steps_with_the_others(start: Start, run: RunDir, ranks: int) -> None:
    survivor, standby = start(0, ranks), start(0, ranks, role=TRAINER_STANDBY_ROLE)
    for process in (survivor, standby):
        process.answer()
    assert not standby.ask("info").has_state, "it never trains with the weights that it has created"
    join(1, survivor)
    stepped(1, 0, survivor)
    of_standby = standby.further_ranks()
    standby.promote(ReplicaId("trainer/1"), 2)
    info = standby.ask("info")
    assert (info.replica, info.incarnation, info.holder.replica, info.has_state) == ("trainer/1", 2, "trainer/1", False)
    assert standby.further_ranks() == of_standby, "they are recorded under the new name"
    assert [p.pid for p in former_ranks(run.path, ReplicaId("trainer/1"), 3)] == [pid for pid, _ in of_standby]
    with pytest.raises(StaleIncarnation, match="state copied first"):
        join(2, standby)
    standby.ask("copy_from", survivor.ask("info").holder)
    join(2, survivor, standby)
    both = stepped(2, 1, survivor, standby)
    assert both[0].commit == both[1].commit and both[1].replica == "trainer/1"


def test_a_lost_rank_takes_its_replica_with_it_and_the_others_finish_the_step(start: Start, tmp_path: Path) -> None:
    survivor, victim = members = start(0), start(1)
    for member in members:
        member.answer()
    join(1, *members)
    stepped(1, 0, *members)
    [(pid, _)] = victim.further_ranks()
    tell_step(job(1), 1, 1, survivor)
    os.kill(pid, signal.SIGKILL)
    assert victim.exit_code() == RANK_EXIT
    with pytest.raises(PeerLost):
        survivor.answer()
    replacement, undisturbed = start(1, incarnation=2), start(2, ranks=1)
    join(2, survivor)
    assert stepped(2, 1, survivor)[0].commit.step == 1

    replacement.answer()
    assert not replacement.ask("info").has_state
    holder = survivor.ask("info").holder
    assert len(holder.rank_ports) == 1, "each rank copies from its own"
    replacement.ask("copy_from", holder)
    join(3, survivor, replacement)
    both = stepped(3, 2, survivor, replacement)
    assert both[0].commit == both[1].commit

    undisturbed.answer()
    join(1, undisturbed)
    for step in range(3):
        stepped(1, step, undisturbed)
    reference = saved(undisturbed, tmp_path / "reference")
    for number, member in enumerate((survivor, replacement)):
        assert_close(saved(member, tmp_path / str(number)), reference)


@pytest.mark.parametrize(
    ("writer", "readers"),
    some(
        [((2, 2), ((1,), (3,))), ((2, 2), ((2,), (2, 2, 2))), ((1,), ((2,),))],
        [((2, 2), ((1,), (3,))), ((1,), ((2,),))],
    ),
)
def test_a_checkpoint_resumes_with_any_number_of_ranks_and_replicas(
    start: Start, writer: tuple[int, ...], readers: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    members = [start(index, ranks) for index, ranks in enumerate(writer)]
    for member in members:
        member.answer()
    join(1, *members)
    stepped(1, 0, *members)
    before = saved(members[0], tmp_path)
    wanted = stepped(1, 1, *members)[0]
    after = saved(members[0], tmp_path / "after")
    for ranks in readers:
        resumed = [start(index, number, incarnation=2) for index, number in enumerate(ranks)]
        for reader in resumed:
            reader.answer()
        [stored] = resumed[0].ask("list_checkpoints", str(tmp_path / "checkpoints"))
        assert stored.path == str(before.path) and stored.commit.step == 0
        resumed[0].ask("load_checkpoint", stored.path)
        for reader in resumed[1:]:
            reader.ask("copy_from", resumed[0].ask("info").holder)
        join(1, *resumed)
        for got in stepped(1, 1, *resumed):
            assert got.commit.microbatch_ids == wanted.commit.microbatch_ids
            assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
        assert_close(saved(resumed[-1], tmp_path / f"by-{ranks}"), after)
        for reader in resumed:
            reader.close()


def test_a_checkpoint_that_cannot_be_written_or_read_ends_no_rank(start: Start, tmp_path: Path) -> None:
    trainer = start(0)
    trainer.answer()
    join(1, trainer)
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with pytest.raises(CheckpointUnwritable):
        saved(trainer, blocked)
    assert stepped(1, 0, trainer)[0].commit.step == 0
    path = saved(trainer, tmp_path).path
    (path / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match=r"rank 0: .*state\.safetensors: 0 bytes"):
        trainer.ask("load_checkpoint", str(path))
    assert stepped(1, 1, trainer)[0].commit.step == 1
