"""Rollout replicas with real engines, each in a process of its own: what weights, proofs and prefixes do for real.

The engines are started once and shared; a test begins with its own policy version, so that none sees another's.
"""

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.core.config.job import ModelConfig
from rolecall.core.errors import ProofMismatch
from rolecall.core.ids import GroupId, ReplicaId
from rolecall.rl_runtime.algorithms.objective import token_logprobs
from rolecall.rl_runtime.protocol.messages import (
    ENVIRONMENT_VERSION,
    GenerationRequest,
    Holder,
    Manifest,
    TokenChunk,
    WeightProof,
)
from rolecall.rl_runtime.rollout.engine import EngineBroken, EngineSettings, end_tokens, vocab_size
from rolecall.rl_runtime.rollout.rollout import WeightsNotProven
from rolecall.rl_runtime.trainer.model import load_model_folder, write_model_folder
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.port import TensorServer
from rolecall.rl_runtime.weights.proof import CANARY, ProofVerifier
from tests.rl_runtime.chat_model import WORDS, write_chat_model
from tests.rl_runtime.weight_port import until_sent
from tests.support import PATIENCE_SECONDS, eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.xdist_group("engines"),  # one worker runs them all: the engines start once
]

TOKEN = secrets.token_hex(16)
TRAINER = ReplicaId("trainer/0")
PROMPT = (1, 3, 4, 5, 6, 7, 8, 9, 13)
SLOW_STEP_SECONDS = 0.1
"""Added to each step while a test does something in mid-request: requests of 40 tokens and more then take seconds."""


class Remote:
    """One engine process."""

    def __init__(
        self, replica: str, folder: Path, model: Path, settings: EngineSettings | None = None, *, run: str = ""
    ) -> None:
        """`run`: a run directory, for an engine of several ranks."""
        self.replica = ReplicaId(replica)
        address, key = str(folder / f"{replica.replace('/', '-')}-{secrets.token_hex(4)}"), secrets.token_bytes(16)
        self._listener = Listener(address, authkey=key)
        environment = {**os.environ, "ENGINE_HOST_KEY": key.hex()}
        del environment["OMP_NUM_THREADS"]  # the engine must see to it by itself
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "engine_host.py"), address], env=environment
        )
        self._connection: Connection[Any, Any] | None = None
        self._arguments = {
            "replica": self.replica,
            "incarnation": 1,
            "token": TOKEN,
            "settings": settings or EngineSettings(model_dir=str(model), max_model_len=128),
            "run": run,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._connection is None:
                self._connection = self._listener.accept()
                self._connection.send(self._arguments)
            self._connection.send((name, arguments, options))
            assert self._connection.poll(120), f"{self.replica} does not answer {name}"
            kind, value = self._connection.recv()
            if kind == "error":
                raise value
            return value

        return call

    def end(self) -> None:
        """By a kill: an engine takes seconds to end by itself, one that nothing was asked of even more."""
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        if self._connection is not None:
            self._connection.close()
        self._listener.close()


class Stage:
    """A trainer's side: the reference model, whose weights change from version to version, and its weight port."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model_dir = folder, model
        self._versions = itertools.count()
        self.reference = load_model_folder(model)
        self.trainer = TensorServer(TOKEN)
        self.engines: dict[str, Remote] = {}

    def start(self, *replicas: str) -> None:
        for replica in replicas:
            if replica not in self.engines or self.engines[replica].process.poll() is not None:
                self.engines[replica] = Remote(replica, self._folder, self._model_dir)

    def engine(self, replica: str) -> Remote:
        self.start(replica)
        return self.engines[replica]

    @property
    def holder(self) -> Holder:
        return self.trainer.holder(TRAINER, 1)

    def publish(self, noise: float = 0.0) -> Manifest:
        """The next version, its weights moved by `noise`."""
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=noise)
        version = next(self._versions)
        weights = {n: p.detach() for n, p in self.reference.state_dict().items()}
        tokens = torch.tensor([CANARY])
        with torch.no_grad():
            logprobs, _ = token_logprobs(self.reference(tokens).logits, tokens)
        manifest = build_manifest(version, weights, logprobs[0, 1:].tolist())
        self.trainer.publish(manifest, weights)
        return manifest

    def update(self, engine: Remote, manifest: Manifest, *holders: Holder) -> WeightProof:
        proof = engine.update_weights(1, manifest.policy_version, manifest, list(holders) or [self.holder])
        assert isinstance(proof, WeightProof)
        return proof

    def score(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        """The reference model's log-probabilities of `tokens` behind `prompt`."""
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            log_probs = torch.log_softmax(self.reference(ids).logits[0, :-1], -1)
        found: list[float] = log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].tolist()
        return found

    def close(self) -> None:
        for engine in self.engines.values():
            engine.end()
        self.trainer.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("engines")
    write_model_folder(folder / "model", ModelConfig(num_layers=4), seed=0)
    made = Stage(folder, folder / "model")
    made.start("rollout/0", "rollout/1")
    yield made
    made.close()


