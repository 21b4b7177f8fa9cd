"""A job file: one frozen model per component. All problems are reported at once, each `path: reason`.

Unknown keys are rejected. All models are here and not in their components, so that a launcher can validate a job file
without torch or Ray.
"""

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from rolecall.core.config.algorithm import WINDOW_TOKENS, AlgorithmConfig, AlgorithmName
from rolecall.core.config.data import DataConfig, EnvironmentConfig, EvaluationConfig, RewardConfig, SamplingConfig
from rolecall.core.config.logging import LoggingConfig
from rolecall.core.config.lora import LoraSettings
from rolecall.core.config.optimizer import OptimizerConfig
from rolecall.core.config.section import JournalUrl, PositiveInt, Ratio, RecoveryMode, Seconds, Section
from rolecall.core.errors import ConfigError
from rolecall.core.ids import ID_PATTERN
from rolecall.core.journal.database import redacted
from rolecall.core.membership import STANDBY_ROLE, STANDBY_ROLES, TRAINER_STANDBY_ROLE
from rolecall.core.text import counted, os_reason


class ModelConfig(Section):
    """A Qwen3-shaped decoder made locally from `seed`, or a Hugging Face model folder."""

    path: str | None = None
    """Folder with config.json and safetensors. null: a small model is created locally from the seed."""
    hidden_size: Annotated[int, Field(ge=32, le=4096)] = 128
    """Width of the local model."""
    intermediate_size: Annotated[int, Field(ge=32, le=16_384)] = 1024
    """Width of its feed-forward layers."""
    num_layers: Annotated[int, Field(ge=1, le=64)] = 2
    """Decoder layers."""
    num_heads: Annotated[int, Field(ge=1, le=64)] = 4
    """Attention heads; a multiple of num_kv_heads."""
    num_kv_heads: Annotated[int, Field(ge=1, le=64)] = 2
    """Key and value heads."""
    head_dim: Annotated[int, Field(ge=16, le=256)] = 32
    """Size of one head."""
    num_parameters: Annotated[int, Field(ge=1)] | None = None
    """Parameters of the model folder, without the embedding, for the MFU. null: no MFU with a model folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that trainers and engines compute with. The optimizer has float32 weights in both. bfloat16 needs
    a model folder."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, layer by layer, instead of keeping them: less memory, about a
    third more time. Needs a model folder."""

    @model_validator(mode="after")
    def _of_a_folder(self) -> "ModelConfig":
        if self.path is None:
            given = {"dtype": self.dtype != "float32", "gradient_checkpointing": self.gradient_checkpointing}
            names = " and ".join(name for name, is_set in given.items() if is_set)
            if names:
                raise ValueError(f"{names} without path: the built-in model is float32 and keeps its activations")
        return self

    @model_validator(mode="after")
    def _heads(self) -> "ModelConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        return self


SURPLUS_TOKENS = 3
"""Tokens that may be generated beyond the exact answer: the model must learn to stop, at a low cost."""


class TaskName(StrEnum):
    DIGIT_PARITY = "digit_parity"
    LONG_ADDITION = "long_addition"


