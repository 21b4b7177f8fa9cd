"""Section `algorithm` of a job file: the method, and its settings.

A name means a method (`METHODS`): settings that are the method (DAPO's dynamic sampling, T-PPO's groups of one) cannot
be switched off under its name (`FIXED`), and settings of another method are refused, with the reason (`ONLY_OF`). To
switch DAPO's parts on one by one, begin with `grpo`. Omitted settings have the name's own default (`DEFAULTS`), which
suits the built-in tasks and their model of a million parameters; docs/reference/algorithms.md has the papers' values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rolecall.core.config.section import Section


class AlgorithmName(StrEnum):
    GRPO = "grpo"
    DAPO = "dapo"
    PPO = "ppo"
    TPPO = "tppo"
    DR_GRPO = "dr-grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    RLOO = "rloo"
    REINFORCE = "reinforce++"
    REINFORCE_BASELINE = "reinforce++-baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What a name means, besides settings."""

    baseline: Literal["group", "others", "none", "critic"]
    """Subtracted from a sample's reward. group: the mean of the prompt's samples. others: the mean of the other samples
    of the prompt. critic: values of a model of its own."""
    normalized: bool = False
    """Advantages are centred and divided by their deviation over all samples of the step."""
    ratio: Literal["token", "sequence"] = "token"
    """What is clipped: each token's ratio, or one ratio of the whole answer."""


METHODS: Mapping[AlgorithmName, Method] = MappingProxyType(
    {
        AlgorithmName.GRPO: Method(baseline="group"),
        AlgorithmName.DAPO: Method(baseline="group"),
        AlgorithmName.PPO: Method(baseline="critic"),
        AlgorithmName.TPPO: Method(baseline="critic"),
        AlgorithmName.DR_GRPO: Method(baseline="group"),
        AlgorithmName.GSPO: Method(baseline="group", ratio="sequence"),
        AlgorithmName.CISPO: Method(baseline="group"),
        AlgorithmName.RLOO: Method(baseline="others"),
        AlgorithmName.REINFORCE: Method(baseline="none", normalized=True),
        AlgorithmName.REINFORCE_BASELINE: Method(baseline="group", normalized=True),
    }
)
GROUP_RELATIVE = frozenset(n for n, m in METHODS.items() if m.baseline in ("group", "others"))
"""Baseline: the samples of the same prompt."""
WITH_CRITIC = frozenset(n for n, m in METHODS.items() if m.baseline == "critic")
STEP_NORMALIZED = frozenset(n for n, m in METHODS.items() if m.normalized)
BY_GROUP_STD = frozenset({AlgorithmName.GRPO, AlgorithmName.DAPO, AlgorithmName.GSPO, AlgorithmName.CISPO})
"""Those that may divide advantages by the group's standard deviation."""

DEFAULTS: Mapping[AlgorithmName, Mapping[str, Any]] = MappingProxyType(
    {
        AlgorithmName.GRPO: {},
        AlgorithmName.DAPO: {
            "aggregation": "token",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dynamic_sampling": True,
            "overlong_buffer_tokens": 2,
        },
        AlgorithmName.PPO: {"aggregation": "token", "entropy_coefficient": 0.007},
        AlgorithmName.TPPO: {
            "aggregation": "token",
            "entropy_coefficient": 0.007,
            "group_size": 1,
            "groups_per_microbatch": 32,
            "lambda_policy": 1.0,
        },
        AlgorithmName.DR_GRPO: {"divide_by_std": False, "entropy_coefficient": 0.007},
        AlgorithmName.GSPO: {
            "aggregation": "sample",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "entropy_coefficient": 0.007,
        },
        AlgorithmName.CISPO: {"aggregation": "token", "importance_cap": 2.0},
        AlgorithmName.RLOO: {"divide_by_std": False, "entropy_coefficient": 0.007},
        AlgorithmName.REINFORCE: {"aggregation": "token", "divide_by_std": False},
        AlgorithmName.REINFORCE_BASELINE: {"aggregation": "token", "divide_by_std": False},
    }
)
"""Defaults of a name that differ from those of the class, found by trial on the built-in tasks, without a search. DAPO
learns them with its paper's clip range, and so does GSPO, more slowly. Where advantages are not divided by a deviation
(a critic's, RLOO, Dr. GRPO) they are far smaller, and where most answers are clipped (GSPO) less is learned from them:
the entropy bonus must be smaller, too. A step of T-PPO has as many answers as one of PPO, each to a different
prompt. Its policy does not learn from the estimates of a critic that has learned little so far: lambda 1, except for
the value behind a cut."""

