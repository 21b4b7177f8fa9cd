"""Section `algorithm`: what belongs to which algorithm, what contradicts itself, and that a job is what was written.

pytest tests/core/test_config_algorithm.py
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.core.config.algorithm import (
    CLIPS,
    DEFAULTS,
    FILTERS,
    FIXED,
    GROUP_RELATIVE,
    METHODS,
    ONLY_OF,
    STEP_NORMALIZED,
    UNUSED_IF,
    WITH_CRITIC,
    AlgorithmConfig,
    AlgorithmName,
)
from rolecall.core.config.job import JobConfig, TaskConfig, parse_job
from rolecall.core.errors import ConfigError

# A legal value, and not the default, of every setting that only some algorithms have.
OTHER: dict[str, Any] = {
    "divide_by_std": False,
    "std": "sample",
    "value_clip": 0.2,
    "dynamic_sampling": True,
    "filter_by": "exact",
    "refills_max": 3,
    "at_refill_limit": "take",
    "gamma": 0.9,
    "lambda_policy": 0.5,
    "lambda_value": 0.5,
    "value_learning_rate": 0.5,
    "window_tokens": 4,
    "truncation_value": "previous",
    "prefixes": "train",
}
FOREIGN = [(name, key) for key, (names, _) in ONLY_OF.items() for name in AlgorithmName if name not in names]
OWN = [(name, key) for key, (names, _) in ONLY_OF.items() for name in AlgorithmName if name in names]


def made(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(values)


def needed_for(key: str) -> dict[str, Any]:
    """Other settings, without which this one has no meaning."""
    if key in FILTERS:
        return {"dynamic_sampling": True}
    return {"ppo_epochs": 2} if key == "value_clip" else {}


def refusal(**values: Any) -> str:
    """The one sentence with which it is refused."""
    with pytest.raises(ValidationError) as caught:
        made(**values)
    (error,) = caught.value.errors()
    return str(error["msg"])


# --- each algorithm's own


def test_every_setting_that_some_lack_is_tried() -> None:
    assert OTHER.keys() == ONLY_OF.keys()
    assert AlgorithmConfig.model_fields.keys() >= {*ONLY_OF, *CLIPS, *FILTERS}
    assert set(AlgorithmName) == DEFAULTS.keys() == METHODS.keys()
    assert GROUP_RELATIVE | WITH_CRITIC | STEP_NORMALIZED == set(AlgorithmName)
    assert not (GROUP_RELATIVE | STEP_NORMALIZED) & WITH_CRITIC


@pytest.mark.parametrize(("name", "key"), FOREIGN)
def test_settings_of_another_algorithm_are_rejected_with_the_reason(name: AlgorithmName, key: str) -> None:
    _, why = ONLY_OF[key]
    for value in (OTHER[key], AlgorithmConfig.model_fields[key].default):
        assert f"{key} has no meaning for {name}: {why}" in refusal(name=name, **{key: value})


@pytest.mark.parametrize(("name", "key"), OWN)
def test_an_algorithms_own_settings_are_accepted_and_shown(name: AlgorithmName, key: str) -> None:
    if (name, key) == ("dapo", "divide_by_std"):
        return  # a rule of its own
    found = made(name=name, **needed_for(key), **{key: OTHER[key]})
    assert getattr(found, key) == OTHER[key] == found.model_dump()[key]


@pytest.mark.parametrize("name", AlgorithmName)
def test_an_algorithm_omits_settings_it_lacks(name: AlgorithmName) -> None:
    assert not {key for n, key in FOREIGN if n is name} & made(name=name).model_dump().keys()


def test_all_that_is_foreign_is_reported_at_once() -> None:
    values = refusal(name="grpo", gamma=0.9, window_tokens=3)
    assert "gamma has" in values and "window_tokens has" in values


# --- defaults


def test_defaults_of_each_name() -> None:
    grpo, dapo, ppo, tppo = (made(name=n) for n in ("grpo", "dapo", "ppo", "tppo"))
    assert grpo == AlgorithmConfig() == made()
    assert (grpo.aggregation, grpo.divide_by_std, grpo.dynamic_sampling, grpo.overlong_buffer_tokens) == (
        "constant",
        True,
        False,
        0,
    )
    assert (dapo.aggregation, dapo.dynamic_sampling, dapo.divide_by_std) == ("token", True, True)
    assert dapo.overlong_buffer_tokens > 0 and dapo.clip_high > dapo.clip_low and dapo.kl_coefficient == 0
    assert tppo.group_size == 1
    assert [a.has_critic for a in (grpo, dapo, ppo, tppo)] == [False, False, True, True]
    assert all(a.window_tokens is None for a in (grpo, dapo, ppo, tppo))  # of a whole job: see test_config_task


@pytest.mark.parametrize("name", AlgorithmName)
def test_a_names_defaults_hold_where_nothing_is_given_and_give_way(name: AlgorithmName) -> None:
    found = made(name=name)
    assert {key: getattr(found, key) for key in DEFAULTS[name]} == DEFAULTS[name]
    assert made(name=name, learning_rate=0.25).learning_rate == 0.25
    if found.importance_cap is None:
        assert made(name=name, clip_low=0.125).clip_low == 0.125
        assert found.dual_clip == 3.0


def test_groups_of_a_step() -> None:
    assert made(microbatches_per_step=3, groups_per_microbatch=5).groups_per_step == 15


# --- rules

RULES: dict[str, tuple[dict[str, Any], str]] = {
    "dapo without sampling": ({"name": "dapo", "dynamic_sampling": False}, "dapo without dynamic_sampling is not DAPO"),
    "unequal mini-batches": (
        {"microbatches_per_step": 4, "mini_batches": 3},
        "mini_batches (3) must divide microbatches_per_step (4)",
    ),
    "dapo by sample": ({"name": "dapo", "aggregation": "sample"}, "dapo weighs tokens"),
    "dapo without deviation": ({"name": "dapo", "divide_by_std": False}, "dapo divides advantages"),
    "dapo without punishment": ({"name": "dapo", "overlong_buffer_tokens": 0}, "dapo punishes length softly"),
    "dapo clips evenly": ({"name": "dapo", "clip_low": 0.2, "clip_high": 0.2}, "dapo clips higher above than below"),
    "dapo capped": ({"name": "dapo", "importance_cap": 2.0}, "dapo clips, importance_cap does not"),
    "dapo with divergence": ({"name": "dapo", "kl_coefficient": 0.1}, "dapo has no divergence term"),
    "tppo in groups": ({"name": "tppo", "group_size": 2}, "its groups have one sample"),
    "dr-grpo by token": ({"name": "dr-grpo", "aggregation": "token"}, "dr-grpo divides by a constant"),
    "gspo by token": ({"name": "gspo", "aggregation": "token"}, "gspo weighs answers"),
    "gspo capped": ({"name": "gspo", "importance_cap": 2.0}, "gspo clips, importance_cap does not"),
    "gspo, tokens rejected": ({"name": "gspo", "rejection": "token"}, "gspo has one ratio for each answer"),
    "cispo by sample": ({"name": "cispo", "aggregation": "sample"}, "cispo weighs tokens"),
    "cispo by answer": ({"name": "cispo", "importance": "sequence"}, "cispo truncates the weight of each token"),
    "cispo without weights": ({"name": "cispo", "importance_cap": None}, "cispo truncates weights (importance_cap)"),
    "clip range of weights": (
        {"importance_cap": 2.0, "dual_clip": 3.0},
        "dual_clip: no meaning with importance_cap: nothing is clipped",
    ),
    "kind of weights, without": ({"importance": "sequence"}, "importance: no meaning without importance_cap"),
    "divergence of weight 0": ({"kl_in_reward": True}, "kl_in_reward: no meaning without kl_coefficient"),
    "estimator in the reward": (
        {"kl_coefficient": 0.1, "kl_in_reward": True, "kl_estimator": "k2"},
        "kl_estimator: no meaning without a divergence in the loss",
    ),
    "k1 in the loss": ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_estimator k1 has a gradient of 0"),
    "divergence in normalized rewards": (
        {"name": "reinforce++", "kl_coefficient": 0.1, "kl_in_reward": True},
        "reinforce++ has no kl_in_reward",
    ),
    "bounds of no rejection": ({"rejection_low": 0.9}, "rejection_low: no meaning without rejection"),
    "deviation of no division": ({"divide_by_std": False, "std": "sample"}, "std: no meaning without divide_by_std"),
    "grpo alone": ({"group_size": 1}, "group_size must be at least 2: grpo compares the samples of a prompt"),
    "a normalized group alone": (
        {"name": "reinforce++-baseline", "group_size": 1},
        "group_size must be at least 2: reinforce++-baseline compares",
    ),
    "filter of nothing": ({"filter_by": "exact"}, "filter_by: no meaning without dynamic_sampling"),
    "values that have not changed": (
        {"name": "ppo", "value_clip": 0.2},
        "value_clip has no meaning with one update a step (ppo_epochs x mini_batches): no value has changed",
    ),
    "punishment at a length, of nothing": (
        {"overlong_limit_tokens": 4},
        "overlong_limit_tokens has no meaning without overlong_buffer_tokens",
    ),
    "punishment longer than all": (
        {"overlong_limit_tokens": 4, "overlong_buffer_tokens": 5},
        "overlong_buffer_tokens (5) is longer than overlong_limit_tokens (4)",
    ),
}


@pytest.mark.parametrize(("values", "why"), RULES.values(), ids=RULES)
def test_a_contradiction_is_refused_with_the_reason(values: dict[str, Any], why: str) -> None:
    assert why in refusal(**values)


def test_every_rule_is_tried() -> None:
    tried = [why for _, why in RULES.values()]
    assert len(set(tried)) == len(tried)
    for name in AlgorithmName:
        for key in FIXED.get(name, {}):
            assert any(values.get("name") == name and key in values for values, _ in RULES.values()), (name, key)
    for keys, _, why in UNUSED_IF:
        assert any(f": {why}".startswith(text[text.index(": ") :]) for text in tried if text.startswith(keys)), keys
    own_rules = len(AlgorithmConfig()._rules()) - len(UNUSED_IF)
    with_name = sum(len(fixed) for fixed in FIXED.values())
    assert len(RULES) == own_rules + with_name + len(UNUSED_IF) + 1, "one of them with two examples"


ALLOWED: dict[str, dict[str, Any]] = {
    "a critic alone": {"name": "ppo", "group_size": 1},
    "a critic in groups": {"name": "ppo", "group_size": 8},
    "a critic, with a punishment of length": {"name": "ppo", "overlong_buffer_tokens": 2, "overlong_limit_tokens": 2},
    "dapo's parts one by one: clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dapo's parts one by one: tokens": {"aggregation": "token"},
    "dapo's parts one by one: sampling": {"dynamic_sampling": True, "filter_by": "exact", "refills_max": 1},
    "dapo's parts one by one: length": {"overlong_buffer_tokens": 2},
    "no limit on ratios but a cap": {"importance_cap": 1.0},
    "no limit on ratios of what is wrong": {"dual_clip": None},
    "one weight for an answer": {"importance_cap": 2.0, "importance": "sequence"},
    "answers rejected": {"rejection": "sequence", "rejection_low": 0.99, "rejection_high": 1.01},
    "divergence in the reward": {"name": "rloo", "kl_coefficient": 0.1, "kl_in_reward": True},
    "no groups": {"name": "reinforce++", "group_size": 1, "std": "sample"},
    "dynamic sampling, then normalized": {"name": "reinforce++-baseline", "dynamic_sampling": True},
}


@pytest.mark.parametrize("values", ALLOWED.values(), ids=ALLOWED)
def test_valid_combinations_are_accepted(values: dict[str, Any]) -> None:
    found = made(**values)
    assert {key: getattr(found, key) for key in values} == values


@pytest.mark.parametrize("key", FILTERS)
@pytest.mark.parametrize("given", [{}, {"dynamic_sampling": False}], ids=["by default", "off"])
def test_settings_of_a_filter_that_is_off_are_refused(given: dict[str, Any], key: str) -> None:
    assert f"{key}: no meaning without dynamic_sampling" in refusal(**given, **{key: OTHER[key]})
    assert key not in made(**given).model_dump()
    assert getattr(made(dynamic_sampling=True, **{key: OTHER[key]}), key) == OTHER[key]


@pytest.mark.parametrize("name", [n for n in AlgorithmName if "importance_cap" not in FIXED.get(n, {})])
@pytest.mark.parametrize("key", CLIPS)
def test_with_a_cap_nothing_is_clipped(name: str, key: str) -> None:
    value = 1.3 if key == "dual_clip" else 0.3
    assert f"{key}: no meaning with importance_cap" in refusal(name=name, importance_cap=2.0, **{key: value})
    assert key not in made(name=name, importance_cap=2.0).model_dump()
    if name != "cispo":
        assert made(name=name, importance_cap=None, **{key: value}).model_dump()[key] == value


UNFIT: dict[str, dict[str, Any]] = {
    "no such algorithm": {"name": "reinforce"},
    "a list for a name": {"name": ["grpo"]},
    "unknown key": {"clip": 0.2},
    "clip of everything": {"clip_low": 1.0},
    "no clip range": {"clip_high": 0.0},
    "cap below 1": {"importance_cap": 0.5},
    "dual clip of nothing wrong": {"dual_clip": 1.0},
    "no change of values": {"name": "ppo", "ppo_epochs": 2, "value_clip": 0.0},
    "deviation": {"std": "bessel"},
    "estimator": {"kl_coefficient": 0.1, "kl_estimator": "k4"},
    "level of weights": {"importance_cap": 2.0, "importance": "group"},
    "rejection of all below 2": {"rejection": "token", "rejection_low": 2.0},
    "no number": {"learning_rate": math.nan},
    "endless": {"grad_norm_max": math.inf},
    "no norm": {"grad_norm_max": 0.0},
    "aggregation": {"aggregation": "mean"},
    "no discount factor": {"name": "ppo", "gamma": 0.0},
    "lambda above 1": {"name": "ppo", "lambda_policy": 1.1},
    "no window": {"name": "tppo", "window_tokens": 0},
    "cut": {"name": "tppo", "truncation_value": "zero"},
    "prefixes": {"name": "tppo", "prefixes": "drop"},
    "no refills": {"dynamic_sampling": True, "refills_max": 0},
    "negative divergence": {"kl_coefficient": -0.1},
    "negative cache": {"overlong_buffer_tokens": -1},
}


@pytest.mark.parametrize("values", UNFIT.values(), ids=UNFIT)
def test_an_invalid_value_is_rejected_with_its_path(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"algorithm": values})
    *_, key = values
    assert any(problem.startswith(f"algorithm.{key}: ") for problem in caught.value.problems)


def test_a_contradiction_in_a_job_file_names_the_section() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"algorithm": {"name": "ppo", "refills_max": 3}})
    (problem,) = caught.value.problems
    assert problem.startswith("algorithm: refills_max has no meaning for ppo: only dynamic sampling filters groups")


@pytest.mark.parametrize("section", [None, [], "grpo", 3])
def test_a_section_of_another_kind_is_refused(section: Any) -> None:
    with pytest.raises(ConfigError, match="algorithm"):
        parse_job({"algorithm": section})


LONGEST = JobConfig().task.max_response_tokens
TOO_LONG = [
    ("overlong_limit_tokens", {"overlong_buffer_tokens": 1, "overlong_limit_tokens": LONGEST + 1}),
    ("overlong_buffer_tokens", {"overlong_buffer_tokens": LONGEST + 1}),
    ("window_tokens", {"name": "tppo", "window_tokens": LONGEST + 1}),
]


@pytest.mark.parametrize(("key", "values"), TOO_LONG, ids=[key for key, _ in TOO_LONG])
def test_lengths_are_held_against_the_tasks_longest_response(key: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}: {LONGEST + 1} is longer than the longest response"):
        parse_job({"algorithm": values})
    parse_job({"algorithm": {**values, key: LONGEST}})


def test_a_budget_holds_the_longest_sample() -> None:
    longest = JobConfig().max_tokens
    because = rf"algorithm\.microbatch_tokens_max: {longest - 1} is less than the longest .* \({longest} tokens\)"
    with pytest.raises(ConfigError, match=because):
        parse_job({"algorithm": {"microbatch_tokens_max": longest - 1}})
    assert parse_job({"algorithm": {"microbatch_tokens_max": longest}}).algorithm.microbatch_tokens_max == longest


def test_updates_of_a_step() -> None:
    assert AlgorithmConfig().num_updates == 1
    assert made(microbatches_per_step=6, mini_batches=3, ppo_epochs=4).num_updates == 12


# --- written and read


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError):
        made().group_size = 3


def settings_of(name: AlgorithmName) -> st.SearchStrategy[dict[str, Any]]:
    """Settings that fit the name and one another."""
    chosen: dict[str, st.SearchStrategy[Any]] = {
        "learning_rate": st.floats(0, 1),
        "grad_norm_max": st.floats(0.001, 1e6),
        "entropy_coefficient": st.floats(0, 1),
        "microbatches_per_step": st.integers(1, 1024),
    }
    chosen |= {key: st.just(OTHER[key]) for n, key in OWN if n is name and key not in FILTERS}
    chosen.pop("divide_by_std", None)  # `std` needs it
    fixed = FIXED.get(name, {})
    if name == "dapo":
        chosen |= {"clip_high": st.floats(0.3, 9), "overlong_buffer_tokens": st.integers(1, 9)}
    else:
        chosen["kl_coefficient"] = st.floats(0, 10)
    if "aggregation" not in fixed:
        chosen["aggregation"] = st.sampled_from(["constant", "token", "sample"])
    clips = st.fixed_dictionaries(
        {}, optional={"clip_low": st.floats(0.01, 0.2), "dual_clip": st.none() | st.floats(1.1, 1000)}
    )
    levels = ["token"] if "importance" in fixed else ["token", "sequence"]
    weights = st.fixed_dictionaries(
        {"importance_cap": st.floats(1, 1000)}, optional={"importance": st.sampled_from(levels)}
    )
    ways = [*([clips] if name != "cispo" else []), *([weights] if "importance_cap" not in fixed else [])]
    way = st.one_of(ways)
    plain = st.fixed_dictionaries({"name": st.just(name)}, optional=chosen)
    filters = st.fixed_dictionaries({}, optional={key: st.just(OTHER[key]) for key in FILTERS})

    def joined(parts: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
        values, weight, sampling = parts
        filtering = name == "dapo" or values.get("dynamic_sampling", False)
        clipping = needed_for("value_clip") if "value_clip" in values else {}
        return {**values, **weight, **clipping, **(sampling if filtering else {})}

    return st.tuples(plain, way, filters).map(joined)


@given(values=st.sampled_from(AlgorithmName).flatmap(settings_of))
def test_it_survives_being_written_and_read(values: dict[str, Any]) -> None:
    config = made(**values)
    assert {key: getattr(config, key) for key in values} == values
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    assert AlgorithmConfig.model_validate(config.model_dump(mode="json")) == config
    text = config.model_dump_json()
    assert AlgorithmConfig.model_validate_json(text) == config
    assert AlgorithmConfig.model_validate_json(text).model_dump_json() == text
    assert config.model_dump(mode="json") == json.loads(text)


@pytest.mark.parametrize("name", AlgorithmName)
def test_a_whole_job_survives_too(name: str) -> None:
    job = parse_job({"algorithm": {"name": name}})
    assert parse_job(job.model_dump(mode="json")) == job == JobConfig.model_validate_json(job.model_dump_json())


def test_the_digest_covers_every_setting() -> None:
    jobs = [parse_job({"algorithm": {"name": name}}) for name in AlgorithmName]
    for name, key in OWN:
        if (name, key) != ("dapo", "divide_by_std"):
            values = {"name": name, **needed_for(key), key: OTHER[key]}
            jobs.append(parse_job({"algorithm": values}))
    # Of dapo, dynamic_sampling is no change; of the others, it is the base of their filters.
    assert len({job.digest() for job in jobs}) == len({job.model_dump_json() for job in jobs}) == len(jobs) - 1
    written = parse_job({"algorithm": made().model_dump()})
    assert written.digest() == JobConfig().digest(), "defaults are the same whether they are written out or not"


@pytest.mark.parametrize("section", [AlgorithmConfig, TaskConfig])
def test_every_setting_is_in_the_page_on_algorithms(section: type[AlgorithmConfig] | type[TaskConfig]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md").read_text()
    settings = page.partition("## Settings")[2].partition("## Tasks")[0]
    assert [name for name in section.model_fields if f"`{name}`" not in settings] == []