class TaskConfig(Section):
    name: TaskName = TaskName.DIGIT_PARITY
    """digit_parity: for each digit, odd or even. long_addition: two numbers added place by place; most answers are
    short, some are long."""
    num_digits: Annotated[int, Field(ge=1, le=64)] = 12
    """Length of prompt and answer, the maximum where lengths vary. A larger value is harder."""
    base: Annotated[int, Field(ge=2, le=10)] = 2
    """Base of long_addition's numbers. A larger value is harder: there are more sums to learn."""
    fixed_length: bool = False
    """Every answer has the maximum length: for measurements of speed."""

    @property
    def max_response_tokens(self) -> int:
        """The longest response."""
        return self._tokens_a_place * self.num_digits + 1 + SURPLUS_TOKENS

    @property
    def max_tokens(self) -> int:
        """Prompt and longest response together."""
        return self._tokens_a_place * self.num_digits + 2 + self.max_response_tokens

    @property
    def _tokens_a_place(self) -> int:
        return {TaskName.DIGIT_PARITY: 1, TaskName.LONG_ADDITION: 2}[self.name]

    @model_validator(mode="before")
    @classmethod
    def _of_this_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and "base" in value and value.get("name", TaskName.DIGIT_PARITY) in _WITHOUT_BASE:
            raise ValueError("base has no meaning for digit_parity: only long_addition adds numbers")
        return value

    @model_serializer(mode="wrap")
    def _only_what_it_has(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        return {k: v for k, v in dumped.items() if k != "base" or self.name not in _WITHOUT_BASE}


_WITHOUT_BASE = (TaskName.DIGIT_PARITY,)


class RolesConfig(Section):
    """How many replicas of each role."""

    trainer: Annotated[int, Field(ge=1, le=64)] = 2
    """Trainer replicas. Each holds the full model."""
    rollout: Annotated[int, Field(ge=1, le=256)] = 3
    """Rollout replicas, each with an inference engine."""
    reward: Annotated[int, Field(ge=1, le=64)] = 2
    """Reward workers."""
    controller: Annotated[int, Field(ge=1, le=1)] = 1
    """Always 1."""

    def counts(self) -> dict[str, int]:
        return self.model_dump()


class CheckpointConfig(Section):
    every_steps: Annotated[int, Field(ge=1)] = 20
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100)] = 3
    """Checkpoints that are kept; older ones are deleted."""


class DetectorConfig(Section):
    """Settings of the live detectors. They are the same for every role; deadlines are learned per (role, phase)."""

    poll_seconds: Seconds = 1.0
    """Interval of requests for samples, which delays findings from samples by half of it. Events are not delayed."""
    window_seconds: Seconds = 30.0
    """History over which peers are compared."""
    hang_floor_seconds: Seconds = 2.5
    """No stall below this is a hang: deadline = hang_p99_factor x own P99, at most the ceiling, at least this floor."""
    hang_p99_factor: Annotated[float, Field(ge=1)] = 5.0
    """Deadline as a multiple of the learned P99. A larger value detects later, with fewer false alarms."""
    hang_ceiling_seconds: Seconds = 60.0
    """Upper bound of a learned deadline, unless the floor is above it; three times the median, or twice the second
    longest, where units are that long."""
    first_unit_seconds: Seconds = 120.0
    """Deadline of start, compilation and the first unit of work of an incarnation. A replacement must have started, and
    copied the state, within three times the longest start, or copy, that the run has seen of its role, at least 30 s,
    at most this. A standby that has started and waits must send heartbeats within 30 s, or within this where it is
    less. The runtime itself gives up a start after twice this, and a step in which no trainer has computed a microbatch
    for this and `runtime.group_timeout_seconds`."""
    slow_ratio: Annotated[float, Field(gt=1)] = 1.5
    """The sequential test detects replicas slower than their peers by this factor; half of its logarithm is allowed
    drift. For a replica without peers at work, compared with its own past alone, all of it is, and the factor is 2 at
    least."""
    slow_false_alarms_per_day: Annotated[float, Field(gt=0)] = 0.1
    """Accepted false-alarm rate of the slow test per replica. A lower value detects later."""
    slow_stride_seconds: Seconds = 1.0
    """Length of one observation of the slow test."""
    mask_proc_state: bool = False
    """Hide the kernel's process state (R, S, T) from the detectors, to test the other evidence."""


class NotifyFormat(StrEnum):
    AUTO = "auto"
    WEBHOOK = "webhook"
    SLACK = "slack"
    PAGERDUTY = "pagerduty"
    OPSGENIE = "opsgenie"
    ALERTMANAGER = "alertmanager"


