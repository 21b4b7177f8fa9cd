"""A step is that of its whole batch: for any split, any number of replicas, and any loss in the middle of it.

Held against one float64 computation of the whole batch (`whole_batch.py`), for every algorithm. Replicas are threads
here, over real collectives; test_trainer_faults.py kills real processes.

pytest tests/rl_runtime/trainer/test_microbatches.py
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain, pairwise
from typing import Any

import pytest
import torch

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.errors import PeerLost
from rolecall.core.ids import GroupId, replica_id
from rolecall.rl_runtime.algorithms.batching import assign
from rolecall.rl_runtime.algorithms.group_relative import step_statistics
from rolecall.rl_runtime.algorithms.objective import Divisors, divisors
from rolecall.rl_runtime.protocol.messages import (
    EndReason,
    Microbatch,
    PromptGroup,
    StepResult,
    TrainingSample,
    first_commit,
)
from rolecall.rl_runtime.tasks.task import make_task
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer.reduce import nothing
from rolecall.rl_runtime.trainer.state import TrainerState, first_state
from tests.rl_runtime.trainer_process import LEDGER, Spied
from tests.rl_runtime.whole_batch import Whole, whole_step

NUM_GROUPS = 12
VERSION = 5  # of the weights that are trained
STALENESS_MAX = 1
BUCKET_BYTES = 16 << 10
NAME = replica_id("trainer", 0)
WAIT_SECONDS = 60.0

EXACT = 1e-10
"""Float64 replicas against the float64 reference: only the order of sums differs."""
REL_L2_MAX = 1e-6
"""Float32 replicas, weights after the step, by tensor (invariant Constant work, docs/invariants.md)."""

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
TPPO = {"name": "tppo", "groups_per_microbatch": 1, "window_tokens": 4, "lambda_value": 0.9}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo, constant": {"name": "grpo", "aggregation": "constant", **CLIPS},
    "grpo, token": {"name": "grpo", "aggregation": "token", "divide_by_std": False, **CLIPS},
    "grpo, sample": {"name": "grpo", "aggregation": "sample", **CLIPS},
    "grpo, kl and entropy": {"name": "grpo", "kl_coefficient": 0.3, "entropy_coefficient": 0.2, "grad_norm_max": 0.05},
    "grpo, capped": {"name": "grpo", "importance_cap": 1.1, "aggregation": "token"},
    "dapo": {"name": "dapo", "overlong_buffer_tokens": 4},
    "ppo": {"name": "ppo", "gamma": 0.97, "grad_norm_max": 0.1},
    "tppo": {**TPPO, "gamma": 0.97},
    "gspo": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1, "rejection": "sequence"},
    "cispo": {"name": "cispo", "rejection": "token"},
    "rloo": {"name": "rloo", "kl_coefficient": 0.1, "kl_in_reward": True},
    "reinforce++": {"name": "reinforce++", "std": "sample"},
    "reinforce++-baseline": {"name": "reinforce++-baseline", "kl_coefficient": 0.1, "kl_estimator": "k2"},
    "ppo, divergence in the reward": {"name": "ppo", "kl_coefficient": 0.1, "kl_in_reward": True},
    "tppo, previous": {**TPPO, "truncation_value": "previous", "kl_coefficient": 0.1},
}
GLOBAL = ("grpo, token", "grpo, capped", "dapo", "cispo", "reinforce++", "ppo", "tppo")
"""Algorithms with divisors that are counted over the whole step."""


def job_of(algorithm: Mapping[str, Any], num_microbatches: int = 1) -> JobConfig:
    """`num_microbatches` divides NUM_GROUPS; the test determines how many groups each has."""
    size = {} if algorithm["name"] == "tppo" else {"group_size": 2}
    return parse_job(
        {
            "model": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_layers": 1,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 16,
            },
            "task": {"num_digits": 6},
            "algorithm": {
                **algorithm,
                **size,
                "microbatches_per_step": num_microbatches,
                "groups_per_microbatch": NUM_GROUPS // num_microbatches,
            },
            "runtime": {"staleness_max": STALENESS_MAX},
        }
    )


def make_groups(job: JobConfig, seed: int = 0) -> list[PromptGroup]:
    """Answers of all kinds: short and as long as can be, over and cut, with context and stale tokens."""
    vocab, rng = vocabulary(job.model, job.task.name), random.Random(seed)
    task = make_task(job.task, vocab, job.seed)
    windows = job.algorithm.window_tokens is not None

    def sample(group: GroupId, index: int) -> TrainingSample:
        length = rng.choice([1, 2, 3, 5, task.max_response_tokens])
        longest = length == task.max_response_tokens
        end = EndReason.LENGTH if longest else EndReason.TRUNCATED if windows and rng.random() < 0.5 else EndReason.STOP
        return TrainingSample(
            request_id=f"{group}.{index}",
            tokens=tuple(rng.randrange(vocab.size) for _ in range(length)),
            logprobs=tuple(rng.uniform(-3.3, -2.3) for _ in range(length)),
            versions=tuple(sorted(rng.randint(VERSION - STALENESS_MAX - 1, VERSION) for _ in range(length))),
            reward=float("nan") if end is EndReason.TRUNCATED else rng.choice([0.0, 0.25, 0.5, 1.0]),
            end=end,
            first_fresh=rng.randint(0, length) if windows else 0,
        )

    groups = []
    for number in range(NUM_GROUPS):
        prompt = task.prompt(number)
        samples = tuple(sample(prompt.group_id, i) for i in range(job.algorithm.group_size))
        groups.append(PromptGroup(group_id=prompt.group_id, prompt_tokens=prompt.tokens, samples=samples))
    return groups


def cut(job: JobConfig, groups: Sequence[PromptGroup], count: int, rng: random.Random) -> list[Microbatch]:
    """Any split: parts of any size but none, of groups in any order."""
    statistics = step_statistics(groups, job.algorithm, longest=job.task.max_response_tokens)
    shuffled = rng.sample(groups, len(groups))
    bounds = [0, *sorted(rng.sample(range(1, len(groups)), count - 1)), len(groups)]
    parts = [tuple(shuffled[a:b]) for a, b in pairwise(bounds)]
    return [
        Microbatch(microbatch_id=f"{VERSION}.{i}", groups=part, statistics=statistics) for i, part in enumerate(parts)
    ]


def started(job: JobConfig) -> tuple[dict[str, torch.Tensor], str]:
    """The state in the middle of a run: weights that moved, moments that are not 0."""
    tensors, meta = first_state(job, vocabulary(job.model, job.task.name), replica=NAME).export()
    rng = torch.Generator().manual_seed(7)
    for name, t in tensors.items():
        noise = torch.randn(t.shape, generator=rng)
        scale = 0.05 if "weight/" in name else 1e-2
        t += scale * noise if "exp_avg_sq" not in name else (scale * noise) ** 2 + 1e-6
    commit = replace(first_commit(), step=VERSION - 1)
    return tensors, json.dumps({**json.loads(meta), "optimizer_step": VERSION, "commit": asdict(commit)})


def double(state: tuple[dict[str, torch.Tensor], str]) -> tuple[dict[str, torch.Tensor], str]:
    return {n: t.double() for n, t in state[0].items()}, state[1]


@cache
def whole(name: str) -> Whole:
    job = job_of(ALGORITHMS[name])
    state = first_state(job, vocabulary(job.model, job.task.name), replica=NAME, dtype=torch.float64)
    state.load(*double(started(job)))
    return whole_step(job, state, make_groups(job))


class Died(Exception):
    """A replica, at the place that a test named."""


@dataclass
class Crew:
    """Replicas in threads, and a controller's part: who computes what, and the next epoch after a loss."""

    job: JobConfig
    microbatches: Sequence[Microbatch]
    members: list[Spied]
    epoch: int = 0

    def step(self) -> list[StepResult]:
        """The step as often as it takes. Who died is no longer asked."""
        while True:
            answers = self._attempt()
            died = [m for m, a in zip(self.members, answers, strict=True) if isinstance(a, Died)]
            for answer in answers:
                assert isinstance(answer, StepResult | Died | PeerLost), answer
            if not died:
                assert all(isinstance(a, StepResult) for a in answers)
                return [a for a in answers if isinstance(a, StepResult)]
            self.members = [m for m in self.members if m not in died]

    def _attempt(self) -> list[Any]:
        self.epoch += 1
        host, port = self.members[0].open_store(self.epoch)
        size = len(self.members)
        joined = together(
            [lambda m=m, r=r: m.join(1, self.epoch, r, size, host, port) for r, m in enumerate(self.members)]
        )
        assert joined == [None] * size, joined
        ids = [m.microbatch_id for m in self.microbatches]
        names = [m.replica for m in self.members]
        held = {m.replica: m._partial.computed(VERSION) for m in self.members}
        shares = assign(ids, held, names)

        def call(member: Spied) -> StepResult:
            mine = [m for m in self.microbatches if m.microbatch_id in shares[member.replica]]
            return member.train_step(1, self.epoch, VERSION, mine, ids, LEDGER, names)

        return together([lambda m=m: call(m) for m in self.members])

    def close(self) -> None:
        for member in self.members:
            member.close()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The result or exception of each; all run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(c) for c in calls]
        return [f.exception(WAIT_SECONDS) or f.result() for f in futures]


