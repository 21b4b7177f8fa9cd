"""The rollout replica around a scripted engine: who may call, what is kept, what happens when an update fails."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rolecall.core.errors import DeadlineExceeded, ProofMismatch, StaleIncarnation
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.digest import build_manifest, entries_digest, entries_of, tensor_digest
from rolecall.rl_runtime.engine import EngineBroken, EngineSettings, NewTokens
from rolecall.rl_runtime.protocol import Holder, Manifest, Request, TokenChunk
from rolecall.rl_runtime.rollout import NotProven, RolloutReplica
from rolecall.rl_runtime.token_book import BookFull, Limits, RequestRefused, TokenBook
from rolecall.rl_runtime.weights import TensorServer, TransferFailed
from rolecall.rl_runtime.worker_extension import Storage
from tests.support import eventually

TOKEN = "t"
END = 2
ROLLOUT, TRAINER = ReplicaId("rollout/1"), ReplicaId("trainer/0")


class ScriptedEngine:
    """Counts: each token is 3 + its place; the log-probability is minus the first weight. Ends at END after `num_max`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.end_tokens = (END,)
        self.going: dict[str, list[int]] = {}
        self.storage_tensors: dict[str, torch.Tensor] = {"w": torch.zeros(1)}
        self.claimed: dict[str, str] = {}
        self.loads = 0
        self.tamper: Callable[[dict[str, torch.Tensor]], None] = lambda stored: None
        self.hold = threading.Event()
        self.hold.set()
        self.fail: Exception | None = None
        self.seeds: dict[str, int] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self.going)

    def add(self, request_id: str, tokens: Sequence[int], *, num_new_max: int, seed: int) -> None:
        self.going[request_id] = [0, num_new_max]
        self.seeds[request_id] = seed

    def abort(self, request_ids: Sequence[str]) -> None:
        for r in request_ids:
            self.going.pop(r, None)

    def step(self) -> list[NewTokens]:
        assert self.hold.wait(10)
        if self.fail is not None:
            raise self.fail
        made = []
        for r, state in list(self.going.items()):
            state[0] += 1
            finished = state[0] >= state[1]
            if finished:
                del self.going[r]
            logprob = -float(self.storage_tensors["w"][0])
            made.append(
                NewTokens(
                    request_id=r, tokens=(3 + state[0] % 8,), logprobs=(logprob,), finish_reason="length" * finished
                )
            )
        time.sleep(0.001)
        return made

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        self.loads += 1
        self.claimed = {n: tensor_digest(t) for n, t in tensors.items()}
        stored = {n: t.clone() for n, t in tensors.items()}
        self.tamper(stored)
        self.storage_tensors.update(stored)
        return sorted(set(tensors) - set(stored))

    def storage(self) -> list[Storage]:
        entries = entries_of(self.storage_tensors)
        return [
            Storage(
                digest=entries_digest(entries),
                layout="l",
                digests=[(e.name, e.digest) for e in entries],
                uncovered=[],
                wrong=[e.name for e in entries if self.claimed.get(e.name, e.digest) != e.digest],
            )
        ]

    def canary(self) -> tuple[float, ...]:
        return canary_of(self.storage_tensors)

    def close(self) -> None:
        pass


def canary_of(tensors: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
    return (-float(tensors["w"][0]), -float(tensors["v"].sum()))


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([1.0 + version, 7.0]), "v": torch.full((3,), 0.5 * version)}


class Rig:
    """A replica with its scripted engine, and a trainer's weight port."""

    def __init__(self, tmp_path: Path, **options: object) -> None:
        (tmp_path / "config.json").write_text('{"vocab_size": 16}')
        self.engine: ScriptedEngine | None = None
        self.failures: list[BaseException] = []

        def make(settings: EngineSettings) -> ScriptedEngine:
            self.engine = ScriptedEngine(settings)
            return self.engine

        arguments: dict[str, object] = {
            "replica": ROLLOUT,
            "incarnation": 1,
            "token": TOKEN,
            "settings": EngineSettings(model_dir=str(tmp_path), max_model_len=64),
            "transfer_seconds": 2.0,
            "make_engine": make,
            "on_failure": self.failures.append,
            **options,
        }
        self.replica = RolloutReplica(**arguments)  # type: ignore[arg-type]
        self.trainer = TensorServer(TOKEN)

    def publish(self, version: int) -> Manifest:
        manifest = build_manifest(version, weights(version), canary_of(weights(version)))
        self.trainer.publish(manifest, weights(version))
        return manifest

    @property
    def holder(self) -> Holder:
        return self.trainer.holder(TRAINER, 1)

    def serve(self, version: int = 0) -> Manifest:
        manifest = self.publish(version)
        self.replica.update_weights(1, 1, manifest, [self.holder])
        return manifest

    def submit(self, *requests: Request) -> None:
        self.replica.submit(1, requests)

    def chunk(self, request_id: str, offset: int = 0) -> TokenChunk | None:
        pulled = self.replica.tokens_since(1, {request_id: offset})
        return pulled.chunks[0] if pulled.chunks else None

    def finished(self, request_id: str) -> TokenChunk:
        def done() -> bool:
            chunk = self.chunk(request_id)
            return chunk is not None and chunk.finished

        eventually(done, f"{request_id} is finished")
        chunk = self.chunk(request_id)
        assert chunk is not None
        return chunk

    @property
    def scripted(self) -> ScriptedEngine:
        assert self.engine is not None
        return self.engine


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.scripted.hold.set()
        rig.replica.close()
        rig.trainer.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


