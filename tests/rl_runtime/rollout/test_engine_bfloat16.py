"""A real engine that computes in bfloat16, with merged adapters: it proves the bits that a trainer sent, and its
log-probabilities are the trainer's within the tolerance of the dtype.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rolecall.core.config.job import parse_job
from rolecall.core.errors import ProofMismatch
from rolecall.core.policy_health import LOG_RATIO_ALARMS
from rolecall.rl_runtime.rollout.engine import EngineSettings
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.state import first_state
from rolecall.rl_runtime.weights.digest import build_manifest
from rolecall.rl_runtime.weights.proof import CANARY, CANARY_TOLERANCE, ProofVerifier
from tests.rl_runtime.chat_model import write_chat_model
from tests.rl_runtime.rollout.test_engine import TRAINER, Remote, Stage, finished, request

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.xdist_group("engines")]

PROMPT = (1, 3, 6, 10)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("bfloat16")
    made = Stage(folder, write_chat_model(folder / "model", seed=3))
    settings = EngineSettings(model_dir=str(folder / "model"), max_model_len=64, dtype="bfloat16")
    made.engines["rollout/0"] = Remote("rollout/0", folder, Path(settings.model_dir), settings)
    yield made
    made.close()


def test_what_was_sent_is_proven_and_computes_what_the_trainer_computes(stage: Stage) -> None:
    model = {"path": str(stage._model_dir), "dtype": "bfloat16"}
    job = parse_job({"model": model, "data": {"path": "x.jsonl"}, "reward": "exact", "lora": {"rank": 2}})
    state = first_state(job, vocabulary(job.model, None), replica=TRAINER)
    torch.manual_seed(1)
    with torch.no_grad():
        for master in state.policy.masters:
            master.add_(torch.randn_like(master), alpha=0.1)
    state.policy.masters_changed()
    weights = state.policy_tensors(0)
    manifest = build_manifest(0, weights, state.canary_logprobs(CANARY))
    assert {e.dtype for e in manifest.tensors} == {"bfloat16"}
    stage.trainer.publish(manifest, weights)
    engine = stage.engine("rollout/0")
    proof = stage.update(engine, manifest)
    assert ProofVerifier().judge(manifest, proof).admitted and not proof.uncovered
    digests = {e.name: e.digest for e in manifest.tensors}
    down = "model.layers.0.mlp.down_proj.weight"
    assert dict(proof.storage)[down] == digests[down], "the engine computes with the very bits"
    engine.submit(1, [request(f"r.{i}", i, prompt=PROMPT) for i in range(8)])
    for chunk in finished(engine, *(f"r.{i}" for i in range(8))).values():
        wanted = state.canary_logprobs((*PROMPT, *chunk.tokens))[len(PROMPT) - 1 :]
        apart = max(abs(a - b) for a, b in zip(chunk.logprobs, wanted, strict=True))
        assert apart < min(LOG_RATIO_ALARMS["bfloat16"], CANARY_TOLERANCE["bfloat16"])
    other = build_manifest(1, weights, [x - 1.5 for x in manifest.canary_logprobs])
    stage.trainer.publish(other, weights)
    with pytest.raises(ProofMismatch, match=r"canary differ .* \(tolerance 0.1 in bfloat16\)"):
        stage.update(engine, other)
