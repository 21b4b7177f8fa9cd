"""The rollout replica around a scripted engine: who may call, and what happens when an update fails."""

import threading
from collections.abc import Callable

import pytest
import torch

from rolecall.agent.processes.state_pages import parse_page
from rolecall.agent.reporter import reporter
from rolecall.core.errors import CorruptTransfer, ProofMismatch, StaleIncarnation
from rolecall.core.ids import ReplicaId
from rolecall.rl_runtime.rollout.rollout import WeightsNotProven
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.port import TensorServer
from rolecall.rl_runtime.weights.pull import TransferFailed
from tests.rl_runtime.rollout_rig import Rig, canary_of, request, weights
from tests.rl_runtime.weight_port import ROLLOUT, TOKEN, TRAINER, until_sent
from tests.support import PATIENCE_SECONDS

# --- proof before service


def test_without_proven_weights_nothing_is_generated(rig: Rig) -> None:
    assert rig.replica.info().policy_version == -1
    with pytest.raises(WeightsNotProven, match="rollout/0#1 has no proven weights"):
        rig.submit(request())
    assert rig.replica.list_requests(1) == []


def test_update_proves_and_serves(rig: Rig) -> None:
    manifest = rig.publish(3)
    proof = rig.replica.update_weights(1, 7, manifest, [rig.holder])
    assert proof.received_digest == manifest.digest == proof.manifest_digest
    assert (proof.incarnation, proof.epoch, proof.policy_version, proof.holder) == (1, 7, 3, TRAINER)
    assert proof.canary_logprobs == canary_of(weights(3)) and proof.covered == 2 and proof.bytes_received == 20
    assert rig.replica.info().policy_version == 3
    rig.submit(request())
    chunk = rig.finished("g.0")
    assert chunk.versions == (3,) * 5 and chunk.logprobs == (-4.0,) * 5 and chunk.finish_reason == "length"


def test_the_same_version_is_proven_again_without_a_transfer(rig: Rig) -> None:
    manifest = rig.serve(1)
    proof = rig.replica.update_weights(1, 2, manifest, [])
    assert proof.epoch == 2 and proof.bytes_received == 0 and proof.holder == ROLLOUT
    assert rig.scripted.loads == 1


def swap(stored: dict[str, torch.Tensor]) -> None:
    stored["w"], stored["v"] = stored["v"][:2].clone(), torch.cat([stored["w"], stored["w"][:1]])


def drop(stored: dict[str, torch.Tensor]) -> None:
    del stored["v"]


def flip(stored: dict[str, torch.Tensor]) -> None:
    stored["w"].view(torch.int32)[1] ^= 1


def stale(stored: dict[str, torch.Tensor]) -> None:
    stored["v"] = weights(0)["v"]


PLANTED = {
    "a skipped tensor": (drop, "b", "v"),
    "two tensors swapped": (swap, "b", "v"),
    "a bit flipped that the canary does not use": (flip, "b", "w"),
    "a tensor of the version before": (stale, "b", "v"),
}


@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_a_planted_fault_is_rejected_and_the_previous_version_continues(rig: Rig, fault: str) -> None:
    tamper, part, tensor = PLANTED[fault]
    rig.serve(0)
    once = [tamper]

    def tamper_once(stored: dict[str, torch.Tensor]) -> None:
        if once:
            once.pop()(stored)

    rig.scripted.tamper = tamper_once
    with pytest.raises(ProofMismatch) as failed:
        rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    assert (failed.value.part, failed.value.tensor) == (part, tensor)
    assert rig.replica.info().policy_version == 0
    rig.submit(request())
    assert set(rig.finished("g.0").versions) == {0}


