"""A step of several optimizer updates: the updates of a reference, on any number of replicas and after any loss; one
commit; and nothing to see of it before. Microbatches of many tokens, computed in chunks.

Held against a float64 loop that computes each update of whole answers (`whole_batch.py`).

pytest tests/rl_runtime/trainer/test_mini_batches.py
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from rolecall.core.config.data import SamplingConfig
from rolecall.core.config.job import JobConfig
from rolecall.core.errors import NonFiniteValue, PeerLost
from rolecall.rl_runtime.algorithms.batching import form_microbatches, updates
from rolecall.rl_runtime.algorithms.group_relative import step_statistics
from rolecall.rl_runtime.protocol.messages import (
    MicrobatchNumbers,
    PromptGroup,
    StepResult,
    StepStatistics,
    UnusualMicrobatches,
)
from rolecall.rl_runtime.tasks.tokenizer import vocabulary
from rolecall.rl_runtime.trainer import checkpoint
from rolecall.rl_runtime.trainer.band import WARM_UP, LearnedBand
from rolecall.rl_runtime.trainer.partial_step import Gradients
from rolecall.rl_runtime.trainer.state import first_state
from tests.rl_runtime.trainer.test_microbatches import (
    ALGORITHMS,
    BUCKET_BYTES,
    EXACT,
    NAME,
    NUM_GROUPS,
    VERSION,
    Crew,
    Died,
    crew_of,
    distance,
    double,
    job_of,
    make_groups,
    started,
    weights,
    whole,
)
from tests.rl_runtime.trainer_process import LEDGER, Spied, make_microbatches, tiny_job
from tests.rl_runtime.whole_batch import Whole, whole_updates

SEED = 5
PARTS = 4
STEPPED = {"mini_batches": 2, "ppo_epochs": 2}
NUM_UPDATES = 4
NARROW = {"clip_low": 0.02, "clip_high": 0.03, "learning_rate": 5e-3}
LATER: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", **NARROW},
    "grpo, kl": {"name": "grpo", "aggregation": "sample", "kl_coefficient": 0.3, "grad_norm_max": 0.05},
    "dapo": {"name": "dapo", "overlong_buffer_tokens": 4, **NARROW},
    "gspo": {"name": "gspo", "clip_low": 0.01, "clip_high": 0.01, "rejection": "sequence"},
    "cispo": {"name": "cispo"},
    "rloo, divergence in the reward": {"name": "rloo", "kl_coefficient": 0.1, "kl_in_reward": True},
    "ppo": {"name": "ppo", "gamma": 0.97, "value_clip": 0.01, "value_learning_rate": 5e-3, **NARROW},
    "tppo": {"name": "tppo", "window_tokens": 4, "lambda_value": 0.9, "value_clip": 0.05, **NARROW},
}
"""Clip ranges are so narrow that later updates leave them."""
FLOAT32_REL_L2_MAX = 1e-5
"""Of weights after four updates in float32: AdamW divides by small second moments, which enlarges rounding."""


def stepped(name: str = "grpo", **changes: Any) -> JobConfig:
    return job_of({**LATER[name], **STEPPED, **changes}, PARTS)


def team_of(job: JobConfig, size: int, dtype: torch.dtype = torch.float64, **rest: Any) -> Crew:
    groups = random.Random(SEED).sample(make_groups(job), NUM_GROUPS)
    microbatches = form_microbatches(VERSION, groups, job.algorithm.microbatches_per_step, statistics_of(job, groups))
    return crew_of(job, microbatches, size, dtype=dtype, **rest)


def statistics_of(job: JobConfig, groups: Sequence[PromptGroup]) -> StepStatistics | None:
    return step_statistics(groups, job.algorithm, longest=job.task.max_response_tokens)


def plan_of(team: Crew) -> list[tuple[str, ...]]:
    ids = [m.microbatch_id for m in team.microbatches]
    return updates(ids, team.job.algorithm, step=VERSION, seed=team.job.seed)


@cache
def reference(name: str) -> list[Whole]:
    team = team_of(stepped(name), 1)
    by_id = {m.microbatch_id: m for m in team.microbatches}
    state = first_state(team.job, vocabulary(team.job.model, team.job.task.name), replica=NAME, dtype=torch.float64)
    state.load(*double(started(team.job)))
    parts = [[g for i in ids for g in by_id[i].groups] for ids in plan_of(team)]
    team.close()
    return whole_updates(team.job, state, parts)


def assert_same_members(team: Crew) -> None:
    first = team.members[0].state.export()
    for member in team.members[1:]:
        other = member.state.export()
        assert other[1] == first[1]
        assert all(torch.equal(t, first[0][n]) for n, t in other[0].items())


def assert_is_the_reference(team: Crew, name: str, limit: float) -> None:
    wanted = reference(name)
    assert distance(weights(team.members[0].state), wanted[-1].weights) <= limit
    assert_same_members(team)
    meta = json.loads(team.members[0].state.export()[1])
    assert meta["optimizer_step"] == VERSION + NUM_UPDATES
    assert meta["commit"]["step"] == VERSION
    assert meta["commit"]["microbatch_ids"] == sorted(m.microbatch_id for m in team.microbatches)


def num_buckets(team: Crew) -> int:
    num_bytes = team.members[0].state.num_parameters * 8
    return -(-num_bytes // BUCKET_BYTES)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", LATER)
def test_updates_of_a_step_are_those_of_the_reference_on_any_number_of_replicas(name: str, size: int) -> None:
    team = team_of(stepped(name), size)
    results = team.step()
    assert_is_the_reference(team, name, EXACT)
    wanted = reference(name)
    for result in results:
        assert (result.commit, result.health) == (results[0].commit, results[0].health)
        assert result.loss == pytest.approx(sum(w.losses.policy for w in wanted) / NUM_UPDATES, rel=1e-7, abs=1e-10)
        assert not team.job.algorithm.has_critic or 0.0 < result.health.value_clip_fraction < 1.0  # type: ignore[operator]
    team.close()


def test_the_reference_leaves_the_clip_range_and_every_update_matters() -> None:
    for name in ("grpo", "dapo", "gspo", "ppo", "tppo"):
        still = [sum(b == 0 for row in update.losses.by_logprob for b in row) for update in reference(name)]
        assert sum(still[2:]) > sum(still[:2]), f"{name}: in the second pass more tokens have no gradient"
    for name in LATER:
        found = reference(name)
        assert all(distance(a.weights, b.weights) > 1e-6 for a, b in pairwise(found))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_in_float32_the_number_of_replicas_changes_no_weight_by_more_than_rounding(name: str) -> None:
    found = []
    for size in (1, 2, 3):
        team = team_of(stepped(name), size, torch.float32)
        team.step()
        assert_same_members(team)
        found.append(weights(team.members[0].state))
        team.close()
    assert distance(found[1], found[0]) <= FLOAT32_REL_L2_MAX
    assert distance(found[2], found[0]) <= FLOAT32_REL_L2_MAX


def test_one_update_a_step_moves_the_state_itself_and_records_the_gradient() -> None:
    team = team_of(job_of({**LATER["ppo"], "value_clip": None}, PARTS), 1, torch.float32)
    member = team.members[0]
    networks = member.state.policy, member.state.critic
    assert member._draft is None, "a copy for nothing"
    digests: list[str] = []
    apply = member.state.apply

    def noted(sums: torch.Tensor, *rest: Any) -> float:
        digests.append(blake3(sums.numpy().tobytes()).hexdigest())
        return apply(sums, *rest)

    member.state.apply = noted  # type: ignore[method-assign]
    result = team.step()[0]
    assert (member.state.policy, member.state.critic) == networks
    assert [result.commit.gradient_digest] == digests
    team.close()


# (hook, updates that are complete before it): of the second of two replicas, or the third of three
LOSSES: Mapping[str, tuple[str, int]] = {
    "in the first reduce": ("bucket", 0),
    "after the first update": ("microbatch", 1),
    "in the reduce of the second update": ("bucket", 1),
    "in the reduce of the last update": ("bucket", 3),
    "before the last vote": ("vote", 3),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", LOSSES)
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_member_lost_between_updates_costs_the_step_nothing(name: str, place: str, size: int) -> None:
    job = stepped(name)
    hook, done = LOSSES[place]
    probe = team_of(job, 1)
    buckets = num_buckets(probe)
    plan, ids = plan_of(probe), [m.microbatch_id for m in probe.microbatches]
    probe.close()
    if hook == "microbatch":
        mine = {2: ids[2:], 3: ids[3:]}[size]
        count = 1 + sum(i in mine for update in plan[:done] for i in update)
        deaths = {size - 1: ("microbatch", count)}
    else:
        deaths = {size - 1: ("bucket", done * (buckets + 1) + (2 if hook == "bucket" else buckets + 1))}
    team = team_of(job, size, deaths=deaths)
    survivor = team.members[0]
    before = survivor.state.export()
    answers = team._attempt()
    assert [type(a) for a in answers] == [PeerLost] * (size - 1) + [Died]
    after = survivor.state.export()
    assert after[1] == before[1]
    assert all(torch.equal(t, before[0][n]) for n, t in after[0].items())
    team.members.pop()
    results = team.step()
    assert len(results) == size - 1
    assert_is_the_reference(team, name, EXACT)
    team.close()


def test_a_member_lost_between_the_last_vote_and_its_commit_leaves_a_committed_step() -> None:
    team = team_of(stepped(), 2)

    def dies(*_: Any) -> float:
        raise Died

    lost = team.members[1]
    before = lost.state.export()
    lost.state.apply = dies  # type: ignore[method-assign]
    answers = team._attempt()
    assert [type(a) for a in answers] == [StepResult, Died]
    assert lost.state.export()[1] == before[1], "half a step is no state"
    heir = Spied(replica=lost.replica, incarnation=2, job=team.job, has_state=False, dtype=torch.float64)
    heir.load_state(*team.members[0].state.export())
    lost.close()
    team.members[1] = heir
    assert_is_the_reference(team, "grpo", EXACT)
    team.close()


def test_a_step_after_a_step_is_that_of_a_replica_which_copied_the_state_between_them() -> None:
    job = tiny_job("ppo", algorithm=STEPPED)

    def step(trainer: Spied, number: int, incarnation: int) -> None:
        microbatches = make_microbatches(job, number)
        ids = [m.microbatch_id for m in microbatches]
        trainer.train_step(incarnation, 1, number, microbatches, ids, LEDGER, [NAME])

    one = Spied(replica=NAME, incarnation=1, job=job)
    one.join(1, 1, 0, 1, "127.0.0.1", 0)
    step(one, 0, 1)
    snapshot = one.state.policy_tensors(1)
    kept = {n: t.clone() for n, t in snapshot.items()}
    heir = Spied(replica=NAME, incarnation=2, job=job, has_state=False)
    heir.load_state(*one.state.export())
    heir.join(2, 1, 0, 1, "127.0.0.1", 0)
    for number in (1, 2):
        step(one, number, 1)
        step(heir, number, 2)
        found, wanted = heir.state.export(), one.state.export()
        assert found[1] == wanted[1]
        assert all(torch.equal(t, wanted[0][n]) for n, t in found[0].items())
    assert all(torch.equal(t, kept[n]) for n, t in snapshot.items()), "a published version never changes"
    assert sorted(one.state.previous) == [1, 2]
    assert torch.equal(one.state.previous[1]["lm_head.weight"], kept["lm_head.weight"])
    one.close()
    heir.close()


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_readers_see_the_state_before_the_step_until_it_is_committed(name: str, tmp_path: Path) -> None:
    job = stepped(name)
    seen: list[Any] = []

    def read() -> None:
        state = member.state
        seen.append((state.export(), state.weights_digest, state.canary_logprobs((1, 5, 13)), state.commit))
        assert all(torch.equal(t, seen[0][0][0][f"weight/{n}"]) for n, t in state.policy_tensors(VERSION).items())

    team = team_of(job, 1)
    member = team.members[0]
    read()
    member._on_microbatch = member._on_bucket = read  # type: ignore[assignment]
    updated = 0
    assert member._draft is not None
    update = member._draft.update

    def counted(*args: Any) -> float:
        nonlocal updated
        updated += 1
        norm = update(*args)
        read()
        return norm

    member._draft.update = counted  # type: ignore[method-assign]
    team.step()
    assert updated == NUM_UPDATES - 1
    (tensors, meta), *others = seen[0]
    for (found, found_meta), *rest in seen[1:]:
        assert (found_meta, rest) == (meta, others)
        assert all(torch.equal(t, tensors[n]) for n, t in found.items())
    # What was read in the middle of the step is a checkpoint, and a replacement's state: the step goes on from it.
    middle = seen[len(seen) // 2][0]
    stored = checkpoint.load(checkpoint.save(tmp_path, VERSION - 1, *middle))
    heir = team_of(job, 1)
    heir.members[0].load_state(stored.tensors, stored.meta)
    heir.step()
    assert_is_the_reference(heir, name, EXACT)
    assert heir.members[0].state.weights_digest == member.state.weights_digest
    heir.close()
    team.close()


def test_an_interrupted_first_update_is_kept_and_a_later_one_is_not() -> None:
    counts: dict[str, list[str]] = {}
    for place, (hook, done) in {"first": ("bucket", 0), "second": ("bucket", 1)}.items():
        probe = team_of(stepped(), 1)
        buckets = num_buckets(probe)
        probe.close()
        team = team_of(stepped(), 2, deaths={1: (hook, done * (buckets + 1) + 2)})
        survivor = team.members[0]
        counted = counts[place] = []
        of = survivor._gradients.of
        survivor._gradients.of = lambda s, m, of=of, counted=counted, **rest: (  # type: ignore[method-assign,misc]
            counted.append(m.microbatch_id),
            of(s, m, **rest),
        )[1]
        team._attempt()
        held = survivor._partial.computed(VERSION)
        assert held == (tuple(sorted(counted)) if place == "first" else ())
        team.members.pop()
        team.step()
        team.close()
    assert len(counts["first"]) == 2 * PARTS, "nothing is computed twice"
    assert len(counts["second"]) > 2 * PARTS


def test_an_update_that_overflows_changes_nothing() -> None:
    team = team_of(stepped(), 2, torch.float32)
    before = team.members[0].state.export()
    for member in team.members:
        assert member._draft is not None
        update = member._draft.update
        member._draft.update = lambda sums, by, step, update=update: (  # type: ignore[method-assign,misc]
            update(torch.full_like(sums, 1e300), by, step)
        )
    assert [type(a) for a in team._attempt()] == [NonFiniteValue] * 2
    assert team.members[0].state.export()[1] == before[1]
    assert all(m._partial.computed(VERSION) == () for m in team.members), "the sum is not used again"
    team.close()


def test_members_with_other_weights_within_the_step_do_not_commit() -> None:
    team = team_of(stepped(), 2)
    draft = team.members[1]._draft
    assert draft is not None
    update = draft.update

    def drifted(*args: Any) -> float:
        norm = update(*args)
        with torch.no_grad():
            draft.policy.parameters[0].view(-1)[0] += 1e-3
        draft.weights_digest = draft._digest_weights()
        return norm

    draft.update = drifted  # type: ignore[method-assign]
    answers = team._attempt()
    assert all("weights_digest" in str(a) for a in answers), answers
    assert all(m.state.commit.step == VERSION - 1 for m in team.members)
    team.close()


def test_the_band_judges_the_first_pass_only() -> None:
    usual = LearnedBand(tuple(MicrobatchNumbers(loss=(-1.0) ** n, grad_norm=1.0) for n in range(WARM_UP)))
    job = stepped(aggregation="token", learning_rate=1e-6)
    for number, is_refused in ((1, True), (PARTS + 1, False)):
        team = team_of(job, 1)
        member = team.members[0]
        member.state.band = usual
        left = [number]

        def factor(left: list[int] = left) -> float | None:
            left[0] -= 1
            return 1e6 if left[0] == 0 else None

        member._on_microbatch = factor
        answer = team._attempt()[0]
        assert isinstance(answer, UnusualMicrobatches if is_refused else StepResult), answer
        if not is_refused:
            assert len(member.state.band.learned) == WARM_UP + PARTS
        team.close()


def test_engines_are_compared_with_the_weights_before_the_step() -> None:
    found = []
    for more in ({}, {"mini_batches": 4, "ppo_epochs": 3, "learning_rate": 0.05}):
        team = team_of(job_of({**LATER["ppo"], "value_clip": None, **more}, PARTS), 1)
        result = team.step()[0]
        found.append((result.log_ratio_max, dict(result.log_ratios), result.num_tokens, result.reward))
        assert result.health.explained_variance is not None
        team.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    assert found[1][1:] == found[0][1:]


# --- chunks

BUDGET = 40
"""Padded tokens: two samples of the longest kind, or several short ones."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_chunks_of_a_token_budget_are_the_whole_batch(name: str) -> None:
    team = team_of(job_of({**ALGORITHMS[name], "microbatch_tokens_max": BUDGET}, 3), 2)
    num_tokens: list[int] = []

    def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        num_tokens.append(tokens.numel())

    for member in team.members:
        critic = member.state.critic
        for module in (member.state.policy.module, member._gradients._reference, critic.module if critic else None):
            if module is not None:
                module.register_forward_pre_hook(count, with_kwargs=True)
    results = team.step()
    wanted = whole(name)
    assert distance(weights(team.members[0].state), wanted.weights) <= EXACT
    assert_same_members(team)
    assert results[0].loss == pytest.approx(wanted.losses.policy, rel=1e-7, abs=1e-10)
    assert len(num_tokens) > 6
    assert max(num_tokens) <= BUDGET
    team.close()


