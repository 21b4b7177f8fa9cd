"""Who holds a weight transfer up, from stacks; and when that cannot be known."""

from dataclasses import replace

import pytest

from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.artifacts.stacks.dumps import EngineDump
from rolecall.detector.artifacts.stacks.positions import stack_of
from rolecall.detector.artifacts.stacks.weight_sync import Place, Shard, diagnose, place_of, shards_of
from tests.detector.stack_cases import C10D, dump, settle

SENDS = (f"{C10D}:broadcast", "trl/vllm_client.py:update_named_param", "grpo_trainer.py:_move_model_to_vllm")
ASKS = ("http/client.py:getresponse", "requests/sessions.py:post", "trl/vllm_client.py:update_named_param", "t.py:main")
RECEIVES = (f"{C10D}:broadcast", "worker.py:receive_weight", "worker.py:load_model_weights", "worker.py:busy_loop")
HELD = ("threading.py:wait", "queue.py:get", "worker.py:load_weights", "worker.py:busy_loop")
OWN = ("threading.py:acquire", "cache.py:evict", "scheduler.py:step", "worker.py:main")
IDLE = ("threading.py:wait", "queue.py:get", "core.py:_process_input_queue", "core.py:run_busy_loop")
CORE_STUCK = ("threading.py:acquire", "cache.py:evict", "core.py:_handle_client_request", *IDLE[2:])
WORKER_IDLE = ("zmq/sugar/poll.py:poll", "shm_broadcast.py:acquire_read", "shm_broadcast.py:dequeue", "m.py:main")
CORE_WAITS = ("shm_broadcast.py:dequeue", "multiproc_executor.py:get_response", "multiproc_executor.py:collective_rpc")
SERVER_WAITS = ("threading.py:wait", "concurrent/futures/_base.py:result", "core_client.py:call", "x.py:update_weights")
RAY_GET = ("ray/_private/worker.py:get_objects", "ray/_private/worker.py:get", "ray_executor.py:collective_rpc")
BARRIER = (f"{C10D}:barrier", "grpo_trainer.py:step", "train.py:main")
BUSY = ("layers.py:forward", "scheduler.py:step")


def shard(replica: str, *frames: str, rank: int = 0, active: bool = False, stopped: bool = False) -> Shard:
    who = Suspect(node=NodeId("n"), role=replica.partition("/")[0], replica=replica, rank=rank, incarnation=0)
    return Shard(who, stack_of(dump(rank, *frames, active=active, is_stopped=stopped)) if frames else None, 100.0)


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (SENDS, Place.INSIDE),
        (ASKS, Place.INSIDE),
        (RECEIVES, Place.INSIDE),
        (HELD, Place.HELD),
        (OWN, Place.OUTSIDE),
        (IDLE, Place.IDLE),
        (BARRIER, Place.ELSEWHERE),
        (CORE_STUCK, Place.OUTSIDE),
        (WORKER_IDLE, Place.IDLE),
        (RAY_GET, Place.ELSEWHERE),
        ((*RAY_GET, "trainer.py:broadcast_weights"), Place.INSIDE),
    ],
)
def test_places(frames: tuple[str, ...], place: Place) -> None:
    stack = shard("rollout/0", *frames).stack
    assert stack is not None and place_of(stack) is place


def found(*shards: Shard) -> Finding:
    finding = diagnose(shards)
    assert finding is not None
    return finding


@pytest.mark.parametrize("frames", [HELD, OWN])
def test_the_one_that_stands_still_outside_of_the_collective_is_named(frames: tuple[str, ...]) -> None:
    it = found(shard("trainer/0", *SENDS), shard("rollout/0", *RECEIVES), shard("rollout/1", *frames))
    assert it.fault_class is FaultClass.HANG and [s.replica for s in it.suspects] == ["rollout/1"]
    assert it.because.startswith("rollout/1 rank 0 holds the weight sync up: rollout/1 rank 0 ")
    assert "trainer/0 rank 0, rollout/0 rank 0 wait inside a weight transfer" in it.because
    assert len(it.evidence) == 3, "the place of each"


def test_a_stopped_shard_is_named() -> None:
    it = found(shard("trainer/0", *SENDS), shard("rollout/0", *RECEIVES, stopped=True))
    assert it.fault_class is FaultClass.HANG and it.suspects[0].replica == "rollout/0"


