"""The built-in tasks are learnt from random weights by every algorithm, with samples as stale as the controller allows.

One process, no engine: the sampler is the library's model with the trainer's weights of two versions ago.

pytest tests/rl_runtime/algorithms/test_learning.py
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import BatchNotFilled
from rolecall.core.policy_health import LOG_RATIO_ALARM
from rolecall.rl_runtime.protocol.messages import EndReason
from rolecall.rl_runtime.tasks.reward_worker import task_of
from rolecall.rl_runtime.tasks.task import group_number, group_start
from rolecall.rl_runtime.trainer.model import write_model_folder
from tests.rl_runtime.learning import BatchGenerator, GeneratedSequence, ModelSequenceGenerator, examine, learn

KNOWS_PARITY = 0.65
"""Letters guessed at random and the end in its place earn (12 / 2 + 1) / 13 = 0.54: more takes looking at the digits.
Eleven runs over six seeds and staleness 0 to 2 ended between 0.75 and 1.0 after 80 steps; the 0.75 was 1.0 after
100."""
TINY = {"hidden_size": 32, "intermediate_size": 64}


def writer_of(job: JobConfig, folder: Path) -> ModelSequenceGenerator:
    write_model_folder(folder, job.model, 0, job.task.name)
    return ModelSequenceGenerator(folder, eos=task_of(job).vocab.eos, seed=job.seed)


@pytest.mark.long
@pytest.mark.timeout(900)  # about 30 s of CPU each, on machines that may be shared
@pytest.mark.parametrize(("seed", "staleness"), [(1, 0), (2, 2)])
def test_default_settings_learn_from_random_weights(tmp_path: Path, seed: int, staleness: int) -> None:
    job = parse_job({"seed": seed})
    points = list(learn(job, writer_of(job, tmp_path), num_steps=80, staleness=staleness))
    rewards = [p.reward or 0.0 for p in points]
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-5:]) / 5 > KNOWS_PARITY, [round(r, 2) for r in rewards]
    assert max(p.result.log_ratio_max or 0.0 for p in points) < LOG_RATIO_ALARM


SMALL = {"hidden_size": 64, "intermediate_size": 128}
LEARNS = [
    ({"name": "dapo"}, {"num_digits": 8}),
    ({"name": "ppo"}, {"num_digits": 8}),
    ({"name": "tppo", "window_tokens": 10}, {"num_digits": 8}),
    ({"name": "dapo"}, {"name": "long_addition", "num_digits": 6}),
    ({"name": "ppo"}, {"name": "long_addition", "num_digits": 6}),
    ({"name": "tppo", "window_tokens": 6}, {"name": "long_addition", "num_digits": 6}),
]
"""With a smaller model and shorter answers, which learn alike; T-PPO's windows cut some of them."""
LEARNED = 0.65
"""Letters guessed at random earn 0.56 of 8 digits; of six places, right lengths and nothing else less than 0.6."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("algorithm", "task"), LEARNS, ids=[f"{a['name']}-{t.get('name', 'digit_parity')}" for a, t in LEARNS]
)
def test_every_algorithm_learns_both_tasks(tmp_path: Path, algorithm: dict[str, Any], task: dict[str, Any]) -> None:
    job = parse_job({"seed": 103, "model": SMALL, "task": task, "algorithm": algorithm})
    points = learn(job, writer_of(job, tmp_path), num_steps=140, staleness=2)
    rewards = [p.reward for p in points if p.reward is not None]
    assert sum(rewards[:5]) / 5 < 0.3
    assert max(sum(rewards[i : i + 5]) / 5 for i in range(len(rewards) - 4)) > LEARNED, [round(r, 2) for r in rewards]


ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dapo": {"at_refill_limit": "take"},
    "ppo": {"kl_coefficient": 0.01},
    "tppo": {"window_tokens": 2},
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("task", ["digit_parity", "long_addition"])
def test_same_seed_same_curve_and_the_ratio_of_fresh_samples_is_one(tmp_path: Path, name: str, task: str) -> None:
    value = {"task": {"name": task, "num_digits": 2}, "model": TINY, "algorithm": {"name": name, **ALGORITHMS[name]}}
    job = parse_job(value)

    def curve() -> list[tuple[float | None, float, float | None]]:
        points = learn(job, writer_of(job, tmp_path), num_steps=3, staleness=0)
        return [(p.reward, p.result.grad_norm, p.result.log_ratio_max) for p in points]

    first = curve()
    assert first == curve()
    assert all(grad_norm > 0 for _, grad_norm, _ in first)
    assert max(ratio or 0.0 for *_, ratio in first) < 1e-4


class Dictated:
    """Answers with the lines given by the test; else with the exact answer of the task."""

    version = 7

    def __init__(self, job: JobConfig, wrong: Sequence[int] = ()) -> None:
        self.task, self.wrong = task_of(job), set(wrong)
        self.written: list[tuple[int, ...]] = []

    def load(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        del version, weights

    def write(self, lines: Sequence[GeneratedSequence], upto: Sequence[int]) -> list[GeneratedSequence]:
        done = []
        for line, limit in zip(lines, upto, strict=True):
            answer = self.task.answer(line.prompt)
            if len(self.written) in self.wrong:
                answer = (self.task.vocab.pad, *answer[1:])
            self.written.append(line.prompt)
            tokens = answer[len(line.tokens) : limit]
            done.append(line.continued(tokens, [-0.5] * len(tokens), self.version))
        return done


def dapo(**settings: Any) -> JobConfig:
    small = {"group_size": 2, "microbatches_per_step": 2, "groups_per_microbatch": 2, "refills_max": 3}
    return parse_job({"task": {"num_digits": 4}, "algorithm": {"name": "dapo", **small, **settings}})


def test_groups_without_a_learning_signal_are_regenerated_until_the_batch_is_full() -> None:
    job = dapo()
    made = BatchGenerator(job, task_of(job), Dictated(job, wrong=(0, 5, 8, 9, 10, 12))).generate()
    # Two samples a group: 0, 5, 10 and 12 make groups 0, 2, 5 and 6 unequal; in group 4 both are wrong.
    assert [group_number(g.group_id) for g in made.groups] == [0, 2, 5, 6]
    assert (made.num_groups, made.num_filtered, len(made.over)) == (7, 3, 14)


def test_no_full_batch_within_the_limit_is_an_error_or_takes_the_newest() -> None:
    job = dapo()
    with pytest.raises(BatchNotFilled, match=r"12 groups were generated, and only 1 of the 4 .* 11 all right"):
        BatchGenerator(job, task_of(job), Dictated(job, wrong=(0,))).generate()
    job = dapo(at_refill_limit="take")
    made = BatchGenerator(job, task_of(job), Dictated(job, wrong=(0,))).generate()
    assert [group_number(g.group_id) for g in made.groups] == [0, 9, 10, 11]
    assert (made.num_groups, made.num_filtered) == (12, 8)


def test_windows_cover_every_token_once_and_slots_are_filled_at_once() -> None:
    small = {"microbatches_per_step": 2, "groups_per_microbatch": 3, "window_tokens": 3}
    job = parse_job({"task": {"name": "long_addition"}, "algorithm": {"name": "tppo", **small}})
    writer = Dictated(job)
    source = BatchGenerator(job, writer.task, writer)
    fresh: dict[int, list[tuple[int, int]]] = {}
    over = set()
    for _ in range(100):
        groups = source.generate().groups
        assert len(groups) == 6, "as many trajectories in every step"
        for group in groups:
            (sample,) = group.samples
            number, start = group_number(group.group_id), group_start(group.group_id)
            assert sample.first_fresh == start and number not in over
            fresh.setdefault(number, []).append((start, len(sample.tokens)))
            assert sample.tokens == writer.task.answer(group.prompt_tokens)[: len(sample.tokens)]
            if sample.end is not EndReason.TRUNCATED:
                over.add(number)
                assert sample.reward == 1.0
    assert len(over) > 50
    for number, windows in fresh.items():
        starts, ends = zip(*windows, strict=True)
        assert starts == (0, *ends[:-1]), f"windows of {number} leave a gap or overlap"


def test_lines_of_all_lengths_are_appended(tmp_path: Path) -> None:
    job = parse_job({"task": {"num_digits": 4}, "model": TINY})
    writer = writer_of(job, tmp_path)
    task = task_of(job)
    eos = task.vocab.eos
    lines = [
        GeneratedSequence(prompt=task.prompt(n).tokens).continued([5, 6][: n % 3], [-1.0, -2.0][: n % 3], 3)
        for n in range(9)
    ]
    writer.version = 4
    upto = [2 + n % 4 for n in range(9)]
    for old, new, limit in zip(lines, writer.write(lines, upto), upto, strict=True):
        assert (new.prompt, new.tokens[: len(old.tokens)]) == (old.prompt, old.tokens)
        assert len(new.tokens) == limit or new.tokens[-1] == eos
        assert new.versions == (3,) * len(old.tokens) + (4,) * (len(new.tokens) - len(old.tokens))
        with torch.no_grad():
            whole = torch.tensor([(*new.prompt, *new.tokens)])
            logprobs = torch.log_softmax(writer.model(input_ids=whole).logits[0, :-1].float(), -1)
        recomputed = logprobs.gather(1, whole[0, 1:, None])[:, 0][-len(new.tokens) :] if new.tokens else torch.zeros(0)
        assert new.logprobs[len(old.tokens) :] == pytest.approx(recomputed.tolist()[len(old.tokens) :], abs=1e-4)


def test_an_examination_is_of_prompts_that_no_step_ever_had() -> None:
    job = parse_job({})
    writer = Dictated(job, wrong=(1,))
    reward, exact = examine(writer, writer.task, num_prompts=4)
    assert exact == 0.75 and 0.75 < reward < 1.0
    assert not set(writer.written) & {writer.task.prompt(n).tokens for n in range(2000)}


def test_a_curve_may_be_left_at_any_step(tmp_path: Path) -> None:
    job = parse_job({"task": {"num_digits": 2}, "model": TINY})
    points = learn(job, writer_of(job, tmp_path), num_steps=10_000, staleness=1)
    assert [p.step for p in islice(points, 2)] == [0, 1]
    points.close()  # type: ignore[attr-defined]


ENGINE_AND_MODEL = """
import sys
from pathlib import Path
from rolecall.core.config.job import parse_job
from rolecall.rl_runtime.trainer.model import make_model, write_model_folder
from rolecall.rl_runtime.tasks.reward_worker import task_of
from tests.rl_runtime.learning import EngineSequenceGenerator, GeneratedSequence
import torch