@pytest.mark.parametrize("budget", [BUDGET, 10_000])
@pytest.mark.parametrize("name", ["rloo", "ppo", "tppo", "grpo, sample"])
def test_chunks_change_neither_statistics_nor_weights(name: str, budget: int) -> None:
    """The rows of a chunk are ordered by length, also where all fit into one."""
    found, states = [], []
    for tokens_max in (None, budget):
        algorithm = {**ALGORITHMS[name], **STEPPED, "microbatch_tokens_max": tokens_max}
        team = team_of(job_of(algorithm, 2), 1)
        found.append(team.step()[0])
        states.append(weights(team.members[0].state))
        team.close()
    whole_one, chunked = found
    assert distance(states[1], states[0]) <= EXACT
    assert chunked.num_tokens == whole_one.num_tokens
    assert chunked.log_ratio_max == pytest.approx(whole_one.log_ratio_max, rel=1e-12)
    assert chunked.health.to_dict() == pytest.approx(whole_one.health.to_dict(), rel=1e-9, abs=1e-12)


def test_padding_is_small() -> None:
    job = job_of({**ALGORITHMS["grpo, token"], "microbatch_tokens_max": BUDGET}, 1)
    team = team_of(job, 1)
    microbatch = team.microbatches[0]
    lengths = [len(g.prompt_tokens) + len(s.tokens) for g in microbatch.groups for s in g.samples]
    found = team.members[0]._gradients._chunks(lengths)
    computed = sum(len(rows) * end for rows, end in zip(found.rows, found.ends, strict=True))
    assert sorted(r for rows in found.rows for r in rows) == list(range(len(lengths)))
    assert sum(lengths) <= computed < len(lengths) * max(lengths)
    team.close()