@pytest.fixture
def a(stage: Stage) -> Remote:
    return stage.engine("rollout/0")


@pytest.fixture
def b(stage: Stage) -> Remote:
    return stage.engine("rollout/1")


def request(
    request_id: str,
    seed: int,
    num: int = 40,
    prefix: TokenChunk | None = None,
    prompt: tuple[int, ...] = PROMPT,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        group_id=GroupId("g"),
        prompt_tokens=prompt,
        max_response_tokens=num,
        seed=seed,
        prefix_tokens=prefix.tokens if prefix else (),
        prefix_logprobs=prefix.logprobs if prefix else (),
        prefix_versions=prefix.versions if prefix else (),
    )


def chunks(engine: Remote, *request_ids: str) -> dict[str, TokenChunk]:
    return {c.request_id: c for c in engine.tokens_since(1, dict.fromkeys(request_ids, 0)).chunks}


def finished(engine: Remote, *request_ids: str) -> dict[str, TokenChunk]:
    def done() -> bool:
        found = chunks(engine, *request_ids)
        return len(found) == len(request_ids) and all(c.finished for c in found.values())

    eventually(done, f"{len(request_ids)} requests are finished")
    found = chunks(engine, *request_ids)
    engine.ack(1, list(request_ids))
    return found


def largest_difference(a: Any, b: Any) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_an_engine_starts_without_weights_and_refuses_to_generate(stage: Stage, a: Remote) -> None:
    pid, seconds = a.started()
    assert pid == a.process.pid
    print(f"engine up {seconds:.1f} s after the interpreter's own imports")
    assert a.num_threads() == 1
    assert a.info().policy_version == -1
    with pytest.raises(WeightsNotProven):
        a.submit(1, [request("early", 0)])


def test_update_moves_the_canary_and_reloading_moves_it_by_nothing(stage: Stage, a: Remote) -> None:
    certifier = ProofVerifier()
    first = stage.publish()
    proof = stage.update(a, first)
    assert certifier.judge(first, proof).admitted
    assert proof.uncovered == () and proof.covered >= 35
    assert largest_difference(proof.canary_logprobs, first.canary_logprobs) < 1e-5
    again = stage.publish()  # the same weights as another version: loaded anew
    reloaded = stage.update(a, again)
    assert reloaded.canary_logprobs == proof.canary_logprobs and reloaded.storage_digest == proof.storage_digest
    assert reloaded.bytes_received == proof.bytes_received > 0
    moved = stage.publish(noise=1e-3)
    proof = stage.update(a, moved)
    assert largest_difference(proof.canary_logprobs, reloaded.canary_logprobs) > 1e-3
    assert certifier.judge(moved, proof).admitted


def test_two_engines_prove_the_same_to_the_bit(stage: Stage, a: Remote, b: Remote) -> None:
    certifier, manifest = ProofVerifier(), stage.publish(noise=1e-3)
    proofs = [stage.update(engine, manifest) for engine in (a, b)]
    verdicts = [certifier.judge(manifest, proof) for proof in proofs]
    assert [v.admitted for v in verdicts] == [True, True] and "equals rollout/0" in verdicts[1].because
    assert proofs[0].layout == proofs[1].layout and proofs[0].storage == proofs[1].storage


def test_log_probabilities_are_the_trainers_and_the_end_token_is_kept(stage: Stage, a: Remote) -> None:
    manifest = stage.publish()
    stage.update(a, manifest)
    ids = [f"score.{i}" for i in range(8)]
    a.submit(1, [request(i, n) for n, i in enumerate(ids)])
    for chunk in finished(a, *ids).values():
        assert largest_difference(chunk.logprobs, stage.score(PROMPT, chunk.tokens)) < 1e-5
        assert (chunk.tokens[-1] == 2) == (chunk.finish_reason == "stop") and 2 not in chunk.tokens[:-1]
        assert chunk.finish_reason == "stop" or len(chunk.tokens) == 40