class NotifyConfig(Section):
    """The channel over which on-call is paged. Without `url` and `format` there is none, and pages go to the log of the
    watch. The secret (PagerDuty's routing key, Opsgenie's API key, Slack's URL, or a bearer token for the others) is
    read from `secret_file` or the environment variable `ROLECALL_NOTIFY_SECRET`, never from the job file."""

    url: str | None = None
    """Address. null: PagerDuty's or Opsgenie's own, and for Slack the secret, because it is one."""
    format: NotifyFormat = NotifyFormat.AUTO
    """auto: by the URL (hooks.slack.com, events.pagerduty.com, api.opsgenie.com, /api/v2/alerts), else webhook: one
    JSON object per message."""
    secret_file: str | None = None
    """File that holds the secret and nothing else. null: the environment variable."""


class RecoveryConfig(Section):
    mode: RecoveryMode = "observe"
    """observe: findings and incidents only. approve: an operator approves each plan. act: guards decide."""
    scope: Literal["replica", "job"] = "replica"
    """What recovery ends and starts again upon a fault. replica: the replica at fault; its role, or the job, only where
    that does not help. job: every replica of every role; the run continues from the newest checkpoint."""
    evictions_per_hour_max: Annotated[int, Field(ge=0)] = 6
    """Replicas taken down within an hour because of a fault, those that end with the one at fault included; at the
    limit rolecall stops acting and pages on-call. A restart of a role or of the job counts the replicas at fault."""
    replicas_at_once_max: Annotated[int, Field(ge=1)] = 2
    """Replicas under repair at the same time, over all incidents. With 1, a hung trainer, which blocks a whole step,
    would wait for the cold start of a rollout. The controller is replaced beside any number of others, which need it. A
    restart of a role or of the job waits until nothing else is under repair."""
    retries_per_replica_max: Annotated[int, Field(ge=1)] = 3
    """Replacements of one replica within an hour (with scope job: restarts of the job because of it); beyond it on-call
    is paged. After as many failed attempts of one incident its role is restarted, then the job."""
    role_share_max: Ratio = 0.5
    """Largest share of a role under repair at once; one replica is always allowed. Not for restarts of a role or of
    the job."""
    rollouts_min: Annotated[int, Field(ge=1, le=256)] = 1
    """Rollouts that must go on serving when a healthy one ends: to lend its node to a trainer, or with the replica that
    is replaced. With fewer left it does not end, and on-call is paged."""
    quarantined_share_max: Annotated[float, Field(ge=0, le=0.5)] = 0.5
    """Largest share of the run's nodes that rolecall quarantines by itself after moving a replica away from a fault of
    the node (gpu, network, node_lost). 0: never. Operators may quarantine more."""
    approval_timeout_seconds: Seconds = 600.0
    """A plan that is not approved within this time expires."""
    verification_timeout_seconds: Seconds = 120.0
    """A replacement must make progress within this time, else the action has failed. The next attempt of the incident
    gets as much more: a slow start is not cut short again and again."""
    horizon_seconds: Annotated[float, Field(gt=0)] | None = None
    """How much longer the job is expected to run: a slow replica is replaced only if the gain over the horizon exceeds
    the cost. null: unknown; slow replicas are tolerated."""
    replacement_cost_seconds: Seconds = 30.0
    """Cost of a replacement until the replica serves, weighed against slowness."""
    lease_seconds: Seconds = 5.0
    """Another watch may take over if the lease is not renewed for this long."""
    webhook_url: str | None = None
    """Short for notify.url."""
    deadman_seconds: Seconds = 60.0
    """Interval of the watch's heartbeat to a webhook or Alertmanager."""
    notify: NotifyConfig = NotifyConfig()

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The digest of a job without these stays that of earlier versions.
        dumped: dict[str, Any] = handler(self)
        unchanged = {"scope": "replica", "rollouts_min": 1}
        return {k: v for k, v in dumped.items() if k not in unchanged or v != unchanged[k]}


DeviceName = Literal["cpu", "cuda"]
RunMode = Literal["async", "semi_sync", "sync"]
HYBRID_MEMORY_SHARE = 0.5
"""Default of `rollout_memory_share` where a trainer has the same GPUs."""