def test_later_updates_compare_the_same_tokens_with_the_engines() -> None:
    """Which tokens are at an edge of top-p follows from the old policy: a draft's distribution has other edges."""
    job = stepped("grpo")
    vocab = vocabulary(job.model, job.task.name)
    before, draft = (first_state(job, vocab, replica=NAME) for _ in range(2))
    tensors, meta = started(job)
    before.load(tensors, meta)
    rng = torch.Generator().manual_seed(3)
    moved = {n: t + 0.1 * torch.randn(t.shape, generator=rng) if "weight/" in n else t for n, t in tensors.items()}
    draft.load(moved, meta)
    (microbatch, *_) = form_microbatches(VERSION, make_groups(job), job.algorithm.microbatches_per_step, None)
    group = microbatch.groups[0]
    sample = group.samples[0]
    with torch.no_grad():
        logits_v = before.policy.module(input_ids=torch.tensor([group.prompt_tokens])).logits[0, -1]
    # At an edge of it is the first token of the first answer, with which trainer and engine differ.
    edge = float(logits_v.softmax(dim=-1).sort(descending=True).values[:8].sum())
    sample = replace(sample, versions=(VERSION,) * len(sample.tokens), logprobs=(-9.0, *sample.logprobs[1:]))
    group = replace(group, samples=(sample, *group.samples[1:]))
    microbatch = replace(microbatch, groups=(group, *microbatch.groups[1:]))
    gradients = Gradients(
        job.algorithm,
        pad=vocab.pad,
        staleness_max=2,
        longest=job.task.max_response_tokens,
        sampling=SamplingConfig(top_p=edge),
    )
    old, other = gradients.outputs(before, microbatch), gradients.outputs(draft, microbatch)
    first, later = (gradients.of(state, microbatch, old=old)[1] for state in (before, draft))
    misled = gradients.of(draft, microbatch, old=replace(old, comparable_st=other.comparable_st))[1]
    assert first.health.log_ratio_max == later.health.log_ratio_max < 3 < misled.health.log_ratio_max