job = parse_job({"task": {"name": "long_addition", "num_digits": 4}})
folder = Path(sys.argv[1])
write_model_folder(folder, job.model, 0, job.task.name)
task, writer = task_of(job), EngineSequenceGenerator(folder, seed=5)
model = make_model(job.model, task.vocab, 3)
writer.load(1, dict(model.state_dict()))
lines = [GeneratedSequence(prompt=task.prompt(n).tokens).continued([4, 3][: n % 3], [0.0, 0.0][: n % 3], 0) for n in range(6)]
written = writer.write(lines, [4 + n % 5 for n in range(6)])
worst = 0.0
for n, line in enumerate(written):
    assert line.tokens[: n % 3] == lines[n].tokens and line.versions == (0,) * (n % 3) + (1,) * (len(line.tokens) - n % 3)
    assert len(line.tokens) == 4 + n % 5 or line.tokens[-1] == task.vocab.eos
    whole = torch.tensor([(*line.prompt, *line.tokens)])
    recomputed = torch.log_softmax(model(whole).logits[0, :-1].float(), -1).gather(1, whole[0, 1:, None])[:, 0]
    recomputed = recomputed[-len(line.tokens) :][n % 3 :]
    worst = max(worst, float((torch.tensor(line.logprobs[n % 3 :]) - recomputed).abs().max()))
print("worst", worst)
"""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("engines")
def test_an_engine_writes_behind_prefixes_with_the_models_probabilities(tmp_path: Path) -> None:
    """In a process of its own: an engine wants its environment before torch is there."""
    argv = [sys.executable, "-c", ENGINE_AND_MODEL, str(tmp_path / "model")]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert float(ran.stdout.split("worst")[-1]) < 1e-4