def test_ranks_of_one_engine_are_one_shard_and_other_trainer_ranks_may_wait_elsewhere() -> None:
    it = found(
        shard("trainer/0", *SENDS),
        shard("trainer/0", *BARRIER, rank=1),
        shard("rollout/0", *OWN),
        shard("rollout/0", *HELD, rank=1),
        shard("rollout/1", *IDLE),
    )
    assert it.fault_class is FaultClass.HANG and {(s.replica, s.rank) for s in it.suspects} == {
        ("rollout/0", 0),
        ("rollout/0", 1),
    }


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ((shard("rollout/0", *RECEIVES), shard("rollout/1", *RECEIVES)), "all of them are inside"),
        ((shard("rollout/0", *HELD), shard("rollout/1", *OWN)), "rollout/0 rank 0, rollout/1 rank 0 are not in it"),
        ((shard("rollout/0", *RECEIVES), shard("rollout/1", *IDLE)), "rollout/1 rank 0 is idle: never asked to take"),
        ((shard("rollout/0", *RECEIVES), shard("rollout/1", *BUSY, active=True)), "rollout/1 rank 0 is busy"),
        ((shard("rollout/0", *RECEIVES), shard("rollout/1")), "there is no stack of rollout/1 rank 0"),
    ],
)
def test_where_it_cannot_be_known_no_shard_is_named_and_the_reason_is_told(shards: tuple[Shard, ...], why: str) -> None:
    it = found(shard("trainer/0", *SENDS), *shards)
    assert it.fault_class is FaultClass.CANNOT_TELL
    assert "the weight sync hangs, and no shard is named" in it.because and why in it.because
    assert "Flight Recorder" in settle(it)


def test_without_a_transfer_nothing_is_told() -> None:
    assert diagnose([shard("trainer/0", *BARRIER), shard("rollout/0", *IDLE)]) is None
    assert diagnose([shard("trainer/0", *SENDS)]) is None


CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker_TP0"


def engine(pid: int, *frames: str, parent: int = 1, title: str = CORE) -> EngineDump:
    return EngineDump(pid=pid, parent=parent, title=title, dump=dump(0, *frames) if frames else None)


@pytest.mark.parametrize(
    ("server", "engines", "seen"),
    [
        (SERVER_WAITS, (), {"": Place.HELD}),
        (SERVER_WAITS, (engine(2, *RECEIVES),), {"VLLM::EngineCore, pid 2": Place.INSIDE}),
        (SERVER_WAITS, (engine(2, *HELD),), {"VLLM::EngineCore, pid 2": Place.HELD}),
        (SERVER_WAITS, (engine(2),), {"VLLM::EngineCore, pid 2": None}),
        (SERVER_WAITS, (engine(2, *IDLE),), {"": Place.HELD, "VLLM::EngineCore, pid 2": Place.IDLE}),
        (SENDS, (engine(2, *HELD),), {"": Place.INSIDE, "VLLM::EngineCore, pid 2": Place.HELD}),
        (
            SERVER_WAITS,
            (
                engine(2, *CORE_WAITS),
                engine(3, *RECEIVES, parent=2, title=WORKER),
                engine(4, *OWN, parent=2, title=WORKER),
            ),
            {"VLLM::Worker_TP0, pid 3": Place.INSIDE, "VLLM::Worker_TP0, pid 4": Place.OUTSIDE},
        ),
    ],
)
def test_of_an_engine_those_that_no_other_one_works_for_are_looked_at(
    server: tuple[str, ...], engines: tuple[EngineDump, ...], seen: dict[str, Place | None]
) -> None:
    shards = shards_of(shard("rollout/0").who, replace(dump(0, *server), engines=engines))
    assert {s.engine: s.stack and place_of(s.stack) for s in shards} == seen


def test_the_engine_process_that_holds_the_transfer_up_is_told_and_its_replica_named() -> None:
    who = shard("rollout/1").who
    workers = tuple(engine(pid, *HELD, parent=2, title=WORKER) for pid in (3, 4))
    of_engine = shards_of(who, replace(dump(0, *SERVER_WAITS), engines=(engine(2, *CORE_WAITS), *workers)))
    it = found(shard("trainer/0", *SENDS), shard("rollout/0", *RECEIVES), *of_engine)
    assert it.fault_class is FaultClass.HANG and it.suspects == (who,)
    assert "rollout/1 rank 0 (VLLM::Worker_TP0, pid 4) stands still inside the transfer" in it.because