def test_when_the_version_before_does_not_come_back_nothing_is_generated(rig: Rig) -> None:
    rig.serve(0)
    rig.in_flight(request(num=50))
    rig.scripted.tamper = flip
    with pytest.raises(ProofMismatch):
        rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    assert rig.replica.info().policy_version == -1 and rig.scripted.num_in_flight == 0
    with pytest.raises(WeightsNotProven):
        rig.submit(request("g.1"))
    kept = rig.chunk("g.0")
    assert kept is not None and kept.tokens and not kept.finished, "its tokens are there to be moved"
    rig.scripted.tamper = lambda stored: None
    rig.replica.update_weights(1, 1, rig.publish(2), [rig.holder])
    assert rig.replica.info().policy_version == 2


def test_a_request_that_came_during_a_failed_update_is_not_started_on_its_weights(rig: Rig) -> None:
    rig.serve(0)
    came: list[str] = []

    def tamper(stored: dict[str, torch.Tensor]) -> None:
        flip(stored)
        if not came:
            came.append("g.1")
            rig.submit(request("g.1"))

    rig.scripted.tamper = tamper
    with pytest.raises(ProofMismatch):
        rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    rig.replica._thread.call(lambda engine: None, PATIENCE_SECONDS, "do what is queued")
    assert came and rig.scripted.num_in_flight == 0
    assert rig.replica.tokens_since(1, {"g.1": 0}).unknown == ("g.1",)


def test_storage_that_changed_unexpectedly_fails_the_next_proof(rig: Rig) -> None:
    manifest = rig.serve(0)
    rig.scripted.storage_tensors["w"].view(torch.int32)[1] ^= 1
    with pytest.raises(ProofMismatch, match=r"proof \(b\) fails at w"):
        rig.replica.update_weights(1, 1, manifest, [])
    assert rig.replica.info().policy_version == 0, "loaded again from the verified bytes"


def test_canary_unlike_the_trainers_is_refused(rig: Rig) -> None:
    manifest = build_manifest(1, weights(1), [-9.0, -9.0])
    rig.trainer.publish(manifest, weights(1))
    with pytest.raises(ProofMismatch, match=r"proof \(c\)"):
        rig.replica.update_weights(1, 1, manifest, [rig.holder])
    assert rig.replica.info().policy_version == -1


# --- transfers