def request(request_id: str = "g.0", num: int = 5, **changes: object) -> Request:
    made = Request(request_id=request_id, group_id=GroupId("g"), prompt_tokens=(1, 3, 4), max_new_tokens=num, seed=11)
    return replace(made, **changes)  # type: ignore[arg-type]


# --- proof before service


def test_without_proven_weights_nothing_is_generated(rig: Rig) -> None:
    assert rig.replica.info().policy_version == -1
    with pytest.raises(NotProven, match="rollout/1#1 has no proven weights"):
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


def test_the_same_version_is_proven_anew_without_a_transfer(rig: Rig) -> None:
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
    "a bit flipped where the canary does not look": (flip, "b", "w"),
    "a tensor of the version before": (stale, "b", "v"),
}


@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_planted_fault_is_refused_and_the_version_before_goes_on(rig: Rig, fault: str) -> None:
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
    rig.submit(request(num=50))
    eventually(lambda: rig.chunk("g.0"), "first token")
    rig.scripted.tamper = flip
    with pytest.raises(ProofMismatch):
        rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    assert rig.replica.info().policy_version == -1 and rig.scripted.num_in_flight == 0
    with pytest.raises(NotProven):
        rig.submit(request("g.1"))
    kept = rig.chunk("g.0")
    assert kept is not None and kept.tokens and not kept.finished, "its tokens are there to be moved"
    rig.scripted.tamper = lambda stored: None
    rig.replica.update_weights(1, 1, rig.publish(2), [rig.holder])
    assert rig.replica.info().policy_version == 2


def test_storage_that_changed_behind_our_back_fails_the_next_proof(rig: Rig) -> None:
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


def test_relay_serves_what_it_verified_when_the_trainer_is_gone(make_rig: Callable[..., Rig]) -> None:
    first, late = make_rig(), make_rig(replica=ReplicaId("rollout/2"))
    manifest = first.serve(4)
    first.trainer.close()
    proof = late.replica.update_weights(1, 1, manifest, [first.holder, first.replica.info().holder])
    assert proof.holder == ROLLOUT and late.replica.info().policy_version == 4
    assert first.replica.server.bytes_sent() == {("policy", 4, "rollout/2"): proof.bytes_received}