class RuntimeConfig(Section):
    nodes: Annotated[int, Field(ge=1, le=512)] = 7
    """Nodes of the local cluster."""
    mode: RunMode = "async"
    """async: trainers and rollouts work at the same time, each on a node of its own. sync: trainer/i and rollout/i are
    one hybrid on one node and take turns: no engine works while a step is trained. semi_sync: the same with further
    rollouts; the hybrids' engines sleep once half of a step's prompts are ready, and the others finish the rest."""
    device: DeviceName | None = None
    """What trainers and engines compute on. cuda: each rank has a GPU of its own. cpu: needs vLLM for CPUs. null: cuda
    where the machine has NVIDIA GPUs and the installed torch and vLLM can use them."""
    trainer_ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks of each trainer: processes that share its model (FSDP2), each with its shard of every tensor. A trainer is
    lost and replaced as a whole."""
    trainer_tensor_ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Of a trainer's ranks, how many share the matrices of each layer (tensor parallelism): the others shard with FSDP2
    what each of these has. Divides trainer_ranks, attention and key-value heads, and the feed-forward width."""
    rollout_ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor-parallel ranks of each rollout engine. Divides the model's attention heads."""
    standbys: Annotated[int, Field(ge=0, le=16)] = 1
    """Warm rollout processes that can take a replica's place. Not that of a hybrid's engine: in mode sync always 0."""
    trainer_standbys: Annotated[int, Field(ge=0, le=16)] = 0
    """Warm trainer processes that can take a trainer's place. Each has all ranks and the memory of a trainer."""
    staleness_max: Annotated[int, Field(ge=0, le=64)] = 2
    """Tokens older than this many policy versions are not trained on. A group is dropped as stale only when all of its
    tokens are. In the modes sync and semi_sync always 0."""
    startup_timeout_seconds: Annotated[float, Field(ge=0, le=3600)] = 90.0
    """A fresh run waits this long for all replicas, then starts with those that are ready. Where the weights of a model
    folder must be copied, because the run is on another file system, that may take as long (at least 120 s)."""
    lease_seconds: Seconds = 30.0
    """An actor exits if its supervisor does not renew its lease for this long."""
    group_timeout_seconds: Seconds = 20.0
    """Timeout of the trainers' process group: the only way out of a partition."""
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 64 << 20
    """KV cache of each rollout engine on a CPU."""
    rollout_memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of each GPU's memory that an engine takes, for weights, KV cache and graphs. No meaning on a CPU. In the
    modes sync and semi_sync the default is 0.5, because the trainer's weights stay on the same GPUs."""
    rollout_cuda_graphs: bool = True
    """Engines replay recorded CUDA graphs: faster decoding, for memory and a longer start. No meaning on a CPU."""
    transfer_timeout_seconds: Seconds = 10.0
    """Deadline of one weight transfer."""
    reward_check_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Share of the prompt groups that a second reward worker scores, too. Workers that differ are compared with a third
    one. 0: none, for a scorer that may give equal answers different rewards."""
    trainer_peak_flops: Annotated[float, Field(gt=0)] | None = None
    """Peak FLOP/s of the devices of one trainer, from the data sheet. null: trainers have no MFU."""
    rollout_peak_flops: Annotated[float, Field(gt=0)] | None = None
    """Peak FLOP/s of the devices of one rollout, from the data sheet. null: rollouts have no MFU."""

    def ranks(self) -> dict[str, int]:
        """Role -> ranks of each replica, where it has several."""
        return {role: number for role, number in self.computing_ranks().items() if number > 1}

    def computing_ranks(self) -> dict[str, int]:
        """Role -> ranks of each replica, of the roles whose ranks need a device."""
        working = {"trainer": self.trainer_ranks, "rollout": self.rollout_ranks}
        return working | {role: working[takes] for role, takes in STANDBY_ROLES.items()}

    def num_standbys(self) -> dict[str, int]:
        """Role of the standbys -> number of them."""
        return {STANDBY_ROLE: self.standbys, TRAINER_STANDBY_ROLE: self.trainer_standbys}

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The digest of a job without these stays that of earlier versions.
        dumped: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {k: v for k, v in dumped.items() if k not in _OMITTED_DEFAULTS or v != fields[k].default}


_OMITTED_DEFAULTS = (
    "mode",
    "trainer_ranks",
    "trainer_tensor_ranks",
    "rollout_ranks",
    "device",
    "trainer_standbys",
    "rollout_memory_share",
    "rollout_cuda_graphs",
)


def unshared_heads(num_heads: int, num_kv_heads: int, runtime: RuntimeConfig) -> list[str]:
    """Why tensor-parallel ranks cannot share a model's attention heads, by setting; empty if they can."""
    found = []
    for setting in ("rollout_ranks", "trainer_tensor_ranks"):
        ranks = getattr(runtime, setting)
        heads, kv_heads = counted(num_heads, "attention head"), counted(num_kv_heads, "key-value head")
        if num_heads % ranks:
            found.append(f"runtime.{setting}: {ranks} ranks do not divide the model's {heads}")
        elif num_kv_heads % ranks and setting == "trainer_tensor_ranks":
            found.append(f"runtime.{setting}: {ranks} ranks do not divide the model's {kv_heads}")
        elif num_kv_heads % ranks and ranks % num_kv_heads:  # an engine copies a head that several ranks need
            found.append(f"runtime.{setting}: {ranks} ranks and the model's {kv_heads}: neither divides the other")
    return found