def test_a_version_of_which_a_part_arrived_is_not_applied_and_the_rest_is_fetched_later(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    rig.serve(0)
    manifest = build_manifest(1, weights(1), canary_of(weights(1)))
    asked = list[str]()

    def die_at_the_second(puller: str, name: str) -> None:
        asked.append(name)
        if len(asked) == 2:
            dying.close(wait_seconds=0.0)

    dying = TensorServer(TOKEN, on_tensor=die_at_the_second)
    dying.publish(manifest, weights(1))
    with pytest.raises(TransferFailed, match="1 of 2 tensors are kept"):
        rig.replica.update_weights(1, 1, manifest, [dying.holder(TRAINER, 1)])
    assert rig.replica.info().policy_version == 0 and rig.scripted.loads == 1
    asked.clear()
    other = TensorServer(TOKEN, on_tensor=lambda puller, name: asked.append(name))
    other.publish(manifest, weights(1))
    rig.replica.update_weights(1, 1, manifest, [other.holder(ReplicaId("trainer/1"), 1)])
    assert rig.replica.info().policy_version == 1 and len(asked) == 1
    other.close()


def test_a_holder_that_sends_other_bytes_is_reported_and_the_version_comes_from_another(rig: Rig) -> None:
    manifest = rig.publish(5)
    bad = TensorServer(TOKEN, on_tensor=lambda puller, name: -1.0)
    bad.publish(manifest, weights(5))
    before = parse_page(reporter.page_bytes()).exception
    rig.replica.update_weights(1, 1, manifest, [bad.holder(ReplicaId("trainer/1"), 3), rig.holder])
    bad.close()
    assert rig.replica.info().policy_version == 5
    report = parse_page(reporter.page_bytes()).exception
    assert report is not None and report != before
    holder, incarnation, version, reason = CorruptTransfer.parse(report.message) or ("", 0, 0, "")
    assert (holder, incarnation, version) == ("trainer/1", 3, 5) and reason.endswith(
        "bytes received have another digest"
    )


def test_a_relay_serves_verified_weights_after_the_trainers_death(make_rig: Callable[..., Rig]) -> None:
    first, late = make_rig(), make_rig(replica=ReplicaId("rollout/2"))
    manifest = first.serve(4)
    first.trainer.close()
    proof = late.replica.update_weights(1, 1, manifest, [first.holder, first.replica.info().holder])
    assert proof.holder == ROLLOUT and late.replica.info().policy_version == 4
    until_sent(first.replica.server, {("policy", 4, "rollout/2"): proof.bytes_received})


def test_generation_continues_while_weights_are_pulled(rig: Rig) -> None:
    rig.serve(0)
    inside, go = threading.Event(), threading.Event()

    def hold(puller: str, name: str) -> None:
        inside.set()
        assert go.wait(PATIENCE_SECONDS)

    slow = TensorServer(TOKEN, on_tensor=hold)
    manifest = build_manifest(1, weights(1), canary_of(weights(1)))
    slow.publish(manifest, weights(1))
    update = threading.Thread(target=rig.replica.update_weights, args=(1, 1, manifest, [slow.holder(TRAINER, 1)]))
    update.start()
    assert inside.wait(PATIENCE_SECONDS)
    rig.submit(request("during"))
    assert set(rig.finished("during").versions) == {0}
    rig.in_flight(request("across", 60, prompt_tokens=(1,)))
    go.set()
    update.join(PATIENCE_SECONDS)
    rig.go_on()
    assert set(rig.finished("across").versions) == {0, 1}
    rig.submit(request("after"))
    assert set(rig.finished("after").versions) == {1}
    slow.close()


def test_tokens_of_one_request_carry_the_version_that_made_each(rig: Rig) -> None:
    rig.serve(0)
    rig.in_flight(request(num=50), num_tokens=3)
    rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    rig.go_on()
    chunk = rig.finished("g.0")
    assert chunk.versions == (0,) * 3 + (1,) * 47
    assert all(logprob == -(1.0 + version) for logprob, version in zip(chunk.logprobs, chunk.versions, strict=True))


# --- who may call


@pytest.mark.parametrize("method", ["submit", "tokens_since", "ack", "list_requests", "update_weights"])
def test_calls_for_another_incarnation_are_refused(rig: Rig, method: str) -> None:
    manifest = rig.serve(0)
    arguments: dict[str, tuple[object, ...]] = {
        "submit": ([request()],),
        "tokens_since": ({},),
        "ack": ([],),
        "list_requests": (),
        "update_weights": (1, manifest, []),
    }
    for incarnation in (0, 2):
        with pytest.raises(StaleIncarnation, match=f"is meant for incarnation {incarnation}, this is incarnation 1"):
            getattr(rig.replica, method)(incarnation, *arguments[method])


def test_an_old_epoch_may_not_update(rig: Rig) -> None:
    rig.replica.update_weights(1, 5, rig.publish(0), [rig.holder])
    with pytest.raises(StaleIncarnation, match="epoch 4, this is epoch 5"):
        rig.replica.update_weights(1, 4, rig.publish(1), [rig.holder])


def test_a_promoted_standby_accepts_only_its_new_name_and_proves_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(replica=ReplicaId("standby/0"))
    manifest = rig.serve(2)
    rig.replica.promote(ROLLOUT, 4, "secret")
    rig.replica.promote(ROLLOUT, 4, "secret")  # reported twice: no harm
    info = rig.replica.info()
    assert (info.replica, info.incarnation, info.holder.replica) == (ROLLOUT, 4, ROLLOUT)
    with pytest.raises(StaleIncarnation):
        rig.replica.submit(1, [request()])
    proof = rig.replica.update_weights(4, 9, manifest, [])
    assert (proof.replica, proof.incarnation, proof.epoch, proof.bytes_received) == (ROLLOUT, 4, 9, 0)
    with pytest.raises(StaleIncarnation):
        rig.replica.promote(ROLLOUT, 3, "secret")
