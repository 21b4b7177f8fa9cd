"""A rank of a torchrun job fails: the one that failed is named, not those that lost their connection to it."""

import pytest

from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.detector.live.processes import ReceivedException
from rolecall.detector.live.stages.exits.crash import blames_code, is_consequence
from tests.detector.live.torchrun_job import GLOO_CLOSED, NODE, TorchrunJob, job

pytestmark = pytest.mark.usefixtures("incarnation")


def test_the_first_exception_is_the_fault_and_lost_connections_are_not() -> None:
    it = job()
    first, *others = (it.ranks[n] for n in (1, 0, 2, 3))
    it.raises(first, "ValueError", "bad sample", "f1")
    it.run(3.0)
    it.exits(first, code="1")
    for r in others[:2]:
        it.raises(r, "RuntimeError", GLOO_CLOSED, "f2")
    it.run(0.5)
    for r in others:
        it.ended_by_launcher(r)
    (found,) = it.run(6.0)
    assert found.fault_class is FaultClass.CRASH
    assert [(s.replica, s.rank) for s in found.suspects] == [("trainer/0", 1)]
    assert "rank 1" in found.because and "ValueError: bad sample at train.py:13" in found.because
    assert "in step " in found.because and "step of step" not in found.because
    assert "gloo" not in found.because and "hardware" not in found.because


def test_a_rank_that_lost_its_peer_and_exits_first_is_not_the_cause() -> None:
    it = job()
    it.raises(it.ranks[1], "ValueError", "bad sample", "f1")
    it.raises(it.ranks[0], "RuntimeError", GLOO_CLOSED, "f2")
    it.run(0.5)
    it.exits(it.ranks[0], code="1")
    it.run(0.5)
    it.exits(it.ranks[1], code="1")
    it.run(1.5)
    for _ in range(14):
        assert [s.rank for d in it.run(0.5) for s in d.suspects] in ([], [1]), "the rank that lost its peer is held"
    (found,) = it.standing
    assert [s.rank for s in found.suspects] == [1]
    assert "ValueError: bad sample" in found.because


def test_with_lost_connections_alone_the_cause_is_not_known() -> None:
    it = job()
    for n in (2, 0):
        it.raises(it.ranks[n], "RuntimeError", GLOO_CLOSED, "f2")
        it.exits(it.ranks[n], ago=0.2 if n == 2 else 0.0, code="1")
    for n in (1, 3):
        it.ended_by_launcher(it.ranks[n])
    (found,) = it.run(8.0)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [2]
    assert "the cause is not known" in found.because and "hardware" not in found.because


def test_the_same_exception_of_its_own_on_all_ranks_is_user_code() -> None:
    it = job()
    for r in it.ranks:
        it.raises(r, "ValueError", "bad sample", "f1")
        it.exits(r, code="1")
    (found,) = it.run(3.0)
    assert found.fault_class is FaultClass.USER_CODE and "all 4 ranks" in found.because


@pytest.mark.parametrize(
    ("kind", "message", "consequence", "code"),
    [
        ("ValueError", "bad sample", False, True),
        ("ValueError", "connection closed by peer", False, True),  # the job's own words
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False, True),
        ("RuntimeError", GLOO_CLOSED, True, False),
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:534] Read error: Connection reset by peer", True, False),
        ("RuntimeError", "Application timeout caused pair closure: gloo timed out", True, False),
        ("RuntimeError", "NCCL communicator was aborted on rank 1", True, False),
        ("RuntimeError", "Socket Timeout", True, False),
        ("torch.distributed.DistBackendError", "ncclRemoteError: remote process exiting", True, False),
        ("torch.distributed.DistStoreError", "wait timeout after 1800000ms", True, False),
        ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered", False, False),
        ("RuntimeError", "CUDA error: device-side assert triggered", False, True),
    ],
)
def test_which_exceptions_blame_the_code(kind: str, message: str, consequence: bool, code: bool) -> None:
    event = AgentEvent(
        seq=1, kind=AgentEventKind.EXCEPTION, node=NODE, at=0.0, wall_at=0.0, detail={"type": kind, "message": message}
    )
    assert is_consequence(event) is consequence
    assert blames_code(ReceivedException(event, 0.0, 0)) is code


def uncaught(it: TorchrunJob, rank: int) -> None:
    r = it.ranks[rank]
    it.event(
        AgentEventKind.EXCEPTION, r, type="ValueError", message="bad sample", where="train.py:13 <module>",
        fingerprint="f1", step=str(r.step), uncaught="1",
    )  # fmt: skip


def test_an_exception_that_nothing_caught_is_named_before_its_process_has_ended() -> None:
    it = job()
    it.ranks[1].waits = True
    uncaught(it, 1)
    assert it.run(0.5) == [], "its peers may raise the same"
    (found,) = it.run(2.0)
    assert found.fault_class is FaultClass.CRASH and [s.rank for s in found.suspects] == [1]
    assert "its process ends in step " in found.because
    assert "with an uncaught exception: ValueError: bad sample at train.py:13" in found.because
    it.exits(it.ranks[1], code="1")
    for n in (0, 2, 3):
        it.raises(it.ranks[n], "RuntimeError", GLOO_CLOSED, "f2")
        it.exits(it.ranks[n], code="1")
    assert it.run(8.0) == [found], "its exit is the same fault, and those of its peers follow from it"


def test_peers_that_fail_while_it_ends_are_not_named() -> None:
    it = job()
    it.ranks[1].waits = True
    uncaught(it, 1)
    it.run(0.5)
    for n in (0, 2, 3):
        it.raises(it.ranks[n], "RuntimeError", GLOO_CLOSED, "f2")
        it.exits(it.ranks[n], code="1")
    for _ in range(16):
        assert all([s.rank for s in d.suspects] == [1] for d in it.run(0.5)), "its interpreter never ends"
    assert len(it.standing) == 1


def test_an_exception_that_the_job_catches_is_no_crash() -> None:
    it = job()
    it.raises(it.ranks[1], "ValueError", "bad sample", "f1")
    assert it.run(8.0) == []


def test_a_process_whose_work_goes_on_has_not_ended() -> None:
    it = job()
    uncaught(it, 1)
    assert it.run(8.0) == [], "another thread trains"


def test_an_uncaught_exception_that_tells_of_a_lost_peer_waits_for_the_exit() -> None:
    it = job()
    it.ranks[0].waits = True
    it.event(
        AgentEventKind.EXCEPTION, it.ranks[0], type="RuntimeError", message=GLOO_CLOSED, where="train.py:13 <module>",
        fingerprint="f2", step=str(it.ranks[0].step), uncaught="1",
    )  # fmt: skip
    assert it.run(3.0) == []


def test_an_uncaught_exception_on_all_ranks_is_user_code() -> None:
    it = job()
    for r in it.ranks:
        r.waits = True
        uncaught(it, r.rank)
    (found,) = it.run(3.0)
    assert found.fault_class is FaultClass.USER_CODE
