"""Sampling settings in a real engine: its log-probabilities are the trainer's of the same distribution, and a stop text
ends an answer.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rolecall.core.config.data import SamplingConfig
from rolecall.rl_runtime.algorithms.objective import token_logprobs
from rolecall.rl_runtime.algorithms.sampled_distribution import sampled_logits
from rolecall.rl_runtime.controller.rollout_pool import check_chunks
from rolecall.rl_runtime.rollout.engine import EngineSettings
from tests.rl_runtime.chat_model import WORDS, write_chat_model
from tests.rl_runtime.rollout.test_engine import Remote, Stage, finished, request

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.xdist_group("engines")]

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.8, top_k=12, stop=("yes",))
PROMPT = (1, 3, 6, 10)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("sampling")
    made = Stage(folder, write_chat_model(folder / "model", seed=3))
    settings = EngineSettings(model_dir=str(folder / "model"), max_model_len=64, sampling=SAMPLING)
    made.engines["rollout/0"] = Remote("rollout/0", folder, Path(settings.model_dir), settings)
    yield made
    made.close()


def test_log_probabilities_are_of_what_is_sampled_from_and_a_stop_text_ends_an_answer(stage: Stage) -> None:
    engine, manifest = stage.engine("rollout/0"), stage.publish()
    stage.update(engine, manifest)
    ids = [f"sampled.{i}" for i in range(24)]
    engine.submit(1, [request(i, n, prompt=PROMPT) for n, i in enumerate(ids)])
    answers = finished(engine, *ids).values()
    stop = WORDS.index("yes")
    for chunk in answers:
        tokens = torch.tensor([[*PROMPT, *chunk.tokens]])
        with torch.no_grad():
            logits = sampled_logits(stage.reference(tokens).logits, tokens, SAMPLING)
            logprobs, _ = token_logprobs(logits, tokens)
        assert chunk.logprobs == pytest.approx(logprobs[0, len(PROMPT) :].tolist(), abs=1e-5)
        assert stop not in chunk.tokens[:-1], "an answer ends at its stop text, which belongs to it"
        assert (chunk.tokens[-1] in (stop, 2)) == (chunk.finish_reason == "stop")
    assert any(c.tokens[-1] == stop for c in answers)
    chosen = torch.log_softmax(stage.reference(torch.tensor([PROMPT])).logits[0, -1] / SAMPLING.temperature, -1)
    least = chosen.topk(SAMPLING.top_k).values[-1].item()
    assert all(chosen[c.tokens[0]].item() >= least for c in answers), "nothing outside of the top k"


def test_a_greedy_request_beside_sampled_ones_gets_the_most_probable_tokens(stage: Stage) -> None:
    engine, manifest = stage.engine("rollout/0"), stage.publish()
    stage.update(engine, manifest)
    greedy = replace(request("greedy", 1, prompt=PROMPT), temperature=0.0)
    again = replace(request("again", 2, prompt=PROMPT), temperature=0.0)
    engine.submit(1, [request("sampled.0", 3, prompt=PROMPT), greedy, again, request("sampled.1", 4, prompt=PROMPT)])
    answers = finished(engine, "greedy", "again", "sampled.0", "sampled.1")
    check_chunks(answers.values(), len(WORDS))
    tokens = answers["greedy"].tokens
    assert tokens == answers["again"].tokens, "whatever their seeds are"
    with torch.no_grad():
        logits = stage.reference(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == tuple(logits.argmax(-1).tolist())