WINDOW_TOKENS = 16
"""Default of T-PPO, or the task's longest response if that is shorter: most answers to the built-in tasks end within
it. If most are cut, the reward reaches the policy only through the critic, which has not learned it yet."""

ONLY_OF: Mapping[str, tuple[frozenset[AlgorithmName], str]] = MappingProxyType(
    {
        "divide_by_std": (BY_GROUP_STD, "its advantages are not divided by a group's deviation"),
        "std": (BY_GROUP_STD | STEP_NORMALIZED, "its advantages are not divided by a deviation"),
        "dynamic_sampling": (
            GROUP_RELATIVE,
            "without a group's baseline a group of equal rewards still teaches something",
        ),
        "filter_by": (GROUP_RELATIVE, "only dynamic sampling filters groups"),
        "refills_max": (GROUP_RELATIVE, "only dynamic sampling filters groups"),
        "at_refill_limit": (GROUP_RELATIVE, "only dynamic sampling filters groups"),
        "gamma": (WITH_CRITIC, "only a critic sees states to discount"),
        "lambda_policy": (WITH_CRITIC, "only a critic has temporal differences"),
        "lambda_value": (WITH_CRITIC, "there is no critic to train"),
        "value_learning_rate": (WITH_CRITIC, "there is no critic to train"),
        "value_clip": (WITH_CRITIC, "there is no critic to train"),
        "window_tokens": (frozenset({AlgorithmName.TPPO}), "only T-PPO trains on truncated trajectories"),
        "truncation_value": (frozenset({AlgorithmName.TPPO}), "only T-PPO trains on truncated trajectories"),
        "prefixes": (frozenset({AlgorithmName.TPPO}), "only EGAE can value an answer without a reward"),
    }
)
"""Setting -> the algorithms that have it, and why the others do not."""

FIXED: Mapping[AlgorithmName, Mapping[str, tuple[Any, str]]] = MappingProxyType(
    {
        AlgorithmName.DAPO: {
            "dynamic_sampling": (True, "dapo without dynamic_sampling is not DAPO"),
            "aggregation": ("token", "dapo weighs tokens (aggregation: token)"),
            "divide_by_std": (True, "dapo divides advantages by their standard deviation"),
            "importance_cap": (None, "dapo clips, importance_cap does not"),
            "kl_coefficient": (0.0, "dapo has no divergence term (kl_coefficient: 0)"),
        },
        AlgorithmName.TPPO: {
            "group_size": (1, "tppo refills slots one by one, so its groups have one sample"),
        },
        AlgorithmName.DR_GRPO: {
            "aggregation": ("constant", "dr-grpo divides by a constant (aggregation: constant)"),
        },
        AlgorithmName.GSPO: {
            "aggregation": ("sample", "gspo weighs answers (aggregation: sample)"),
            "importance_cap": (None, "gspo clips, importance_cap does not"),
        },
        AlgorithmName.CISPO: {
            "aggregation": ("token", "cispo weighs tokens (aggregation: token)"),
            "importance": ("token", "cispo truncates the weight of each token (importance: token)"),
        },
    }
)
"""Name -> the settings that are the method: their value, and the error message otherwise."""
CLIPS = ("clip_low", "clip_high", "dual_clip")
FILTERS = ("filter_by", "refills_max", "at_refill_limit")
UNUSED_IF: tuple[tuple[tuple[str, ...], Callable[["AlgorithmConfig"], bool], str], ...] = (
    (CLIPS, lambda a: a.importance_cap is not None, "no meaning with importance_cap: nothing is clipped"),
    (("importance",), lambda a: a.importance_cap is None, "no meaning without importance_cap: nothing is truncated"),
    (
        FILTERS,
        lambda a: not a.dynamic_sampling,
        "no meaning without dynamic_sampling, every group is trained on then",
    ),
    (("kl_in_reward",), lambda a: a.kl_coefficient == 0, "no meaning without kl_coefficient"),
    (
        ("kl_estimator",),
        lambda a: a.kl_coefficient == 0 or a.kl_in_reward,
        "no meaning without a divergence in the loss: kl_coefficient is 0, or kl_in_reward takes k1",
    ),
    (
        ("rejection_low", "rejection_high"),
        lambda a: a.rejection == "none",
        "no meaning without rejection: nothing is left out",
    ),
    (
        ("std",),
        lambda a: not (a.divide_by_std or a.method.normalized),
        "no meaning without divide_by_std: advantages are not divided by a deviation",
    ),
)
"""Settings, when they have no meaning, and why. They are refused then, and not written."""


