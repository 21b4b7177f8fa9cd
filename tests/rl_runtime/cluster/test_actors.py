"""Actors are shells: what they add is the lease, two kinds of threads, and Ray's errors in our words."""

import asyncio
import inspect
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rolecall.agent.reporter import reporter
from rolecall.core.clock import FakeClock
from rolecall.core.config.job import parse_job
from rolecall.core.errors import DeadlineExceeded, NonFiniteValue, PeerLost, StaleIncarnation
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.membership import Actual, ReplicaState
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.rl_runtime.cluster import actors
from rolecall.rl_runtime.cluster.actors import RayClient, RemoteError
from rolecall.rl_runtime.protocol.clients import (
    ReplicaExited,
    RewardPort,
    RolloutPort,
    TrainerPort,
    is_code_error,
    within,
)
from rolecall.rl_runtime.protocol.spawn import make_spawn
from tests.support import PATIENCE_SECONDS, eventually

RECORD = Actual(
    replica=ReplicaId("rollout/1"),
    incarnation=3,
    node=NodeId("node-1"),
    state=ReplicaState.READY,
    pid=77,
    start_ticks=88,
)


class Reference:
    """Replaces an ObjectRef."""

    def __init__(self, outcome: Any) -> None:
        self._future: Future[Any] = Future()
        if isinstance(outcome, BaseException):
            self._future.set_exception(outcome)
        elif outcome is not None:
            self._future.set_result(outcome)

    def future(self) -> Future[Any]:
        return self._future


class Handle:
    """Replaces an actor handle whose method `work` has one outcome; None: it never answers."""

    def __init__(self, outcome: Any) -> None:
        self.work = self
        self._outcome = outcome

    def remote(self, *_: Any) -> Reference:
        return Reference(self._outcome)


def call(outcome: Any) -> Any:
    return asyncio.run(RayClient(RECORD, Handle(outcome)).call("work", 1))


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("work", "Traceback ...", cause).as_instanceof_cause()


def test_an_answer_is_the_answer() -> None:
    assert call(5) == 5


def test_what_the_caller_did_before_it_took_an_answer_is_not_the_callee_s_time() -> None:
    """A thread of Ray answers, and the caller's loop does something else for 50 ms before it takes the answer."""
    handle, reference = Handle(None), Reference(None)
    handle.remote = lambda *_: reference  # type: ignore[method-assign]

    async def ask() -> tuple[Any, float, float]:
        began = time.monotonic()
        asked = asyncio.ensure_future(RayClient(RECORD, handle).timed_call("work"))
        await asyncio.sleep(0.01)
        ray_thread = threading.Thread(target=reference.future().set_result, args=(5,))
        ray_thread.start()
        ray_thread.join(timeout=PATIENCE_SECONDS)
        time.sleep(0.05)  # noqa: ASYNC251 the loop is busy
        answer, seconds = await asked
        return answer, seconds, time.monotonic() - began

    answer, seconds, whole = asyncio.run(ask())
    assert answer == 5 and 0.0 < seconds <= whole - 0.05


@pytest.mark.parametrize(
    "cause",
    [
        PeerLost(epoch=4, because="connection closed"),
        StaleIncarnation(replica="rollout/1", wanted="#4", got="#3"),
        ZeroDivisionError("in the loss"),
    ],
)
def test_an_exception_of_the_method_is_raised_unchanged(cause: Exception) -> None:
    with pytest.raises(type(cause)) as e:
        call(task_error(cause))
    assert e.value is cause


def test_an_exception_that_did_not_survive_the_way_is_still_one_of_code() -> None:
    with pytest.raises(RemoteError, match=r"^ValueError: odd$"):
        call(RayTaskError("work", "Traceback ...\nValueError: odd\n", None))


def test_a_dead_actor_is_gone_and_one_out_of_reach_is_not() -> None:
    with pytest.raises(ReplicaExited, match=r"rollout/1#3 is gone"):
        call(ActorDiedError())
    with pytest.raises(DeadlineExceeded, match=r"rollout/1#3 work"):
        call(ActorUnavailableError("no route", b"0" * 16))


def test_a_timeout_names_the_replica_that_did_not_answer() -> None:
    async def ask() -> None:
        await within(RayClient(RECORD, Handle(None)).call("work"), 0.05, "rollout/1#3 work")

    with pytest.raises(DeadlineExceeded, match=r"rollout/1#3 work"):
        asyncio.run(ask())


def test_a_timeout_raised_by_the_replica_is_not_taken_for_our_own() -> None:
    inner = DeadlineExceeded(waited_for="the engine thread", seconds=30.0)
    with pytest.raises(DeadlineExceeded) as e:
        asyncio.run(within(RayClient(RECORD, Handle(task_error(inner))).call("work"), PATIENCE_SECONDS, "rollout/1#3"))
    assert e.value is inner


