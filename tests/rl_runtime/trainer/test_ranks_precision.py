"""Replicas of several ranks that compute in bfloat16, compute activations again, train adapters, or compare tokens with
previous versions: the same as one process.

pytest tests/rl_runtime/trainer/test_ranks_precision.py
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rolecall.core.config.job import JobConfig, parse_job
from rolecall.core.ids import replica_id
from rolecall.rl_runtime.model_layers import plain_name
from rolecall.rl_runtime.trainer.model import write_model_folder
from tests.rl_runtime.trainer.test_precision import ALL, BFLOAT16, CHECKPOINTING, LORA
from tests.rl_runtime.trainer.test_ranks import SETTINGS, ready
from tests.rl_runtime.trainer_process import LEDGER, RankedReplica, Spied, Team, make_microbatches, tiny_job
from tests.support import some

REL_L2_MAX = 1e-6
OF_ONE_TENSOR_MAX = 1e-5
"""AdamW divides by small second moments, which enlarges rounding: of small tensors, after some updates."""
AS_BFLOAT16 = 2.0**-7
ROUNDED_MORE_MAX = {1: 1.05, 2: 1.15}
"""By number of tensor ranks, of which each rounds its part of a sum."""
OTHERWISE_ROUNDED_MAX = {(1, False): 0.5, (1, True): 0.1, (2, False): 1.25, (2, True): 1.25}
"""By number of tensor ranks, of policy or critic: distance from one process, as a share of what bfloat16 rounds there.
The critic's is small because both have the same exact head. Tensor ranks round every layer's output in another way: of
two results that are rounded independently the distance is 1.4."""
Tensors = dict[str, Any]


class Layout(NamedTuple):
    ranks: int
    tensor: int  # of these, ranks that share each layer


SHARDS, TENSOR, MESH = Layout(2, 1), Layout(2, 2), Layout(4, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with heads for two tensor ranks, and of weights that bfloat16 holds exactly: what differs is then
    rounded in the computation."""
    folder = tmp_path_factory.mktemp("ranks") / "model"
    shape = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    write_model_folder(folder, tiny_job().model.model_copy(update=shape), seed=3)
    weights = {n: t.bfloat16().float() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def job_of(folder: Path, change: dict[str, Any], name: str = "grpo", **algorithm: Any) -> JobConfig:
    value = tiny_job(name, algorithm=algorithm, **SETTINGS).model_dump(mode="json")
    return parse_job({**value, **change, "model": {"path": str(folder), **change.get("model", {})}})


def named(value: Any) -> str | None:
    return f"{value.ranks}ranks-{value.tensor}tensor" if isinstance(value, Layout) else None


@pytest.fixture
def teams() -> Iterator[list[Team]]:
    """Those that a test starts; ended after it."""
    found: list[Team] = []
    yield found
    for team in found:
        team.close()


def stepped(
    teams: list[Team], job: JobConfig, steps: int, *, layout: Layout = SHARDS, behind: int | None = None
) -> tuple[RankedReplica, list[Any]]:
    """A replica after `steps` steps, and their results."""
    team = Team(job)
    teams.append(team)
    [member] = ready(RankedReplica(team, 0, layout.ranks, tensor=layout.tensor))
    team.join([member])
    results = []
    for step in range(steps):
        team.tell_step(step, {member: [0, 1, 2, 3]}, behind=behind)
        results.append(member.answer())
    return member, results


def alone(job: JobConfig, steps: range, state: tuple[Tensors, str] | None = None, behind: int | None = None) -> Spied:
    """One process that trains the steps. `state`: that it begins with."""
    trainer = Spied(replica=replica_id("trainer", 0), incarnation=1, job=job)
    if state is not None:
        trainer.take(*state)
    trainer.join(1, 1, 0, 1, "127.0.0.1", 0)
    for step in steps:
        microbatches = make_microbatches(job, step, behind=behind)
        ids = [m.microbatch_id for m in microbatches]
        trainer.train_step(1, 1, step, microbatches, ids, LEDGER, [trainer.replica])
    return trainer


def apart(one: Tensors, other: Tensors) -> float:
    """Relative L2 over all tensors."""
    assert one.keys() == other.keys()
    mine, wanted = (np.concatenate([f[n].astype(np.float64).ravel() for n in sorted(f)]) for f in (one, other))
    return float(np.linalg.norm(mine - wanted) / np.linalg.norm(wanted))


def assert_close(got: Tensors, wanted: Tensors, most: float = REL_L2_MAX) -> None:
    assert apart(got, wanted) <= most
    for name, tensor in wanted.items():
        away = np.linalg.norm(got[name] - tensor)
        assert away <= most * OF_ONE_TENSOR_MAX / REL_L2_MAX * np.linalg.norm(tensor), name


def arrays(tensors: dict[str, torch.Tensor]) -> Tensors:
    return {name: t.float().numpy() for name, t in tensors.items()}


IN_FLOAT32: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "lora": (LORA, "grpo", {"kl_coefficient": 0.1, "microbatch_tokens_max": 16}),
    "checkpointing": (CHECKPOINTING, "grpo", {"microbatch_tokens_max": 16}),
    "lora-critic": (LORA, "ppo", {}),
    "both-draft": ({**LORA, **CHECKPOINTING}, "ppo", {"ppo_epochs": 2, "mini_batches": 2}),
}


