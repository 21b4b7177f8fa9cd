"""A wrong job file: every problem at once, each `path: reason`; a right one is frozen, and its digest names it."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.core.config.job import JobConfig, load_job, parse_job
from rolecall.core.config.section import Section
from rolecall.core.errors import ConfigError


def _problems(value: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_job(value)
    return caught.value.problems


def test_nothing_at_all_is_the_default_job_and_does_not_act() -> None:
    job = parse_job(None)
    assert job == parse_job({}) == JobConfig()
    assert job.recovery.mode == "observe"
    assert not job.injection_allowed


def test_every_problem_is_reported_at_once_as_path_and_reason() -> None:
    problems = _problems(
        {
            "seed": -1,
            "num_steps": 0,
            "nonsense": 1,
            "roles": {"trainer": 0, "rollout": "many", "critic": 1},
            "detector": {"slow_ratio": 0.5},
            "recovery": {"mode": "yolo"},
            "model": {"num_heads": 4, "num_kv_heads": 3},
        }
    )
    paths = [p.split(": ")[0] for p in problems]
    assert sorted(paths) == sorted(
        [
            "seed",
            "num_steps",
            "nonsense",
            "roles.trainer",
            "roles.rollout",
            "roles.critic",
            "detector.slow_ratio",
            "recovery.mode",
            "model",
        ]
    )
    assert all(": " in p and p.split(": ", 1)[1] for p in problems)
    assert "nonsense: unknown key" in problems
    assert any(p.startswith("model: num_heads (4) must be a multiple of num_kv_heads (3)") for p in problems)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("recovery", "horizon_seconds"),
        ("detector", "hang_p99_factor"),
        ("lora", "alpha"),
        ("evaluation", "pass_reward"),
    ],
)
def test_numbers_are_finite(section: str, name: str, value: float) -> None:
    """JSON, in which the run's processes get the job, has no other numbers."""
    (problem,) = _problems({section: {name: value}})
    assert problem.startswith(f"{section}.{name}: Input should be ")


@pytest.mark.parametrize(
    ("value", "problems"),
    [
        ({"lora": {"target_modules": "q_proj"}}, ["lora.target_modules: expected all-linear, or a list of names"]),
        ({"lora": {"target_modules": []}}, ["lora.target_modules: expected all-linear, or a list of names"]),
        ({"lora": {"target_modules": ["q_proj", 1]}}, ["lora.target_modules: expected all-linear, or a list of names"]),
        ({"sampling": {"stop": ["\n", ""]}}, ["sampling.stop.1: String should have at least 1 character"]),
        ({"num_steps": 5, "optimizer": {"warmup_steps": 6}}, ["optimizer.warmup_steps: 6 are more than num_steps (5)"]),
        ({"reward": "exact", "environment": "a:B"}, ["reward: no meaning without", "environment: no meaning without"]),
    ],
)
def test_each_problem_begins_with_its_setting(value: Any, problems: list[str]) -> None:
    found = _problems(value)
    assert len(found) == len(problems) and all(map(str.startswith, found, problems))