@pytest.mark.parametrize(
    ("port", "actor"),
    [
        (TrainerPort, actors.TrainerActor),
        (RolloutPort, actors.RolloutActor),
        (RewardPort, actors.RewardActor),
    ],
)
def test_every_call_of_a_port_is_a_method_of_its_actor(port: type, actor: type) -> None:
    names = [n for n, _ in inspect.getmembers(port, inspect.isfunction) if not n.startswith("_")]
    for name in names:
        method = getattr(actor, name)
        group = method.__ray_concurrency_group__
        assert group in ("work", "control", "write"), f"{actor.__name__}.{name}"


def test_work_is_in_order_and_control_calls_are_not() -> None:
    work = {"join", "train_step", "copy_from", "list_checkpoints", "load_checkpoint", "take_snapshot", "idle"}
    work |= {"update_weights", "score", "observe"}
    for actor in (actors.TrainerActor, actors.RolloutActor, actors.RewardActor, actors.ControllerActor):
        for name, method in inspect.getmembers(actor, inspect.isfunction):
            group = getattr(method, "__ray_concurrency_group__", None)
            if group is not None:
                assert (group == "work") == (name in work), f"{actor.__name__}.{name}"


class Stepped(FakeClock):
    """Advances on the test's request; a sleep waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = threading.Condition()

    def sleep(self, seconds: float) -> None:
        with self.moved:
            self.moved.wait(PATIENCE_SECONDS)

    def advance(self, seconds: float) -> None:
        with self.moved:
            super().sleep(seconds)
            self.moved.notify_all()


def test_an_expired_lease_ends_the_process() -> None:
    ended: list[str] = []
    clock = Stepped()
    renewed = actors.ActorLease(30.0, clock, lambda: ended.append("renewed"))
    actors.ActorLease(30.0, clock, lambda: ended.append("forgotten"))
    clock.advance(29.0)
    renewed.renew(30.0)
    clock.advance(2.0)

    def ends(which: str) -> bool:
        clock.advance(0.0)  # wakes a thread that came to its sleep only after the last move
        return which in ended

    eventually(lambda: ends("forgotten"), "the lease to run out")
    assert ended == ["forgotten"], "a renewed lease holds"
    clock.advance(29.0)
    eventually(lambda: ends("renewed"), "the renewed lease to run out, too")


def test_first_unit_seconds_lengthens_the_lease_of_a_start_and_the_wait_for_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[float] = []

    class Lease:
        def __init__(self, seconds: float, *_: object) -> None:
            given.append(seconds)

        def renew(self, seconds: float) -> None:
            given.append(seconds)

    def replica(**arguments: Any) -> object:
        given.append(arguments["start_seconds"])
        return object()

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(actors, "ActorLease", Lease)
    monkeypatch.setattr(actors, "_node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(reporter, "start", lambda **_: None)
    monkeypatch.setattr("rolecall.rl_runtime.rollout.rollout.RolloutReplica", replica)
    spawn = make_spawn(create_run_dir(tmp_path, "r"), ReplicaId("rollout/0"), 1, NodeId("node-1"))
    job = parse_job({"detector": {"first_unit_seconds": 600}, "runtime": {"lease_seconds": 20}})
    actors.RolloutActor(spawn, job.model_dump(mode="json"))
    assert given == [1200.0, 1200.0, 20.0]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (ZeroDivisionError("x"), True),
        (NonFiniteValue(replica="trainer/0", step=1, what="loss"), True),
        (PeerLost(epoch=1, because="x"), False),
        (StaleIncarnation(replica="a/0", wanted="1", got="2"), False),
        (DeadlineExceeded(waited_for="x", seconds=1.0), False),
    ],
)
def test_only_errors_of_code_are_reported_to_the_agent(error: Exception, reported: bool) -> None:
    assert is_code_error(error) is reported


def test_the_token_count_of_a_dead_engine_is_read_from_its_page(tmp_path: Path) -> None:
    read: Callable[[Actual], int | None] = actors.report_tokens(RunDir(tmp_path))
    assert read(RECORD) is None
    layout: Any = vars(reporter)["at"]
    page = bytearray(layout.PAGE_BYTES)
    struct.pack_into("=q", page, 8 * layout.W_TOKENS, 1234)
    pages = RunDir(tmp_path).node_dir("node-1") / "pages"
    pages.mkdir(parents=True)
    (pages / layout.page_name(77, 88)).write_bytes(page)
    assert read(RECORD) == 1234


@pytest.mark.parametrize(
    "module",
    ["tasks.reward_worker", "controller.controller", "controller.batch_assembler", "controller.reward_scoring"],
)
def test_the_controllers_parts_carry_no_torch_and_no_engine(module: str) -> None:
    code = (
        f"import sys, rolecall.rl_runtime.{module}; "
        "print([m for m in ('torch', 'vllm', 'ray', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert out.stdout.strip() == "[]"