IN_FLOAT32_EVERY_TIME = [("both-draft", SHARDS), ("lora", TENSOR), ("checkpointing", MESH), ("lora-critic", MESH)]
IN_FLOAT32_CASES = [*((case, SHARDS) for case in IN_FLOAT32), *IN_FLOAT32_EVERY_TIME[1:]]


@pytest.mark.parametrize(("case", "layout"), some(IN_FLOAT32_CASES, IN_FLOAT32_EVERY_TIME), ids=named)
def test_in_float32_a_step_is_that_of_one_process(folder: Path, teams: list[Team], case: str, layout: Layout) -> None:
    change, name, algorithm = IN_FLOAT32[case]
    job = job_of(folder, change, name, **algorithm)
    member, results = stepped(teams, job, 2, layout=layout)
    one = alone(job, range(2))
    for step in range(2):
        assert_close(member.gathered("gradient_of", step), one.gradient_of(step))
    wanted = one.last_result
    assert wanted is not None and wanted.log_ratio_max is not None
    assert results[1].log_ratio_max == pytest.approx(wanted.log_ratio_max, rel=1e-5)
    assert (results[1].loss, results[1].grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5, abs=1e-7)
    sent = arrays(member.ask("policy_tensors", 2))
    assert_close(sent, arrays(one.policy_tensors(2)))
    assert apart(sent, arrays(load_file(folder / "model.safetensors"))) > OF_ONE_TENSOR_MAX


ROUNDED = {"bfloat16": BFLOAT16, "all": ALL}


@pytest.mark.parametrize(
    ("of", "name", "layout"),
    some(
        [
            (of, *rest)
            for of in ROUNDED
            for rest in (("grpo", SHARDS), ("ppo", SHARDS), ("grpo", TENSOR), ("ppo", MESH))
        ],
        [("bfloat16", "grpo", SHARDS), ("all", "ppo", SHARDS), ("all", "grpo", TENSOR), ("bfloat16", "ppo", MESH)],
    ),
    ids=named,
)
def test_bfloat16_rounds_no_more_than_in_one_process(
    folder: Path, teams: list[Team], of: str, name: str, layout: Layout
) -> None:
    """Distance of the first step's gradients, of each network, to those of float32 with the same weights."""
    change = ROUNDED[of]
    in_float32 = {**change, "model": {}}
    exact, usual = (alone(job_of(folder, c, name), range(1)).gradient_of(0) for c in (in_float32, change))
    member, _ = stepped(teams, job_of(folder, change, name), 1, layout=layout)
    found = member.gathered("gradient_of", 0)
    for critic in (False, True) if name == "ppo" else (False,):
        parts = ({n: g for n, g in of.items() if n.startswith("critic/") == critic} for of in (found, usual, exact))
        mine, theirs, wanted = parts
        rounding = apart(theirs, wanted)
        assert 0.0 < apart(mine, wanted) <= ROUNDED_MORE_MAX[layout.tensor] * rounding
        assert apart(mine, theirs) <= OTHERWISE_ROUNDED_MAX[layout.tensor, critic] * rounding


RESUMED: dict[str, tuple[dict[str, Any], str, float]] = {
    "lora": (LORA, "grpo", REL_L2_MAX),
    "bfloat16-critic": (BFLOAT16, "ppo", AS_BFLOAT16),
    "all": (ALL, "grpo", AS_BFLOAT16),
}