class AlgorithmConfig(Section):
    name: AlgorithmName = AlgorithmName.GRPO
    """The method: docs/reference/algorithms.md has the table."""
    group_size: Annotated[int, Field(ge=1, le=256)] = 8
    """Answers per prompt: the group that advantages are relative to. Without a baseline from the group it may be 1."""
    microbatches_per_step: Annotated[int, Field(ge=1, le=1024)] = 4
    """B of invariant Constant work (docs/invariants.md): every step uses exactly this many."""
    groups_per_microbatch: Annotated[int, Field(ge=1, le=256)] = 4
    """Prompt groups in one microbatch."""
    mini_batches: Annotated[int, Field(ge=1, le=1024)] = 1
    """Equal parts of a step's microbatches, each with an optimizer update of its own. A step is committed after its
    last update. A multiple of the trainers in microbatches_per_step / mini_batches keeps all of them busy."""
    ppo_epochs: Annotated[int, Field(ge=1, le=64)] = 1
    """Passes over a step's mini-batches. Above one update a step, ratios and values are those to the policy and critic
    before the step, and a trainer needs memory for a second copy of weights and moments."""
    microbatch_tokens_max: Annotated[int, Field(ge=1)] | None = None
    """Padded tokens of one forward and backward pass; a microbatch of more is computed in several, and their gradients
    are added. A smaller value needs less memory and more time. null: a microbatch in one pass."""
    learning_rate: Annotated[float, Field(ge=0, le=1)] = 1e-3
    """Of the policy's AdamW; section `optimizer` has its schedule."""
    grad_norm_max: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of policy and critic are each clipped to this norm."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Ratios below 1 - clip_low are clipped; see clip_high."""
    clip_high: Annotated[float, Field(gt=0, lt=10)] = 1.0
    """Upper clip range: the ratio to the policy that made a token is clipped to [1 - clip_low, 1 + clip_high]. DAPO's
    0.2 and 0.28 are for a learning rate of 1e-6; here two versions of staleness move ratios far more."""
    dual_clip: Annotated[float, Field(gt=1, le=1000)] | None = 3.0
    """Ratios of tokens with a negative advantage are clipped to this from above: the most that one token counts for. A
    smaller value leaves out more of what the policy must unlearn. null: such a ratio is not bounded."""
    aggregation: Literal["constant", "token", "sample"] = "constant"
    """Divisor of the sum over tokens. constant: samples x longest answer (Dr. GRPO). token: tokens trained in the step
    (DAPO). sample: each sample's own tokens first, then the samples (GRPO)."""
    divide_by_std: bool = True
    """Divide a group's advantages by their standard deviation (GRPO); Dr. GRPO does not."""
    std: Literal["population", "sample"] = "population"
    """Deviation that advantages are divided by. population: of n rewards, divided by n. sample: by n - 1 (Bessel's
    correction), as in TRL and verl; advantages of a group of 8 are 6 % smaller."""
    entropy_coefficient: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Bonus for the policy's entropy at each token. Without it a model from random weights settles on one answer; a
    larger value keeps answers random for longer."""
    kl_coefficient: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Weight of the divergence from the run's first policy. Above 0 each trainer keeps a frozen copy of it."""
    kl_in_reward: bool = False
    """Subtract the divergence from each token's reward (estimator k1) instead of adding it to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence in the loss. k3: unbiased and never negative. k2: half the squared log-ratio, biased,
    but not its gradient. k1 is refused: in a loss its gradient is 0 in the mean."""
    importance_cap: Annotated[float, Field(ge=1, le=1000)] | None = None
    """null: clipped ratios against the policy that made each token. A number: truncated importance weights, at most
    this, and no clip range."""
    importance: Literal["token", "sequence"] = "token"
    """Truncated weight. token: each token's own. sequence: the product over the answer's trained tokens, for all of
    them; unbiased, and of far larger variance."""
    rejection: Literal["none", "token", "sequence"] = "none"
    """Leave out what the sampler made with a very different probability. token: single tokens. sequence: whole answers,
    by the geometric mean over their trained tokens."""
    rejection_low: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Ratios to the sampler below this are left out. A larger value leaves out more."""
    rejection_high: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Ratios to the sampler above this are left out. A smaller value leaves out more."""
    dynamic_sampling: bool = False
    """Drop groups without a learning signal, and generate others until the step's batch is full (DAPO)."""
    filter_by: Literal["reward", "exact"] = "reward"
    """Groups without a learning signal. reward: all rewards are equal. exact: all answers are exact, or none is (as in
    DAPO; with graded rewards, learning starts only at the first exact answer)."""
    refills_max: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Batches of groups that may be generated for one step."""
    at_refill_limit: Literal["fail", "take"] = "fail"
    """fail: the run ends and reports that prompts are too easy or too hard. take: the newest filtered groups fill the
    batch."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Tokens before overlong_limit_tokens over which the overlong penalty grows to 1 (DAPO). 0: no penalty."""
    overlong_limit_tokens: Annotated[int, Field(ge=1)] | None = None
    """Answer length at which the overlong penalty is 1. null: max_response_tokens of the task."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of later rewards."""
    lambda_policy: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda for the policy's advantages: 0 trusts the critic, 1 the actual return."""
    lambda_value: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE's lambda for the critic's targets. 1: the discounted reward itself."""
    value_learning_rate: Annotated[float, Field(ge=0, le=1)] = 1e-3
    """Of the critic's AdamW."""
    value_clip: Annotated[float, Field(gt=0)] | None = None
    """Largest change of a value within a step that the critic learns from (PPO2). Needs several updates a step
    (ppo_epochs x mini_batches)."""
    window_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """T-PPO: tokens of one window. null: 16, or the task's longest answer if that is shorter."""
    truncation_value: Literal["critic", "previous"] = "critic"
    """T-PPO: value of the state behind a cut. critic: the critic's estimate. previous: the value of the state before
    the last token, as the paper assumes."""
    prefixes: Literal["continue", "train"] = "continue"
    """Unfinished answers of a dead engine. continue: generated elsewhere to the end of the window. train: the window
    ends there, is trained on, and the answer continues in the next one."""

    @property
    def groups_per_step(self) -> int:
        return self.microbatches_per_step * self.groups_per_microbatch

    @property
    def num_updates(self) -> int:
        """Optimizer updates of one step."""
        return self.ppo_epochs * self.mini_batches

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    @property
    def has_critic(self) -> bool:
        return self.name in WITH_CRITIC

    @model_validator(mode="before")
    @classmethod
    def _of_this_name(cls, value: Any) -> Any:
        """Fills in the name's defaults, and rejects settings of another algorithm."""
        if not isinstance(value, dict):
            return value
        try:
            name = AlgorithmName(value.get("name", AlgorithmName.GRPO))
        except ValueError:
            return value  # the field's own validation reports it
        foreign = [
            f"{key} has no meaning for {name}: {why}"
            for key, (names, why) in ONLY_OF.items()
            if key in value and name not in names
        ]
        if foreign:
            raise ValueError("; ".join(foreign))
        return {**DEFAULTS[name], **value}

    @model_validator(mode="after")
    def _is_what_it_says(self) -> Self:
        problems = [why for holds, why in self._rules() if not holds]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _rules(self) -> list[tuple[bool, str]]:
        """(whether it holds, the error message otherwise)."""
        given = self.model_fields_set - DEFAULTS[self.name].keys()
        dapo = self.name is AlgorithmName.DAPO
        instead = "begin with `name: grpo`"
        return [
            *(
                (getattr(self, key) == value, f"{why}: {instead}" if self.name in GROUP_RELATIVE else why)
                for key, (value, why) in FIXED.get(self.name, {}).items()
            ),
            *(
                (not (unused(self) and given & {*keys}), f"{', '.join(sorted(given & {*keys}))}: {why}")
                for keys, unused, why in UNUSED_IF
            ),
            (
                not dapo or self.overlong_buffer_tokens > 0,
                f"dapo punishes length softly (overlong_buffer_tokens above 0): {instead}",
            ),
            (not dapo or self.clip_high > self.clip_low, f"dapo clips higher above than below: {instead}"),
            (
                self.microbatches_per_step % self.mini_batches == 0,
                (
                    f"mini_batches ({self.mini_batches}) must divide microbatches_per_step "
                    f"({self.microbatches_per_step}): mini-batches are equal"
                ),
            ),
            (
                self.name is not AlgorithmName.CISPO or self.importance_cap is not None,
                f"cispo truncates weights (importance_cap): {instead} for a clip range",
            ),
            (
                self.name not in GROUP_RELATIVE or self.group_size > 1,
                f"group_size must be at least 2: {self.name} compares the samples of a prompt",
            ),
            (
                self.method.ratio == "token" or self.rejection != "token",
                f"{self.name} has one ratio for each answer: reject answers (rejection: sequence)",
            ),
            (
                self.kl_estimator != "k1",
                "kl_estimator k1 has a gradient of 0 in the mean: take k2 or k3, or kl_in_reward: true",
            ),
            (
                not (self.kl_in_reward and self.method.normalized),
                (
                    f"{self.name} has no kl_in_reward: the step's mean and deviation are those of the task's rewards, "
                    "and known before any reference log-probability"
                ),
            ),
            (
                self.value_clip is None or self.num_updates > 1,
                "value_clip has no meaning with one update a step (ppo_epochs x mini_batches): no value has changed",
            ),
            (
                self.overlong_limit_tokens is None or self.overlong_buffer_tokens > 0,
                "overlong_limit_tokens has no meaning without overlong_buffer_tokens",
            ),
            (
                self.overlong_limit_tokens is None or self.overlong_buffer_tokens <= self.overlong_limit_tokens,
                (
                    f"overlong_buffer_tokens ({self.overlong_buffer_tokens}) is longer than overlong_limit_tokens "
                    f"({self.overlong_limit_tokens})"
                ),
            ),
        ]

    @model_serializer(mode="wrap")
    def _only_what_it_has(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        unused = {key for keys, is_unused, _ in UNUSED_IF if is_unused(self) for key in keys}
        return {k: v for k, v in dumped.items() if k not in unused and (k not in ONLY_OF or self.name in ONLY_OF[k][0])}
