"""Estimate of the memory that each process of a job needs at its peak, from the job and the size of its model. Pure.

A trainer rank is largest in one of four phases, beside what it always holds (state, float64 sum, published versions):

    start        the whole model, before it is sharded
    compute      the logits of one forward and backward pass, with activations; or, after it, the gradient
    publish      the sums of the step, and a version more
    checkpoint   a copy of the whole state, which is written while the next step is computed

The peak is the largest. Constants are bytes per parameter, counted from the code that they name, and bases of a process
measured on a CPU (`benchmarks/runtime/memory/`); file pages of libraries, which processes share, are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rolecall.core.config.job import DeviceName, JobConfig, ModelConfig
from rolecall.core.config.lora import ALL_LINEAR, LoraSettings
from rolecall.core.membership import STANDBY_ROLE, TRAINER_STANDBY_ROLE

MIB: Final = 1 << 20
WEIGHT_BYTES: Final = {"float32": 4, "bfloat16": 2}
MASTER_BYTES: Final = 12
"""Of a trained parameter: its float32 master and two moments of AdamW (`trainer/state.py`)."""
SUM_BYTES: Final = 8
"""Of a trained parameter: the float64 sum of gradients (`trainer/partial_step.py`)."""
GRADIENT_BYTES: Final = 12
"""Of a trained parameter, after the backward pass: a float32 gradient, and its float64 copy while it is added."""
CHUNK_BYTES: Final = 4
"""Of a trained parameter: the gradient of a microbatch's earlier chunks."""
HEAP_BYTES: Final = 10
"""Of a trained parameter, on the host: what tensors that come and go in each step leave of the heap. Measured: after
two steps there is none of it, after five all."""
CHECKPOINT_BYTES: Final = 12
"""Of a trained parameter: masters and moments, copied for the checkpoint. `trainer/checkpoint.py` writes the copies
from where they are."""
VERSIONS_KEPT: Final = 2
"""Previous versions that a trainer keeps at most, as `agreement.VERSIONS_KEPT` says."""
VERSIONS_PUBLISHED: Final = 2
"""The weight port serves the newest version and the one before it (`weights/port.py`)."""
LOGITS_COPIES: Final = 6.3
"""Float32 tensors of the logits' size at the peak of forward and backward pass."""
LOGITS_COPIES_CHANGED: Final = 8.2
"""The same with temperature, top-p or top-k, which change the logits first."""
TRAINER_BYTES: Final = 250 * MIB
"""Of a trainer's process without a model: interpreter, torch, Ray."""
LIBRARY_BYTES: Final = 100 * MIB
"""More, for a model folder: transformers."""
RANKS_BYTES: Final = 190 * MIB
"""More, of a trainer of several ranks: FSDP2 and its process group."""
ENGINE_BYTES: Final = 590 * MIB
"""Of an engine's process without a model: interpreter, torch, vLLM, Ray."""
WORKER_BYTES: Final = 150 * MIB
"""Of a reward worker or the controller, without the user's own code."""
NODE_BYTES: Final = 50 * MIB
"""Of Ray and the agent, on each node of the local cluster."""
CUDA_BYTES: Final = 600 * MIB
"""Of a GPU's memory, without a model: CUDA's context and libraries. Not measured by us."""
ENGINE_VERSIONS: Final = 3
"""Versions of the weights that an engine's replica holds while it takes a new one: it serves two to other engines."""
LOAD_COPIES: Final = 3
"""Copies of the weights with which the first rank of an engine gives them to the others; one of them is shared."""
LOADED_SHARE: Final = 0.67
"""Of the weights, that a further rank of an engine holds while it takes its part of them. Measured."""
MENTIONED: Final = 0.1
"""Share of a job's memory from which logits are named as what to make smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the memory of a model depends on. Numbers of parameters, and of entries of one token's activations."""

    num_parameters: int
    num_outside_layers: int  # embeddings, output layer and last norm
    num_output_only: int  # output layer, unless it shares the embeddings; a critic has none
    num_rows: int  # of the output layer: the vocabulary
    hidden: int
    intermediate: int
    query: int  # all heads together
    key_value: int  # keys, as many values
    num_layers: int
    num_adapted: int = 0  # weights that adapters are added to
    num_adapters: int = 0  # parameters of the adapters
    is_folder: bool = False

    @property
    def num_critic(self) -> int:
        return self.num_parameters - self.num_output_only + self.hidden

    @property
    def num_layer(self) -> int:
        """Of one decoder layer."""
        return (self.num_parameters - self.num_outside_layers) // max(1, self.num_layers)