@pytest.mark.parametrize(
    ("of", "layout"),
    some(
        list(product(RESUMED, (SHARDS, TENSOR, MESH))),
        [("bfloat16-critic", SHARDS), ("lora", TENSOR), ("all", MESH)],
    ),
    ids=named,
)
def test_a_checkpoint_of_several_ranks_resumes_with_one_and_the_other_way_round(
    folder: Path, teams: list[Team], of: str, layout: Layout
) -> None:
    change, name, most = RESUMED[of]
    job = job_of(folder, change, name, **({"ppo_epochs": 2} if change is ALL else {}))
    member, _ = stepped(teams, job, 1, layout=layout)
    written = member.ask("exported", True)
    assert {t.dtype.name for t in written[0].values()} == {"float32"}
    sent = member.ask("policy_tensors", 1)
    teams[0].tell_step(1, {member: [0, 1, 2, 3]})
    member.answer()
    one = alone(job, range(0), written)
    resumed = one.policy_tensors(1)
    assert {t.dtype for t in sent.values()} == {t.dtype for t in resumed.values()}
    assert_close(arrays(sent), arrays(resumed), 0.0)
    one = alone(job, range(1, 2), written)
    rounds = layout.tensor if "model" in change else 1  # each tensor rank rounds its part of a sum
    assert apart(member.gathered("gradient_of", 1), one.gradient_of(1)) <= rounds * most
    state = one.exported()
    member.ask("take", *state, True)
    assert_close(member.ask("exported", True)[0], state[0], 0.0)
    assert_close(arrays(member.ask("policy_tensors", 2)), arrays(one.policy_tensors(2)), 0.0)


COMPARED: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-5),
    "lora": (LORA, 1e-5),
    "bfloat16": (BFLOAT16, AS_BFLOAT16),
}


@pytest.mark.parametrize(
    ("of", "layout"),
    some(list(product(COMPARED, (SHARDS, TENSOR))), [("float32", TENSOR), ("lora", SHARDS), ("bfloat16", TENSOR)]),
    ids=named,
)
def test_tokens_of_previous_versions_are_compared_as_in_one_process(
    folder: Path, teams: list[Team], of: str, layout: Layout
) -> None:
    """Three rows of each step, on two ranks, in passes of one row."""
    change, close = COMPARED[of]
    job = job_of(folder, change, group_size=12, microbatch_tokens_max=16)
    member, results = stepped(teams, job, 1, layout=layout, behind=1)
    sent = member.ask("policy_tensors", 1)
    for step in range(1, 3):
        teams[0].tell_step(step, {member: [0, 1, 2, 3]}, behind=1)
        results.append(member.answer())
    kept = {plain_name(n): rows for n, rows in member.gathered("previous_rows", 1).items()}
    assert_close(kept, {n: t for n, t in arrays(sent).items() if n in kept}, 0.0)
    assert len(kept) == (14 if change is LORA else len(sent))
    one = alone(job, range(3), behind=1)
    assert one.last_result is not None and one.last_result.log_ratio_max is not None
    assert results[2].log_ratio_max == pytest.approx(one.last_result.log_ratio_max, rel=close)
    if change is not BFLOAT16:
        assert_close(member.ask("exported", True)[0], one.exported()[0], OF_ONE_TENSOR_MAX)


@pytest.mark.parametrize("layout", [SHARDS, TENSOR], ids=named)
def test_two_replicas_of_two_ranks_commit_the_same_adapters_and_copy_them_by_rank(
    folder: Path, teams: list[Team], layout: Layout
) -> None:
    team = Team(job_of(folder, ALL))
    teams.append(team)
    members = ready(*(RankedReplica(team, index, layout.ranks, tensor=layout.tensor) for index in range(2)))
    team.join(members)
    for step in range(2):
        team.tell_step(step, dict(zip(members, ([0, 1], [2, 3]), strict=True)))
        results = [m.answer() for m in members]
        assert results[0].commit == results[1].commit
    sent, copied = (arrays(m.ask("policy_tensors", 2)) for m in members)
    assert_close(copied, sent, 0.0)
    members[1].ask("corrupt_weight")
    for holder, rank in zip(members[0].ranks, members[1].ranks, strict=True):
        rank.send("take", *holder.ask("exported"))
    members[1].answers()
    whole, copied = (m.ask("exported", True)[0] for m in members)
    assert_close(copied, whole, 0.0)
    assert_close(arrays(members[1].ask("policy_tensors", 2)), sent, 0.0)