@pytest.mark.parametrize("value", [[], "text", 3, True])
def test_a_job_that_is_no_mapping_is_refused(value: Any) -> None:
    assert _problems(value) == (f"(top): expected a mapping, got {type(value).__name__}",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: [1", "not YAML"),
        ("- a\n- b\n", "expected a mapping, got list"),
        ("seed: 1\nseeed: 2\n", "seeed: unknown key"),
        ("!!python/object/apply:os.system ['true']\n", "not YAML"),
        (
            "seed: 1\nroles: {trainer: 1, trainer: 2}\nseed: 2\n",
            "line 2: duplicate key 'trainer'; line 3: duplicate key 'seed'",
        ),
        ("seed: 2020-13-45\n", "not YAML: month"),
        ("seed: " + "[" * 20_000, "nested too deeply"),
        ("1: 2\nfalse: 3\n", "2 problems\n  1: unknown key\n  False: unknown key"),
        ("? [a]\n: 1\n", "unhashable key"),
        ("a: 1\n---\nb: 1\n", "not YAML"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_job(path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        load_job(binary)


def test_an_empty_mapping_is_the_default_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("{}  # nothing\n")
    assert load_job(path) == JobConfig()


def test_a_job_is_frozen() -> None:
    with pytest.raises(ValidationError):
        JobConfig().seed = 4  # type: ignore[misc]


def test_the_digest_names_the_configuration_without_seed() -> None:
    base = parse_job({"seed": 1})
    assert base.digest() == parse_job({"seed": 2, "injection_allowed": True}).digest()
    assert base.digest() != parse_job({"num_steps": 7}).digest()


@given(
    seed=st.integers(0, 2**31 - 1),
    trainers=st.integers(1, 64),
    rollouts=st.integers(1, 256),
    mode=st.sampled_from(["observe", "approve", "act"]),
    rate=st.floats(0, 1),
)
def test_a_job_survives_being_written_and_read(seed: int, trainers: int, rollouts: int, mode: str, rate: float) -> None:
    job = parse_job(
        {
            "seed": seed,
            "roles": {"trainer": trainers, "rollout": rollouts},
            "recovery": {"mode": mode},
            "algorithm": {"learning_rate": rate},
        }
    )
    assert parse_job(job.model_dump()) == job
    assert JobConfig.model_validate_json(job.model_dump_json()) == job


def _sections(model: type[Section]) -> list[type[Section]]:
    found = [model]
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += _sections(field.annotation)
    return found


@pytest.mark.parametrize("section", _sections(JobConfig), ids=lambda s: s.__name__)
def test_every_section_refuses_unknown_keys(section: type[Section]) -> None:
    with pytest.raises(ValidationError):
        section.model_validate({"surely_not_a_key": 1})


def test_ranks_that_a_replica_cannot_share_are_refused() -> None:
    ranks = {"runtime": {"trainer_ranks": 2, "rollout_ranks": 2}}
    assert parse_job(ranks).runtime.rollout_ranks == 2
    assert _problems({"runtime": {"rollout_ranks": 3}}) == (
        "runtime.rollout_ranks: 3 ranks do not divide the model's 4 attention heads",
    )
    assert "neither divides the other" in "".join(
        _problems({"model": {"num_heads": 12, "num_kv_heads": 6}, "runtime": {"rollout_ranks": 4}})
    )
    tensor = {"runtime": {"trainer_ranks": 6, "trainer_tensor_ranks": 6}, "model": {"num_heads": 12, "num_kv_heads": 4}}
    assert _problems({"runtime": {"trainer_ranks": 3, "trainer_tensor_ranks": 2}}) == (
        "runtime.trainer_tensor_ranks: 2 ranks do not divide the 3 of runtime.trainer_ranks",
    )
    assert _problems(tensor) == (
        "runtime.trainer_tensor_ranks: 6 ranks do not divide the model's 4 key-value heads",
        "runtime.trainer_tensor_ranks: 6 ranks do not divide the model's feed-forward width of 1024",
    )
    rounded = {"path": "/m", "dtype": "bfloat16", "gradient_checkpointing": True}
    change = {"model": rounded, "lora": {"rank": 4}}
    assert parse_job({**change, **ranks}).runtime.trainer_ranks == 2
    assert parse_job({**change, **tensor, "model": rounded}).runtime.trainer_tensor_ranks == 6


def test_one_rank_is_not_part_of_a_dump() -> None:
    """The digest of an older job stays what it was."""
    assert not {"trainer_ranks", "trainer_tensor_ranks"} & JobConfig().model_dump()["runtime"].keys()
    dumped = parse_job({"runtime": {"trainer_ranks": 2}}).model_dump(mode="json")
    assert dumped["runtime"]["trainer_ranks"] == 2 and parse_job(dumped).runtime.trainer_ranks == 2


def test_the_device_is_part_of_a_dump_only_where_the_job_names_it() -> None:
    ours = {"device", "rollout_memory_share", "rollout_cuda_graphs"}
    assert not ours & JobConfig().model_dump()["runtime"].keys()
    given = {"device": "cpu", "rollout_memory_share": 0.5, "rollout_cuda_graphs": False}
    dumped = parse_job({"runtime": given}).model_dump(mode="json")
    assert {name: dumped["runtime"][name] for name in ours} == given
    assert _problems({"runtime": {"device": "tpu"}}) == ("runtime.device: Input should be 'cpu' or 'cuda', got 'tpu'",)
    assert "rollout_memory_share" in "".join(_problems({"runtime": {"rollout_memory_share": 1.0}}))


def _of_mode(mode: str, trainer: int = 2, rollout: int = 2, **runtime: Any) -> dict[str, Any]:
    return {"roles": {"trainer": trainer, "rollout": rollout}, "runtime": {"mode": mode, **runtime}}


def test_a_mode_with_hybrids_fills_in_what_it_implies() -> None:
    assert JobConfig().num_hybrids == 0 and "mode" not in JobConfig().model_dump()["runtime"]
    assert parse_job({"runtime": {"mode": "async"}}).digest() == JobConfig().digest()
    sync, semi_sync = parse_job(_of_mode("sync")), parse_job(_of_mode("semi_sync", rollout=3))
    for job, standbys in ((sync, 0), (semi_sync, 1)):
        assert job.num_hybrids == 2
        assert (job.runtime.staleness_max, job.runtime.standbys) == (0, standbys)
        assert job.runtime.rollout_memory_share == 0.5
        assert parse_job(job.model_dump(mode="json")) == job
    assert parse_job(_of_mode("sync", rollout_memory_share=0.3)).runtime.rollout_memory_share == 0.3
    assert parse_job(_of_mode("semi_sync", rollout=3, standbys=2)).runtime.standbys == 2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (_of_mode("sync", rollout=3), "roles.rollout: 3 rollouts and 2 trainers: mode sync needs one rollout for each"),
        (_of_mode("sync", rollout=1), "roles.rollout: 1 rollout and 2 trainers: mode sync needs one rollout for each"),
        (_of_mode("semi_sync"), "roles.rollout: 2 rollouts and 2 trainers: mode semi_sync needs more rollouts than"),
        (_of_mode("sync", standbys=1), "runtime.standbys: 1 in mode sync: every rollout shares its node"),
        (_of_mode("sync", staleness_max=2), "runtime.staleness_max: 2 in mode sync: a step has only tokens of its own"),
        (_of_mode("semi_sync", rollout=3, staleness_max=1), "runtime.staleness_max: 1 in mode semi_sync: a step has"),
        (_of_mode("sync", trainer_standbys=1), "runtime.trainer_standbys: 1 in mode sync: a trainer shares its node"),
        (_of_mode("semi_sync", rollout=3, trainer_standbys=1), "runtime.trainer_standbys: 1 in mode semi_sync: a"),
        (_of_mode("weekly"), "runtime.mode: Input should be 'async', 'semi_sync' or 'sync', got 'weekly'"),
    ],
)
def test_what_contradicts_a_mode_is_refused(given: dict[str, Any], problem: str) -> None:
    (found,) = _problems(given)
    assert found.startswith(problem)


def test_all_contradictions_of_a_mode_are_reported_at_once() -> None:
    given = _of_mode("sync", rollout=3, standbys=1, trainer_standbys=1, staleness_max=2)
    assert len(_problems(given)) == 4
