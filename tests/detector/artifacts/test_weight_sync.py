"""Who holds a weight transfer up, from stacks; and when that cannot be known."""

import pytest

from rolecall.core.diagnosis import Finding, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId
from rolecall.detector.artifacts.stacks.positions import stack_of
from rolecall.detector.artifacts.stacks.weight_sync import Place, Shard, diagnose, place_of
from tests.detector.stack_cases import C10D, dump, settle

SENDS = (f"{C10D}:broadcast", "trl/vllm_client.py:update_named_param", "grpo_trainer.py:_move_model_to_vllm")
ASKS = ("http/client.py:getresponse", "requests/sessions.py:post", "trl/vllm_client.py:update_named_param", "t.py:main")
RECEIVES = (f"{C10D}:broadcast", "worker.py:receive_weight", "worker.py:load_model_weights", "worker.py:busy_loop")
HELD = ("threading.py:wait", "queue.py:get", "worker.py:load_weights", "worker.py:busy_loop")
OWN = ("threading.py:acquire", "cache.py:evict", "scheduler.py:step", "worker.py:main")
IDLE = ("threading.py:wait", "queue.py:get", "core.py:_process_input_queue", "core.py:run_busy_loop")
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