def dies_at(count: int) -> Callable[[], None]:
    left = [count]

    def hook() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Died

    return hook


def crew(
    name: str,
    size: int,
    *,
    parts: int,
    seed: int,
    dtype: torch.dtype,
    deaths: Mapping[int, tuple[str, int]] | None = None,
    kind: type[Spied] = Spied,
) -> Crew:
    job = job_of(ALGORITHMS[name], parts)
    microbatches = cut(job, make_groups(job), parts, random.Random(seed))
    return crew_of(job, microbatches, size, dtype=dtype, deaths=deaths, kind=kind)


def crew_of(
    job: JobConfig,
    microbatches: Sequence[Microbatch],
    size: int,
    *,
    dtype: torch.dtype,
    deaths: Mapping[int, tuple[str, int]] | None = None,
    kind: type[Spied] = Spied,
) -> Crew:
    """`deaths`: index of a replica -> hook and how many times it comes there."""
    state = started(job)
    members = []
    for i in range(size):
        hook, count = (deaths or {}).get(i, ("", 0))
        member = kind(
            replica=replica_id("trainer", i),
            incarnation=1,
            job=job,
            dtype=dtype,
            bucket_bytes=BUCKET_BYTES,
            on_microbatch=dies_at(count) if hook == "microbatch" else nothing,
            on_bucket=dies_at(count) if hook == "bucket" else nothing,
        )
        member.load_state(*(double(state) if dtype is torch.float64 else state))
        members.append(member)
    return Crew(job, microbatches, members)