def test_more_prompts_than_fit_into_one_step_are_all_served(stage: Stage, a: Remote) -> None:
    manifest = stage.publish()
    stage.update(a, manifest)
    # 48 x 80 tokens, and a step takes 2048: a prompt that were begun in one and ended in the next would break the
    # engine.
    ids = [f"long.{n}" for n in range(48)]
    prompts = [(1, *(3 + (n * 7 + i * i) % 10 for i in range(79))) for n in range(len(ids))]
    a.submit(1, [replace(request(i, n, num=4), prompt_tokens=prompts[n]) for n, i in enumerate(ids)])
    assert all(len(chunk.tokens) == 4 or chunk.tokens[-1] == 2 for chunk in finished(a, *ids).values())


def test_same_seed_same_tokens_on_another_engine(stage: Stage, a: Remote, b: Remote) -> None:
    manifest = stage.publish()
    made = []
    for engine in (a, b):
        stage.update(engine, manifest)
        engine.submit(1, [request("same", 7)])
        made.append(finished(engine, "same")["same"])
    assert made[0].tokens == made[1].tokens


def test_a_prefix_continues_at_another_engine_with_equal_log_probabilities(stage: Stage, a: Remote, b: Remote) -> None:
    manifest = stage.publish()
    for engine in (a, b):
        stage.update(engine, manifest)
    a.slow_down(SLOW_STEP_SECONDS)
    ids = [f"move.{i}" for i in range(6)]
    a.submit(1, [request(i, n) for n, i in enumerate(ids)])
    eventually(lambda: len(chunks(a, *ids)) == len(ids), "tokens of all")
    prefixes = chunks(a, *ids)
    a.ack(1, ids)
    a.slow_down(0.0)
    b.submit(1, [request(i, n, prefix=prefixes[i]) for n, i in enumerate(ids)])
    for request_id, whole in finished(b, *ids).items():
        prefix = prefixes[request_id]
        assert whole.tokens[: len(prefix.tokens)] == prefix.tokens
        assert largest_difference(whole.logprobs, stage.score(PROMPT, whole.tokens)) < 1e-5
    assert a.tokens_since(1, {ids[0]: 0}).unknown == (ids[0],)


def test_a_window_ends_and_the_answer_continues_after_it_at_another_engine(stage: Stage, a: Remote, b: Remote) -> None:
    """Window after window, each elsewhere and under a later version: every token has what its own version gives it."""
    ids = [f"window.{i}" for i in range(4)]
    held: dict[str, TokenChunk | None] = dict.fromkeys(ids)
    wanted: dict[str, list[float]] = {i: [] for i in ids}
    for limit, engine in [(6, a), (12, b), (18, a)]:
        stage.update(engine, stage.publish(noise=5e-3))
        going = [i for i in ids if not (c := held[i]) or c.finish_reason != "stop"]
        engine.submit(1, [request(i, n, num=limit, prefix=held[i]) for n, i in enumerate(ids) if i in going])
        for request_id, chunk in finished(engine, *going).items():
            before = held[request_id]
            assert before is None or chunk.tokens[: len(before.tokens)] == before.tokens
            assert chunk.finish_reason == ("stop" if chunk.tokens[-1] == 2 else "length") and len(chunk.tokens) <= limit
            wanted[request_id] += stage.score(PROMPT, chunk.tokens)[len(wanted[request_id]) :]
            assert largest_difference(chunk.logprobs, wanted[request_id]) < 1e-5
            held[request_id] = chunk
    assert {len(set(c.versions)) for c in held.values() if c} >= {3}, "no answer got through all windows"