def built_in_size(model: ModelConfig, num_rows: int) -> ModelSize:
    """`num_rows`: of the task's vocabulary."""
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * query + 2 * key_value + 3 * model.intermediate_size + 2) + 2 * model.head_dim
    rows = num_rows * model.hidden_size
    outside = 2 * rows + model.hidden_size
    return ModelSize(
        num_parameters=model.num_layers * layer + outside,
        num_outside_layers=outside,
        num_output_only=rows,
        num_rows=num_rows,
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        query=query,
        key_value=key_value,
        num_layers=model.num_layers,
    )


def folder_size(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], lora: LoraSettings | None = None
) -> ModelSize:
    """From the shapes of a model folder's tensors and its config.json, without the model."""
    text = config.get("text_config") or config
    output = next((n for n in shapes if n.endswith("lm_head.weight")), "")
    if output and text.get("tie_word_embeddings", config.get("tie_word_embeddings")):
        shapes, output = {n: s for n, s in shapes.items() if n != output}, ""
    layers = {n: s for n, s in shapes.items() if ".layers." in n}
    adapted = [s for n, s in layers.items() if lora is not None and _is_adapted(n, s, lora)]
    embedding = max((s for n, s in shapes.items() if n not in layers and len(s) == 2), key=math.prod, default=(0, 0))
    hidden = int(text.get("hidden_size") or embedding[1])
    heads = int(text.get("num_attention_heads") or 1)
    head = int(text.get("head_dim") or hidden // heads)
    num = sum(map(math.prod, shapes.values()))
    return ModelSize(
        num_parameters=num,
        num_outside_layers=num - sum(map(math.prod, layers.values())),
        num_output_only=math.prod(shapes[output]) if output else 0,
        num_rows=int(text.get("vocab_size") or embedding[0]),
        hidden=hidden,
        intermediate=_largest(text.get("intermediate_size")) or 4 * hidden,
        query=heads * head,
        key_value=(_largest(text.get("num_key_value_heads")) or heads) * head,
        num_layers=int(text.get("num_hidden_layers") or len({n.split(".layers.")[1].split(".")[0] for n in layers})),
        num_adapted=sum(map(math.prod, adapted)),
        num_adapters=sum(lora.rank * sum(shape) for shape in adapted) if lora is not None else 0,
        is_folder=True,
    )


def _largest(value: Any) -> int:
    """Of a number, or of one for each layer; 0: none."""
    return max(map(int, value if isinstance(value, list) else [value or 0]), default=0)


def _is_adapted(name: str, shape: tuple[int, ...], lora: LoraSettings) -> bool:
    layer = name.removesuffix(".weight")
    wanted = lora.target_modules
    return len(shape) == 2 and (wanted == ALL_LINEAR or any(layer == w or layer.endswith(f".{w}") for w in wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeed:
    """Of one process. `device_bytes`: of a GPU of its own."""

    host_bytes: int
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeed:
    """Of all replicas of a role, each with these ranks. `checkpoint_bytes`: of a replica's need, what only one of them
    needs at a time."""

    role: str
    num_replicas: int
    ranks: tuple[RankNeed, ...]
    checkpoint_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        each = sum(rank.host_bytes for rank in self.ranks) - self.checkpoint_bytes
        return self.num_replicas * each + self.checkpoint_bytes

    def __str__(self) -> str:
        """`trainer 2 x (1.5 + 3 x 1.1) GiB`: replicas, first rank, further ranks."""
        first, *further = (gib(rank.host_bytes) for rank in self.ranks)
        each = first if not further else f"({first} + {_times(len(further))}{further[0]})"
        return f"{self.role} {_times(self.num_replicas)}{each} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Of the machine, which all nodes of the local cluster share. `gpus`: that the job may use; empty: unknown."""

    host_bytes: int
    gpus: tuple[GpuMemory, ...] = ()


def needs(
    job: JobConfig, size: ModelSize, device: DeviceName = "cpu", gpus: Sequence[GpuMemory] = ()
) -> tuple[RoleNeed, ...]:
    """Peak memory of every process of the job, by role; the last entry is Ray and the agents, by node."""
    largest = max((gpu.total_bytes for gpu in gpus), default=0)
    trainer = tuple(trainer_need(job, size, rank, device) for rank in range(job.runtime.trainer_ranks))
    other = trainer_need(job, size, 0, device, writes=False)
    engine = tuple(engine_need(job, size, rank, device, largest) for rank in range(job.runtime.rollout_ranks))
    of_trainers = RoleNeed(
        role="trainer",
        num_replicas=job.roles.trainer,
        ranks=trainer,
        checkpoint_bytes=trainer[0].host_bytes - other.host_bytes,
    )
    of_roles = (
        ("rollout", job.roles.rollout, engine),
        (STANDBY_ROLE, job.runtime.standbys, engine),
        (TRAINER_STANDBY_ROLE, job.runtime.trainer_standbys, (other, *trainer[1:])),
        ("reward", job.roles.reward, (RankNeed(host_bytes=WORKER_BYTES),)),
        ("controller", job.roles.controller, (RankNeed(host_bytes=WORKER_BYTES),)),
        ("node", job.runtime.nodes, (RankNeed(host_bytes=NODE_BYTES),)),
    )
    others = (RoleNeed(role=role, num_replicas=number, ranks=ranks) for role, number, ranks in of_roles if number)
    return (of_trainers, *others)


def host_bytes_by_role(found: Sequence[RoleNeed]) -> dict[str, int]:
    """Role -> host memory of one of its replicas."""
    return {need.role: sum(rank.host_bytes for rank in need.ranks) for need in found}


def shortages(job: JobConfig, size: ModelSize, free: FreeMemory, device: DeviceName = "cpu") -> list[str]:
    """What of the job does not fit, each `path: reason`."""
    found, problems = needs(job, size, device, free.gpus), list[str]()
    needed = sum(role.host_bytes for role in found)
    if needed > free.host_bytes:
        logits = job.roles.trainer * logits_bytes(job, size.num_rows) if device == "cpu" else 0
        hint = ""
        if logits > MENTIONED * needed:
            hint = f" ({gib(logits)} of it for logits, less with algorithm.microbatch_tokens_max)"
        of_roles = f"{', '.join(map(str, found))}: about {gib(needed)} GiB{hint}"
        problems.append(f"roles: {of_roles}, and {gib(free.host_bytes)} are free")
    if device == "cuda" and free.gpus:
        problems += _gpu_shortages(job, size, free.gpus)
    return problems


def _gpu_shortages(job: JobConfig, size: ModelSize, gpus: Sequence[GpuMemory]) -> list[str]:
    """Any rank may get any of `gpus`."""
    problems, least = list[str](), min(gpu.free_bytes for gpu in gpus)
    of_rank = {
        "trainer": max(trainer_need(job, size, r, "cuda").device_bytes for r in range(job.runtime.trainer_ranks)),
        "rollout": engine_need(job, size, 0, "cuda").device_bytes,  # the least that it must have
    }
    for role, most in of_rank.items():
        if most > least:
            why = f"each rank of a {role} needs {gib(most)} GiB of a GPU, and one has {gib(least)} free"
            problems.append(f"runtime.{role}_ranks: {why}: more ranks need less each")
    if of_rank["rollout"] > least:
        return problems
    share = job.runtime.rollout_memory_share
    full = min(gpus, key=lambda gpu: gpu.free_bytes - share * gpu.total_bytes)
    small = min(gpus, key=lambda gpu: gpu.total_bytes)
    if share * full.total_bytes > full.free_bytes:
        taken = f"{share:g} of a GPU are {gib(share * full.total_bytes)} GiB, and one has {gib(full.free_bytes)} free"
        problems.append(f"runtime.rollout_memory_share: {taken}: an engine does not start without its share")
    elif share * small.total_bytes < of_rank["rollout"]:
        taken = f"{share:g} of a GPU are {gib(share * small.total_bytes)} GiB"
        problems.append(
            f"runtime.rollout_memory_share: {taken}, and each rank of a rollout needs {gib(of_rank['rollout'])} GiB"
        )
    return problems


def gib(number: float) -> str:
    """Bytes as a number of GiB."""
    return f"{number / (1 << 30):.1f}"


def _times(number: int) -> str:
    return f"{number} x " if number > 1 else ""


def trainer_need(
    job: JobConfig, size: ModelSize, rank: int = 0, device: DeviceName = "cpu", *, writes: bool = True
) -> RankNeed:
    """Of one rank of a trainer. `writes`: whether its replica writes a checkpoint."""
    algorithm, ranks = job.algorithm, job.runtime.trainer_ranks
    num_shards = ranks // job.runtime.trainer_tensor_ranks
    weight = WEIGHT_BYTES[job.model.dtype]
    critic = size.num_critic if algorithm.has_critic else 0
    if job.lora is None:
        total = size.num_parameters + critic
        in_layers = (size.num_parameters - size.num_outside_layers) * (1 + algorithm.has_critic)
        trained = in_layers / ranks + (total - in_layers) / num_shards  # tensor ranks share layers only
        # Of several shards, rounded copies are made only where a layer is gathered.
        network = trained * (MASTER_BYTES + (weight if weight < 4 and num_shards == 1 else 0))
        changing = size.num_parameters
    else:
        networks = 1 + algorithm.has_critic
        total = networks * size.num_adapters
        trained = total / num_shards  # of each adapter, tensor ranks share one matrix; counted as if they shared none
        in_layers = size.num_parameters - size.num_outside_layers + size.num_adapted
        frozen = in_layers / ranks + size.num_outside_layers / num_shards
        network = networks * weight * frozen + trained * MASTER_BYTES
        changing = size.num_adapted
    state = network * (1 + (algorithm.num_updates > 1)) + trained * SUM_BYTES
    if algorithm.kl_coefficient > 0:
        state += weight * size.num_parameters
    version = weight * changing if rank == 0 else 0
    if rank == 0 and ranks > 1:  # what never changes, whole
        state += weight * (size.num_parameters - changing)
    kept, previous = VERSIONS_PUBLISHED, min(VERSIONS_KEPT, job.runtime.staleness_max)
    if ranks == 1:
        kept = max(kept, 1 + previous)
    else:  # of previous versions each rank keeps its rows, beside the whole ones that the first rank has published
        state += previous * weight * changing / ranks
    base = TRAINER_BYTES + (LIBRARY_BYTES if size.is_folder else 0)
    start = 4 * size.num_parameters
    if ranks > 1:  # the memory of the whole model stays with the allocator
        base, start = base + RANKS_BYTES + start, 0
    compute = _pass_bytes(job, size, trained)
    sums = trained * SUM_BYTES * (1 + (job.roles.trainer > 1))
    publish = max(0, VERSIONS_PUBLISHED + 1 - kept) * version
    copied = total * CHECKPOINT_BYTES if rank == 0 and writes else 0
    if device == "cuda":
        host = base + max(start, kept * version + publish + copied)
        return RankNeed(
            host_bytes=int(host),
            device_bytes=int(CUDA_BYTES + max(4 * size.num_parameters, state + max(compute, sums))),
        )
    peak = state + kept * version + copied + max(compute, publish + sums) + trained * HEAP_BYTES
    return RankNeed(host_bytes=int(base + max(start, peak)))


def _pass_bytes(job: JobConfig, size: ModelSize, trained: float) -> float:
    """Of one forward and backward pass at a rank, and of its gradient. `trained`: parameters of this rank."""
    num_shards = job.runtime.trainer_ranks // job.runtime.trainer_tensor_ranks
    tokens, is_cut = _tokens(job)
    logits = logits_bytes(job, size.num_rows) / num_shards
    one_layer = 4 * (8 * size.hidden + 5 * size.query + 4 * size.key_value + 4 * size.intermediate)
    kept = 4 * size.hidden if job.model.gradient_checkpointing else one_layer
    activations = tokens / num_shards * (size.num_layers * kept + one_layer) * (1 + job.algorithm.has_critic)
    gathered = 0.0
    if num_shards > 1:  # whole layers, their gradients and what is sent of them
        gathered = 12 * size.num_outside_layers + 20 * size.num_layer
    earlier = trained * CHUNK_BYTES if is_cut else 0.0
    return max(logits + activations + gathered + earlier, trained * GRADIENT_BYTES)


def _tokens(job: JobConfig) -> tuple[int, bool]:
    """Padded tokens of one forward and backward pass, over all ranks; whether a microbatch has several."""
    algorithm = job.algorithm
    longest = job.task.max_tokens
    if job.data is not None:
        longest = job.data.max_prompt_tokens + job.data.max_response_tokens
    tokens = algorithm.groups_per_microbatch * algorithm.group_size * longest
    limit = algorithm.microbatch_tokens_max or tokens
    return min(tokens, limit), tokens > limit


def logits_bytes(job: JobConfig, num_rows: int) -> int:
    """Of one trainer, at the peak of a forward and backward pass."""
    sampling = job.sampling
    is_changed = sampling.temperature != 1 or sampling.top_p < 1 or sampling.top_k > 0
    return int(_tokens(job)[0] * num_rows * 4 * (LOGITS_COPIES_CHANGED if is_changed else LOGITS_COPIES))


def engine_need(
    job: JobConfig, size: ModelSize, rank: int = 0, device: DeviceName = "cpu", gpu_bytes: int = 0
) -> RankNeed:
    """Of one rank of a rollout engine. `gpu_bytes`: all memory of its GPU; 0: only what it must have is counted."""
    ranks = job.runtime.rollout_ranks
    weights = WEIGHT_BYTES[job.model.dtype] * size.num_parameters
    versions: float = ENGINE_VERSIONS * weights if rank == 0 else 0
    if ranks > 1:
        versions += (LOADED_SHARE if rank else LOAD_COPIES) * weights
    if device == "cuda":  # its cache takes what is left of its share of the GPU
        taken = max(CUDA_BYTES + weights / ranks, job.runtime.rollout_memory_share * gpu_bytes)
        return RankNeed(host_bytes=int(ENGINE_BYTES + versions), device_bytes=int(taken))
    return RankNeed(host_bytes=int(ENGINE_BYTES + versions + weights / ranks + job.runtime.kv_cache_bytes))