class JobConfig(Section):
    """One RL post-training run."""

    name: Annotated[str, Field(pattern=ID_PATTERN.pattern)] = "job"
    """Name of the job; part of the default run id."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of model, task and sampling."""
    num_steps: PositiveInt = 100
    """Steps: each trains a batch, is committed once, and makes a policy version."""
    injection_allowed: bool = False
    """Whether `rolecall inject` may touch this job's processes."""
    journal: JournalUrl = None
    """Location of journal and ledger: postgresql://USER@HOST/DATABASE (each run creates its own schema) or
    sqlite:////PATH/TO/FILE. null: a SQLite file in the run directory. Keep a password in ~/.pgpass."""
    model: ModelConfig = ModelConfig()
    lora: LoraSettings | None = None
    """Adapters that are trained in place of the model's weights. null: the whole model is trained."""
    task: TaskConfig = TaskConfig()
    data: DataConfig | None = None
    """Your own prompts, in place of a built-in task."""
    reward: RewardConfig | None = None
    """Scores the answers to them."""
    environment: EnvironmentConfig | None = None
    """Answers the model, for several turns and tools. Without `reward` it scores the conversations, too."""
    evaluation: EvaluationConfig | None = None
    """Evaluates the policy on held-out prompts. null: no evaluation."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    roles: RolesConfig = RolesConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    detector: DetectorConfig = DetectorConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _data(self) -> "JobConfig":
        """Checks that a dataset has a model and a reward, and a built-in task neither reward nor stop texts."""
        if self.data is None:
            rules = [
                (self.reward is None, "reward: no meaning without data: a built-in task scores its own answers"),
                (self.environment is None, "environment: no meaning without data: a built-in task has one turn"),
                (not self.sampling.stop, "sampling.stop: no meaning without data: built-in tasks have no text"),
            ]
        else:
            rules = [
                ("task" not in self.model_fields_set, "task: the job has data: give one of the two"),
                (
                    self.model.path is not None,
                    "data: needs model.path: the built-in model has no text",
                ),
                (
                    self.reward is not None or self.environment is not None,
                    "data: needs reward or environment, which score the answers",
                ),
                (
                    self.environment is None or not self.algorithm.has_critic,
                    f"environment: the critic of {self.algorithm.name} values single answers: choose grpo, for example",
                ),
                (
                    not self.sampling.stop or self.algorithm.name is not AlgorithmName.TPPO,
                    "sampling.stop: tppo generates an answer in windows, which would split such texts: choose ppo",
                ),
            ]
        found = [why for holds, why in rules if not holds]
        if found:
            raise ValueError("\n".join(found))
        return self

    @model_validator(mode="after")
    def _mode(self) -> "JobConfig":
        """Fills in what hybrids imply, and refuses what contradicts it."""
        runtime, roles = self.runtime, self.roles
        if runtime.mode == "async":
            return self
        implied: dict[str, Any] = {"staleness_max": 0, "trainer_standbys": 0}
        implied |= {"standbys": 0} if runtime.mode == "sync" else {}
        reasons = {
            "staleness_max": "a step has only tokens of its own policy version",
            "trainer_standbys": "a trainer shares its node with an engine, so no standby can take its place",
            "standbys": "every rollout shares its node with a trainer, so no standby can take its place",
        }
        given = {name: getattr(runtime, name) for name in implied if name in runtime.model_fields_set}
        problems = [
            f"runtime.{name}: {value} in mode {runtime.mode}: {reasons[name]}" for name, value in given.items() if value
        ]
        counts = f"{counted(roles.rollout, 'rollout')} and {counted(roles.trainer, 'trainer')}"
        if runtime.mode == "sync" and roles.rollout != roles.trainer:
            problems.append(f"roles.rollout: {counts}: mode sync needs one rollout for each trainer")
        elif runtime.mode == "semi_sync" and roles.rollout <= roles.trainer:
            problems.append(f"roles.rollout: {counts}: mode semi_sync needs more rollouts than trainers")
        if problems:
            raise ValueError("\n".join(problems))
        if "rollout_memory_share" not in runtime.model_fields_set:
            implied["rollout_memory_share"] = HYBRID_MEMORY_SHARE
        object.__setattr__(self, "runtime", runtime.model_copy(update=implied))  # bypasses `frozen` during validation
        return self

    @model_validator(mode="after")
    def _lora(self) -> "JobConfig":
        if self.lora is not None and self.model.path is None:
            raise ValueError("lora: needs model.path: the built-in model is trained as a whole")
        return self

    @model_validator(mode="after")
    def _ranks(self) -> "JobConfig":
        """Refuses what several ranks of a replica cannot share."""
        model, runtime, problems = self.model, self.runtime, list[str]()
        tensor = runtime.trainer_tensor_ranks
        if runtime.trainer_ranks % tensor:
            ranks = f"the {runtime.trainer_ranks} of runtime.trainer_ranks"
            problems.append(f"runtime.trainer_tensor_ranks: {tensor} ranks do not divide {ranks}")
        if model.path is None:
            problems += unshared_heads(model.num_heads, model.num_kv_heads, runtime)
            if model.intermediate_size % tensor:
                width = f"the model's feed-forward width of {model.intermediate_size}"
                problems.append(f"runtime.trainer_tensor_ranks: {tensor} ranks do not divide {width}")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @model_validator(mode="after")
    def _held_out(self) -> "JobConfig":
        """Checks that evaluation has prompts, and none of those that are trained on."""
        evaluation, data = self.evaluation, self.data
        if evaluation is None:
            return self
        if data is not None:
            given = Path(evaluation.path or data.path), evaluation.split or data.split
            if given == (Path(data.path), data.split):
                raise ValueError("evaluation.path: these prompts are trained on: give another path, or a split")
            return self
        rows = [n for n in ("path", "split", "prompt", "answer", "metadata", "fingerprint") if getattr(evaluation, n)]
        if rows:
            raise ValueError(f"evaluation.{rows[0]}: no meaning without data: a built-in task has its own prompts")
        if evaluation.num_prompts is None:
            raise ValueError("evaluation.num_prompts: a built-in task has no end: how many prompts?")
        if (evaluation.max_response_tokens or 0) > self.task.max_response_tokens:
            raise ValueError("evaluation.max_response_tokens: longer than the task's longest response")
        return self

    @model_validator(mode="after")
    def _lengths(self) -> "JobConfig":
        """Checks the algorithm's lengths against the longest response."""
        longest, algorithm = self.max_response_tokens, self.algorithm
        of = "task.num_digits" if self.data is None else "data.max_response_tokens"
        found = [
            f"algorithm.{name}: {value} is longer than the longest response ({longest} tokens, of {of}): {so}"
            for name, value, so in (
                ("overlong_limit_tokens", algorithm.overlong_limit_tokens, "no response would get the whole penalty"),
                ("overlong_buffer_tokens", algorithm.overlong_buffer_tokens, "every response would be penalized"),
                ("window_tokens", algorithm.window_tokens, "nothing would be cut"),
            )
            if value is not None and value > longest
        ]
        budget = algorithm.microbatch_tokens_max
        if budget is not None and budget < self.max_tokens:
            found.append(
                f"algorithm.microbatch_tokens_max: {budget} is less than the longest prompt and response together "
                f"({self.max_tokens} tokens): one sample alone may need more"
            )
        if found:
            raise ValueError("\n".join(found))
        return self

    @model_validator(mode="after")
    def _warm_up(self) -> "JobConfig":
        warmup = self.optimizer.warmup_steps
        if warmup > self.num_steps:
            raise ValueError(f"optimizer.warmup_steps: {warmup} are more than num_steps ({self.num_steps})")
        return self

    @model_validator(mode="after")
    def _window(self) -> "JobConfig":
        """Fills in T-PPO's window where the file omits it, so that it is always a number."""
        if self.algorithm.name is AlgorithmName.TPPO and self.algorithm.window_tokens is None:
            window = min(WINDOW_TOKENS, self.max_response_tokens)
            algorithm = self.algorithm.model_copy(update={"window_tokens": window})
            object.__setattr__(self, "algorithm", algorithm)  # bypasses `frozen` during validation
        return self

    @model_serializer(mode="wrap")
    def _only_what_it_has(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        unused = {"data", "reward", "environment"} if self.data is None else {"task"}
        unused |= {"lora"} if self.lora is None else set()
        unused |= {"evaluation"} if self.evaluation is None else set()
        unused |= {"logging"} if not self.logging.names else set()
        return {k: v for k, v in dumped.items() if k not in unused}

    @property
    def max_response_tokens(self) -> int:
        """The longest response."""
        return self.task.max_response_tokens if self.data is None else self.data.max_response_tokens

    @property
    def max_tokens(self) -> int:
        """Prompt and longest response together."""
        if self.data is None:
            return self.task.max_tokens
        longest = self.data.max_response_tokens
        if self.evaluation is not None:
            longest = max(longest, self.evaluation.max_response_tokens or 0)
        return self.data.max_prompt_tokens + longest

    @property
    def num_hybrids(self) -> int:
        """Trainers that share their node with the rollout of the same number."""
        return 0 if self.runtime.mode == "async" else self.roles.trainer

    @property
    def learns(self) -> str:
        """Algorithm and task or dataset for display: `dapo on long_addition`."""
        return f"{self.algorithm.name} on {self.task.name if self.data is None else self.data.name}"

    def digest(self) -> str:
        """Identifies the configuration without its seed: runs with the same digest are comparable."""
        same = self.model_copy(update={"seed": 0, "injection_allowed": False})
        # Where journal and metrics go and who is notified does not change what the run does.
        text = same.model_dump_json(exclude={"journal": True, "logging": True, "recovery": {"notify"}})
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse_job(value: Any, source: str = "") -> JobConfig:
    """Checks a job given as plain values. Raises ConfigError: with every problem, each `path: reason`."""
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError([f"(top): expected a mapping, got {type(value).__name__}"], source)
    strange = [f"{key!r}: unknown key" for key in value if not isinstance(key, str)]
    if strange:
        raise ConfigError(strange, source)
    try:
        return JobConfig.model_validate(value)
    except ValidationError as e:
        raise ConfigError(problems_of(e), source) from None


_REASONS = {
    "extra_forbidden": "unknown key",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "too_short": "too few items",
}
"""Where pydantic's words are those of Python: of a type of its errors."""


def problems_of(invalid: ValidationError) -> list[str]:
    """The problems, each `path: reason, got value`, without passwords of URLs.

    A rule over several sections names the path itself, in one line for each problem.
    """
    problems = []
    for error in invalid.errors():
        path = ".".join(str(part) for part in error["loc"])
        shown = redacted(repr(error["input"]))
        got = "" if error["type"] in ("missing", "extra_forbidden") else f", got {shown[:80]}"
        reason = _REASONS.get(error["type"]) or error["msg"].removeprefix("Value error, ")
        if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
            known = error.get("ctx", {}).get("expected_tags")
            reason = f"expected one of {known}" if known else "missing"
            path, got = f"{path}.kind", f", got {error['ctx']['tag']!r}" if known else ""
        if path:
            problems.append(f"{path}: {reason}{got}")
        else:
            problems += reason.splitlines() if error["type"] == "value_error" else [f"(top): {reason}"]
    return problems


def load_job(path: Path) -> JobConfig:
    """Reads and checks a job file (YAML). Relative paths of model, data and reward function start at its folder.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has no content, or has problems.
    """
    value = read_yaml_file(path)
    if value is None:
        raise ConfigError(["the file has no content; a job file is a mapping, for example `num_steps: 200`"], str(path))
    return _with_absolute_paths(parse_job(value, str(path)), path.parent.resolve())


def _with_absolute_paths(job: JobConfig, folder: Path) -> JobConfig:
    def absolute(path: str) -> str:
        return str(folder / Path(path).expanduser())

    changes: dict[str, Section] = {}
    if job.model.path is not None:
        changes["model"] = job.model.model_copy(update={"path": absolute(job.model.path)})
    if job.data is not None:
        changes["data"] = job.data.model_copy(update={"path": absolute(job.data.path)})
    if job.evaluation is not None and job.evaluation.path is not None:
        changes["evaluation"] = job.evaluation.model_copy(update={"path": absolute(job.evaluation.path)})
    if job.reward is not None and ".py:" in job.reward.function:
        changes["reward"] = job.reward.model_copy(update={"function": absolute(job.reward.function)})
    if job.environment is not None and ".py:" in job.environment.factory:
        changes["environment"] = job.environment.model_copy(update={"factory": absolute(job.environment.factory)})
    return job.model_copy(update=changes)


def read_yaml_file(path: Path) -> Any:
    """The value of a YAML file. Raises ConfigError: it cannot be read, or is not YAML."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError([os_reason(e)], str(path)) from None


def read_yaml(text: str) -> Any:
    """The value that `text` holds.

    Raises:
        ValueError: it is not YAML, or a mapping has a duplicate key: the reason, in one line.
    """
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except yaml.reader.ReaderError as e:
        raise ValueError("not a text: it has control characters") from e
    except yaml.MarkedYAMLError as e:
        line = "" if e.problem_mark is None else f", line {e.problem_mark.line + 1}"
        said = ", ".join(part for part in (e.problem, e.context) if part).replace("'<stream end>'", "the end")
        raise ValueError(f"not YAML{line}: {' '.join(said.split())}") from e
    except (yaml.YAMLError, ValueError) as e:  # an invalid date is a ValueError
        raise ValueError(f"not YAML: {' '.join(str(e).split())}") from e
    except RecursionError:
        raise ValueError("not YAML: nested too deeply") from None
    if loader.repeated:
        raise ValueError("; ".join(f"line {line}: duplicate key {key!r}" for line, key in sorted(loader.repeated)))
    return value


class _Loader(yaml.SafeLoader):
    """Finds duplicate keys, which YAML forbids but PyYAML accepts: it would silently use the last one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated = set[tuple[int, str]]()  # (line from 1, key)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    self.repeated.add((key.start_mark.line + 1, key.value))
                seen.add(key.value)
        return super().construct_mapping(node, deep)