def weights(state: TrainerState) -> dict[str, torch.Tensor]:
    critic = state.critic.weights() if state.critic is not None else {}
    return {**state.policy.weights(), **{f"critic/{n}": w for n, w in critic.items()}}


def distance(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Largest relative L2 over all tensors."""
    assert got.keys() == wanted.keys()
    return max(float((got[n] - w).norm() / w.norm()) for n, w in wanted.items())


def assert_is_the_whole_step(crew: Crew, results: Sequence[StepResult], wanted: Whole, limit: float) -> None:
    for member in crew.members:
        off = distance(weights(member.state), wanted.weights)
        assert off <= limit
        assert member.state.weights_digest == crew.members[0].state.weights_digest
    for result in results:
        assert result.commit == results[0].commit and result.health == results[0].health
        assert result.loss == pytest.approx(wanted.losses.policy, rel=limit * 1e3, abs=limit)
        if result.health.value_loss is not None:
            assert result.health.value_loss == pytest.approx(wanted.losses.value, rel=limit * 1e3)


SHAPES = {
    "1 replica, 12 parts": (1, 12, {}),
    "2 replicas, 1 part": (2, 1, {}),
    "3 replicas, 4 parts": (3, 4, {}),
    "4 replicas, 6 parts": (4, 6, {}),
    "2, one lost between its microbatches": (2, 6, {1: ("microbatch", 3)}),
    "3, one lost in the reduce": (3, 12, {0: ("bucket", 2)}),
    "4, two lost one after the other": (4, 12, {1: ("microbatch", 2), 3: ("bucket", 4)}),
}


def test_the_batches_have_all_that_a_split_could_get_wrong() -> None:
    for name, algorithm in ALGORITHMS.items():
        job = job_of(algorithm)
        samples = [s for g in make_groups(job) for s in g.samples]
        kinds = {s.end for s in samples}
        assert kinds == set(EndReason) if job.algorithm.window_tokens else kinds == {EndReason.STOP, EndReason.LENGTH}
        ages = {VERSION - v for s in samples for v in s.versions}
        assert ages == {0, STALENESS_MAX, STALENESS_MAX + 1}
        if job.algorithm.window_tokens:
            assert any(0 < s.first_fresh < len(s.tokens) for s in samples), "context before fresh tokens"
            assert any(s.first_fresh == len(s.tokens) for s in samples), "nothing fresh"
        by_token = list(chain.from_iterable(whole(name).losses.by_logprob))
        assert any(by_token) and not all(by_token), "some tokens are trained, some are clipped or left out"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_split_is_the_whole_batch(name: str, shape: str) -> None:
    size, parts, deaths = SHAPES[shape]
    team = crew(name, size, parts=parts, seed=len(shape), dtype=torch.float64, deaths=deaths)
    results = team.step()
    assert len(team.members) == size - len(deaths)
    wanted = whole(name)
    off = distance(team.members[0].gradients[VERSION], wanted.gradients)
    assert off <= EXACT
    assert_is_the_whole_step(team, results, wanted, EXACT)
    team.close()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_float32_a_loss_changes_no_weight_by_more_than_its_rounding(name: str) -> None:
    team = crew(name, 4, parts=12, seed=1, dtype=torch.float32, deaths={2: ("bucket", 3)})
    results = team.step()
    assert len(team.members) == 3
    assert_is_the_whole_step(team, results, whole(name), REL_L2_MAX)
    team.close()


class MeanOfMeans(Spied):
    """The usual mistake: each microbatch divides by its own tokens, and the step by the number of microbatches."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        of, apply = self._gradients.of, self.state.apply
        task = make_task(self.job.task, self.vocab, self.job.seed)

        def divided(state: TrainerState, microbatch: Microbatch, **rest: Any) -> Any:
            gradient, stats = of(state, microbatch, **rest)
            own = divisors(self.job.algorithm, stats.health, longest=task.max_response_tokens)
            end = state.policy.num_parameters
            return torch.cat([gradient[:end] / own.policy, gradient[end:] / own.value]), stats

        def averaged(sums: torch.Tensor, by: Divisors, commit: Any, band: Any, _draft: None) -> float:
            number = float(self.job.algorithm.microbatches_per_step)
            return apply(sums, Divisors(policy=number, value=number), commit, band)

        self._gradients.of, self.state.apply = divided, averaged  # type: ignore[method-assign]


@pytest.mark.parametrize("name", GLOBAL)
def test_the_usual_mistake_would_be_seen(name: str) -> None:
    distances = []
    for parts in (1, 4):
        team = crew(name, 1, parts=parts, seed=3, dtype=torch.float64, kind=MeanOfMeans)
        team.step()
        distances.append(distance(weights(team.members[0].state), whole(name).weights))
        team.close()
    assert distances[0] <= EXACT, "of one part, it is no mistake"
    assert distances[1] > 10 * REL_L2_MAX