def test_a_conversation_goes_on_behind_its_environments_tokens_and_at_another_engine(
    stage: Stage, a: Remote, b: Remote
) -> None:
    manifest = stage.publish()
    for engine in (a, b):
        stage.update(engine, manifest)
    said, marks = (13, 1, 5, 2), (ENVIRONMENT_VERSION,) * 4
    ids = [f"talk.{i}" for i in range(4)]
    a.submit(1, [request(i, n, num=6) for n, i in enumerate(ids)])
    eventually(lambda: sum(c.finished for c in chunks(a, *ids).values()) == len(ids), "the first turns")
    first = chunks(a, *ids)
    turns = {
        i: replace(c, tokens=c.tokens + said, logprobs=(*c.logprobs, *[0.0] * 4), versions=c.versions + marks)
        for i, c in first.items()
    }
    a.slow_down(SLOW_STEP_SECONDS)
    a.submit(1, [request(i, n, num=60, prefix=turns[i]) for n, i in enumerate(ids)])  # in place of the first turn
    eventually(lambda: all(len(c.tokens) > len(turns[i].tokens) for i, c in chunks(a, *ids).items()), "the next turns")
    streamed = chunks(a, *ids)
    a.ack(1, ids)
    a.slow_down(0.0)
    b.submit(1, [request(i, n, num=60, prefix=streamed[i]) for n, i in enumerate(ids)])
    for request_id, whole in finished(b, *ids).items():
        before, turn = streamed[request_id], turns[request_id]
        assert whole.tokens[: len(before.tokens)] == before.tokens and before.tokens[: len(turn.tokens)] == turn.tokens
        own = [v != ENVIRONMENT_VERSION for v in whole.versions]
        assert own == [not len(turn.tokens) - 4 <= at < len(turn.tokens) for at in range(len(own))]
        wanted = [p if mine else 0.0 for p, mine in zip(stage.score(PROMPT, whole.tokens), own, strict=True)]
        assert largest_difference(whole.logprobs, wanted) < 1e-5


def test_each_token_of_a_request_in_flight_is_computed_by_its_version_on_the_whole_prefix(
    stage: Stage, a: Remote
) -> None:
    """The update comes in mid-request; the cache of the older version is made again, so every token can be scored."""
    before = stage.publish()
    stage.update(a, before)
    a.slow_down(SLOW_STEP_SECONDS)
    ids = [f"across.{i}" for i in range(8)]
    a.submit(1, [request(i, 100 + n, num=100) for n, i in enumerate(ids)])
    eventually(lambda: len(chunks(a, *ids)) == len(ids), "first tokens")
    old_scores = stage.score
    old = {k: v.clone() for k, v in stage.reference.state_dict().items()}
    after = stage.publish(noise=5e-3)
    stage.update(a, after)
    a.slow_down(0.0)
    done = finished(a, *ids)
    new_logprobs = {i: stage.score(PROMPT, c.tokens) for i, c in done.items()}
    new = {k: v.clone() for k, v in stage.reference.state_dict().items()}
    stage.reference.load_state_dict(old)
    old_logprobs = {i: old_scores(PROMPT, c.tokens) for i, c in done.items()}
    stage.reference.load_state_dict(new)
    versions = {v for c in done.values() for v in c.versions}
    assert versions == {before.policy_version, after.policy_version}
    for i, chunk in done.items():
        by_version = {before.policy_version: old_logprobs[i], after.policy_version: new_logprobs[i]}
        wanted = [by_version[v][place] for place, v in enumerate(chunk.versions)]
        assert largest_difference(chunk.logprobs, wanted) < 1e-5


# --- planted faults: which part of the proof sees which (the table in proof.py)

SEEN_BY_ITSELF = {
    "skip": ("b", "layers.1.input_layernorm"),
    "swap": ("b", "mlp.down_proj"),
    "stale": ("b", "layers.1.input_layernorm"),
}


@pytest.mark.parametrize("fault", sorted(SEEN_BY_ITSELF))
def test_fault_in_loading_is_seen_by_storage_against_the_bytes_received(stage: Stage, a: Remote, fault: str) -> None:
    part, tensor = SEEN_BY_ITSELF[fault]
    good = stage.publish(noise=1e-3)
    stage.update(a, good)
    a.plant_in_next_load(fault)
    with pytest.raises(ProofMismatch) as failed:
        stage.update(a, stage.publish(noise=1e-3))
    assert failed.value.part == part and tensor in failed.value.tensor
    assert a.info().policy_version == good.policy_version
    a.submit(1, [request("still", 0)])
    assert set(finished(a, "still")["still"].versions) == {good.policy_version}


@pytest.mark.parametrize("fault", ["swap", "stale"])
def test_fault_in_loading_is_seen_by_the_canary_when_storage_cannot_be_judged(
    stage: Stage, a: Remote, fault: str
) -> None:
    good = stage.publish(noise=1e-3)
    stage.update(a, good)
    a.plant_in_next_load(fault, blind=True)
    with pytest.raises(ProofMismatch) as failed:
        stage.update(a, stage.publish(noise=1e-2))
    assert failed.value.part == "c"
    assert a.info().policy_version == good.policy_version