def test_generation_goes_on_while_weights_are_pulled(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(transfer_seconds=10.0)
    rig.serve(0)
    inside, go = threading.Event(), threading.Event()

    def hold(puller: str, name: str) -> None:
        inside.set()
        assert go.wait(10)

    slow = TensorServer(TOKEN, on_tensor=hold)
    manifest = build_manifest(1, weights(1), canary_of(weights(1)))
    slow.publish(manifest, weights(1))
    update = threading.Thread(target=rig.replica.update_weights, args=(1, 1, manifest, [slow.holder(TRAINER, 1)]))
    update.start()
    assert inside.wait(5)
    rig.submit(request("during"))
    assert set(rig.finished("during").versions) == {0}
    rig.submit(request("across", 60, prompt_tokens=(1,)))
    eventually(lambda: rig.chunk("across"), "first token")
    go.set()
    update.join(5)
    rig.submit(request("after"))
    assert set(rig.finished("after").versions) == {1}
    slow.close()


def test_tokens_of_one_request_carry_the_version_that_made_each(rig: Rig) -> None:
    rig.serve(0)
    rig.scripted.hold.clear()
    rig.submit(request(num=50))
    rig.scripted.hold.set()
    eventually(lambda: rig.chunk("g.0"), "first token")
    rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    chunk = rig.finished("g.0")
    assert list(chunk.versions) == sorted(chunk.versions) and chunk.versions[0] == 0
    assert all(logprob == -(1.0 + version) for logprob, version in zip(chunk.logprobs, chunk.versions, strict=True))


# --- who may call


@pytest.mark.parametrize("method", ["submit", "tokens_since", "ack", "abort", "list_requests", "update_weights"])
def test_calls_for_another_incarnation_are_refused(rig: Rig, method: str) -> None:
    manifest = rig.serve(0)
    arguments: dict[str, tuple[object, ...]] = {
        "submit": ([request()],),
        "tokens_since": ({},),
        "ack": ([],),
        "abort": ([],),
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


def test_a_promoted_standby_answers_to_its_new_name_only_and_proves_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(replica=ReplicaId("standby/0"))
    manifest = rig.serve(2)
    rig.replica.promote(ROLLOUT, 4, "secret")
    rig.replica.promote(ROLLOUT, 4, "secret")  # told twice: no harm
    info = rig.replica.info()
    assert (info.replica, info.incarnation, info.holder.replica) == (ROLLOUT, 4, ROLLOUT)
    with pytest.raises(StaleIncarnation):
        rig.replica.submit(1, [request()])
    proof = rig.replica.update_weights(4, 9, manifest, [])
    assert (proof.replica, proof.incarnation, proof.epoch, proof.bytes_received) == (ROLLOUT, 4, 9, 0)
    with pytest.raises(StaleIncarnation):
        rig.replica.promote(ROLLOUT, 3, "secret")


# --- tokens are kept


def test_tokens_are_given_again_until_acknowledged(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request())
    whole = rig.finished("g.0")
    assert rig.finished("g.0") == whole
    tail = rig.chunk("g.0", 3)
    assert tail is not None and tail.tokens == whole.tokens[3:] and tail.offset == 3 and tail.finished
    rig.replica.ack(1, ["g.0", "never heard of"])
    assert rig.replica.tokens_since(1, {"g.0": 0}).unknown == ("g.0",)
    assert rig.replica.info().num_requests == 0


def test_a_prefix_is_kept_in_front_and_counts(rig: Rig) -> None:
    rig.serve(5)
    rig.submit(request(prefix_tokens=(9, 8), prefix_logprobs=(-0.5, -0.25), prefix_versions=(3, 4)))
    chunk = rig.finished("g.0")
    assert chunk.tokens[:2] == (9, 8) and len(chunk.tokens) == 5
    assert chunk.logprobs[:2] == (-0.5, -0.25) and chunk.versions == (3, 4, 5, 5, 5)


def test_going_on_behind_a_prefix_does_not_repeat_the_random_numbers(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request("a"), request("b", prefix_tokens=(9,), prefix_logprobs=(0.0,), prefix_versions=(0,)))
    rig.finished("a"), rig.finished("b")
    assert rig.scripted.seeds["a"] == 11 != rig.scripted.seeds["b"]


@pytest.mark.parametrize(("last", "num", "reason"), [(END, 5, "stop"), (9, 2, "length")])
def test_a_prefix_that_is_complete_is_finished_at_once(rig: Rig, last: int, num: int, reason: str) -> None:
    rig.serve(0)
    rig.submit(request(num=num, prefix_tokens=(9, last), prefix_logprobs=(0.0, 0.0), prefix_versions=(0, 0)))
    chunk = rig.finished("g.0")
    assert chunk.tokens == (9, last) and chunk.finish_reason == reason and not rig.scripted.seeds


def test_list_requests_has_everything_for_a_controller_without_memory(rig: Rig) -> None:
    rig.serve(0)
    first, second = request("a", 3), request("b", 60, prefix_tokens=(7,), prefix_logprobs=(0.0,), prefix_versions=(0,))
    rig.submit(first, second)
    rig.finished("a")
    held = {r.request_id: (r, c) for r, c in rig.replica.list_requests(1)}
    assert held["a"][0] == first and held["a"][1].finished
    assert held["b"][0] == second and held["b"][1].tokens[0] == 7 and held["b"][1].offset == 0


def test_a_request_told_twice_runs_once(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request())
    rig.submit(request())
    assert len(rig.finished("g.0").tokens) == 5 and rig.replica.info().tokens_generated == 5


def test_abort_stops_the_engine_on_it(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request(num=60))
    rig.replica.abort(1, ["g.0"])
    eventually(lambda: rig.scripted.num_in_flight == 0, "engine let go")


def test_control_calls_answer_while_the_engine_hangs(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request(num=60))
    eventually(lambda: rig.chunk("g.0"), "first token")
    rig.scripted.hold.clear()
    began = time.monotonic()
    assert rig.replica.tokens_since(1, {"g.0": 0}).chunks[0].tokens
    assert rig.replica.list_requests(1) and rig.replica.info().num_requests == 1
    rig.submit(request("g.1"))
    rig.replica.abort(1, ["g.1"])
    assert time.monotonic() - began < 10.0


def test_update_gives_up_on_a_hanging_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.rl_runtime.rollout.APPLY_SECONDS", 0.2)
    rig.serve(0)
    rig.submit(request(num=60))
    eventually(lambda: rig.chunk("g.0"), "first token")
    rig.scripted.hold.clear()
    with pytest.raises(DeadlineExceeded, match="the engine thread to apply version 1"):
        rig.replica.update_weights(1, 1, rig.publish(1), [rig.holder])
    rig.scripted.hold.set()
    assert set(rig.finished("g.0").versions) == {0}, "what was given up is not done later"


def test_a_broken_engine_says_so_and_keeps_its_tokens(rig: Rig) -> None:
    rig.serve(0)
    rig.submit(request(num=60))
    eventually(lambda: rig.chunk("g.0"), "first token")
    rig.scripted.fail = RuntimeError("no such kernel")
    eventually(lambda: rig.failures, "failure told")
    with pytest.raises(EngineBroken, match="no such kernel"):
        rig.submit(request("g.1"))
    assert rig.chunk("g.0") is not None


def test_on_step_runs_before_each_step_in_the_engine_thread(make_rig: Callable[..., Rig]) -> None:
    names = list[str]()
    rig = make_rig(on_step=lambda: names.append(threading.current_thread().name))
    rig.serve(0)
    rig.submit(request(num=5))
    rig.finished("g.0")
    assert names == ["engine"] * 5


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    def make(settings: EngineSettings) -> ScriptedEngine:
        raise EngineBroken("no memory")

    with pytest.raises(EngineBroken, match="no memory"):
        Rig(tmp_path, make_engine=make)


# --- limits of the book


def book(**limits: int) -> TokenBook:
    return TokenBook(limits=Limits(**limits), end_tokens=frozenset({END}), model_len_max=64, vocab_size=16)


BAD_REQUESTS = {
    "no prompt": ({"prompt_tokens": ()}, "has no prompt"),
    "no tokens asked": ({"max_new_tokens": 0}, "asks for no token"),
    "too long": ({"max_new_tokens": 62}, "may grow to 65 tokens, the engine takes 64"),
    "prefix without log-probabilities": ({"prefix_tokens": (3,)}, "do not fit together"),
    "prefix beyond the limit": (
        {"prefix_tokens": (3,) * 6, "prefix_logprobs": (0.0,) * 6, "prefix_versions": (0,) * 6},
        "or the limit",
    ),
    "token outside of the vocabulary": ({"prompt_tokens": (16,)}, "outside of the vocabulary of 16"),
    "negative token": ({"prompt_tokens": (-1,)}, "outside of the vocabulary"),
}


@pytest.mark.parametrize("fault", sorted(BAD_REQUESTS))
def test_bad_request_is_refused_and_its_batch_with_it(fault: str) -> None:
    changes, reason = BAD_REQUESTS[fault]
    held = book()
    with pytest.raises(RequestRefused, match=reason):
        held.take([request("good"), request("bad", **changes)])
    assert held.num_requests == 0


def test_too_many_requests_are_refused() -> None:
    held = book(requests_max=2)
    held.take([request("a"), request("b")])
    held.take([request("a")])
    with pytest.raises(BookFull, match="2 requests are held, 2 at most"):
        held.take([request("c")])
    held.forget(["a"])
    held.take([request("c")])


def test_too_many_unacknowledged_tokens_are_refused() -> None:
    held = book(unacked_tokens_max=3)
    held.take([request("a")])
    held.record([NewTokens(request_id="a", tokens=(3, 4, 5, 6), logprobs=(0.0,) * 4, finish_reason="length")], 0)
    with pytest.raises(BookFull, match="4 tokens are not acknowledged"):
        held.take([request("b")])
    held.forget(["a"])
    assert len(held.take([request("b")])) == 1


def test_tokens_of_a_forgotten_request_are_counted_but_not_kept() -> None:
    held = book()
    assert held.record([NewTokens(request_id="x", tokens=(3,), logprobs=(0.0,), finish_reason="")], 0) == 1
    assert held.tokens_generated == 1 and held.since({"x": 0}) == ((), ("x",))


def test_nothing_new_is_no_chunk() -> None:
    held = book()
    held.take([request("a")])
    assert held.since({"a": 0}) == ((), ())