@pytest.mark.parametrize(("fault", "tensor"), [("bit", "layers.2.self_attn.qkv_proj"), ("row", "embed_tokens")])
def test_damage_after_loading_is_seen_by_the_engine_itself_and_healed(
    stage: Stage, a: Remote, fault: str, tensor: str
) -> None:
    manifest = stage.publish(noise=1e-3)
    proof = stage.update(a, manifest)
    a.damage_storage(fault)
    with pytest.raises(ProofMismatch) as failed:
        stage.update(a, manifest)
    assert failed.value.part == "b" and tensor in failed.value.tensor
    healed = stage.update(a, manifest)
    assert healed.storage_digest == proof.storage_digest and healed.canary_logprobs == proof.canary_logprobs


def test_unused_row_is_seen_only_by_comparison_with_a_certified_replica(stage: Stage, a: Remote, b: Remote) -> None:
    certifier, manifest = ProofVerifier(), stage.publish(noise=1e-3)
    good = stage.update(a, manifest)
    assert certifier.judge(manifest, good).admitted
    stage.update(b, manifest)
    b.damage_storage("row", blind=True)
    bad = stage.update(b, manifest)
    assert bad.received_digest == manifest.digest and bad.canary_logprobs == good.canary_logprobs
    verdict = certifier.judge(manifest, bad)
    assert not verdict.admitted and verdict.part == "b" and "embed_tokens" in verdict.tensor


# --- relay and death


def test_new_rollout_comes_up_from_another_rollout_when_the_trainers_host_is_dead(
    stage: Stage, a: Remote, b: Remote
) -> None:
    certifier, manifest = ProofVerifier(), stage.publish(noise=1e-3)
    alone = TensorServer(TOKEN)
    alone.publish(manifest, {n: p.detach() for n, p in stage.reference.state_dict().items()})
    dead = alone.holder(TRAINER, 1)
    first = stage.update(a, manifest, dead)
    version = manifest.policy_version
    until_sent(alone, {("policy", version, "rollout/0"): first.bytes_received})
    alone.close()
    relay = a.info().holder
    late = stage.update(b, manifest, dead, relay)
    assert [certifier.judge(manifest, p).admitted for p in (first, late)] == [True, True]
    assert (first.holder, late.holder) == (TRAINER, a.replica)
    assert late.bytes_received == first.bytes_received
    sent = ("policy", version, "rollout/1"), late.bytes_received
    eventually(lambda: sent in a.bytes_sent().items(), "the relay's own thread to count what it sent")


def test_kill_in_mid_generation_loses_no_token_that_was_streamed(stage: Stage, a: Remote, b: Remote) -> None:
    manifest = stage.publish()
    for engine in (a, b):
        stage.update(engine, manifest)
    b.slow_down(SLOW_STEP_SECONDS)
    ids = [f"kill.{i}" for i in range(8)]
    requests = {i: request(i, n, num=80) for n, i in enumerate(ids)}
    b.submit(1, list(requests.values()))
    eventually(lambda: len(chunks(b, *ids)) == len(ids), "tokens of all")
    streamed = chunks(b, *ids)
    os.kill(b.process.pid, signal.SIGKILL)
    assert b.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    moved = [request(i, requests[i].seed, num=80, prefix=streamed[i]) for i in ids]
    a.submit(1, moved)
    whole = finished(a, *ids)
    assert any(not streamed[i].finished for i in ids), "the kill came in the middle"
    for i in ids:
        n = len(streamed[i].tokens)
        assert (whole[i].tokens[:n], whole[i].logprobs[:n]) == (streamed[i].tokens, streamed[i].logprobs)
        assert largest_difference(whole[i].logprobs, stage.score(PROMPT, whole[i].tokens)) < 1e-5
    b.end()


# --- without an engine


def test_settings_come_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 16, "eos_token_id": [2, 3]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert end_tokens(tmp_path) == (2, 3, 5) and vocab_size(EngineSettings(model_dir=str(tmp_path))) == 16
    (tmp_path / "config.json").write_text('{"vocab_size": 16, "eos_token_id": null}')
    (tmp_path / "generation_config.json").unlink()
    assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 20}, "eos_token_id": 2}')
    assert vocab_size(EngineSettings(model_dir=str(tmp_path))) == 20
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    with pytest.raises(EngineBroken, match="has no vocab_size"):
        vocab_size(EngineSettings(model_dir=str(tmp_path)))


def test_the_tokenizers_end_token_ends_an_answer_too(tmp_path: Path) -> None:
    """Of many chat models it ends a turn, and config.json has the end of a text."""
    write_chat_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    assert end_tokens(tmp_path) == (0, WORDS.index("<end>"))
