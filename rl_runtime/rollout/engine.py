"""vLLM in this process, one `step()` at a time: tokens out with log-probabilities, weights in between two steps.

The engine runs only inside `step`, called from one thread (`rollout.py` has the loop). The policy version is therefore
exact per token: weights change between steps, never inside one. Requests stay in flight over an update. Their key-value
cache is recomputed under the new weights, so each token's log-probability is conditioned on the whole prefix under its
version, and a resumed prefix gives the same on any other engine.

Start costs, measured on one core: import 6.3 s -> 4.6 s by disabling the garbage collector during the import, engine
2.3 s -> 0.8 s by freezing imported objects (vLLM collects five times during its start), and 8 s less on a machine that
has never started this architecture, because the model class is registered here instead of being inspected in a separate
process.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch

from rolecall.core.config.data import SamplingConfig
from rolecall.core.config.job import DeviceName
from rolecall.core.errors import ConfigError, DeadlineExceeded, RolecallError
from rolecall.rl_runtime.exchanges import exchanging
from rolecall.rl_runtime.model_folder import read_config, rows_of
from rolecall.rl_runtime.rollout.worker_extension import RolecallWorker, Storage, keep_storage_readable
from rolecall.rl_runtime.weights.proof import CANARY

ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process; we drive it
    "OMP_NUM_THREADS": "1",  # without it throughput varies from 20 to 1600 tokens a second
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_PLUGINS": "",  # load no installed plugins
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",  # even a group of one process opens a port
    "NCCL_SOCKET_IFNAME": "lo",  # the ranks of an engine are on one node
}
"""Must be set before `import vllm`; a different existing value is replaced."""

KNOWN_ARCHITECTURES: Final[Mapping[str, str]] = {
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3",
    "Qwen2ForCausalLM": "vllm.model_executor.models.qwen2",
    "LlamaForCausalLM": "vllm.model_executor.models.llama",
}
"""Architectures whose class is registered directly. Others work too, but vLLM inspects them (8 s, once)."""

CANARY_ID: Final = "rolecall-canary"
CANARY_STEPS_MAX: Final = 64
"""Engine steps that the canary may take. It takes one; more mean that it gets no cache blocks."""
BATCHED_TOKENS_MIN: Final = 2048
DISCARD: Final = 2
"""vLLM's level of sleep that keeps nothing on the host: the replica has the tensors of its version there."""
COLLECTIVES: Final = ("all_reduce", "all_gather", "gather")
"""Of a tensor-parallel group, in a step."""


class EngineBroken(RolecallError):
    """The engine is unusable: it did not start, or loading left it in a state that cannot be proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Start parameters of an engine."""

    model_dir: str  # config.json
    max_model_len: int = 256  # prompt and response together, tokens
    num_seqs_max: int = 64  # requests computed in one step
    requests_max: int = 4096  # unfinished
    kv_cache_bytes: int = 64 << 20  # on a CPU; on GPUs the cache takes what `memory_share` leaves
    seed: int = 0
    dtype: str = "float32"  # of weights and computation; the weights sent must have it
    fixed_length: bool = False  # ignore end tokens and generate to the limit, for measurements
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_ranks: int = 1  # tensor-parallel
    device: DeviceName = "cpu"
    memory_share: float = 0.9  # of each GPU, for all that the engine needs
    cuda_graphs: bool = True
    sleeps: bool = False  # a trainer has the same GPUs


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine's rank among those of its replica, and the file where they meet: its name ends with `:`, and an id that
    no other engine of this machine has.
    """

    rank: int = 0
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Output of one step for one request."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # "" while it continues, else "stop" or "length"


def import_vllm() -> Any:
    """Imports `vllm` with the environment it needs. Safe to call again.

    Raises:
        EngineBroken: vllm was imported earlier with an incompatible environment.
    """
    if "vllm" in sys.modules:
        odd = [k for k, v in ENVIRONMENT.items() if os.environ.get(k) != v]
        if odd:
            raise EngineBroken(f"vllm was imported before its environment was set: {', '.join(odd)}")
        return sys.modules["vllm"]
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        vllm = importlib.import_module("vllm")
        for name in ("vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "vllm.sampling_params"):
            importlib.import_module(name)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
    return vllm


def end_tokens(model_dir: Path) -> tuple[int, ...]:
    """End-of-text ids of the model folder: of config.json, generation_config.json and the tokenizer; may be empty."""
    found: set[int] = {*_tokenizer_end(model_dir)}
    for name in ("config.json", "generation_config.json"):
        try:
            value = json.loads((model_dir / name).read_text()).get("eos_token_id")
        except FileNotFoundError:
            continue
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def _tokenizer_end(model_dir: Path) -> list[int]:
    """Of a chat model it ends a turn, and may differ from the end of a text in config.json."""
    try:
        token = json.loads((model_dir / "tokenizer_config.json").read_text()).get("eos_token")
        words = json.loads((model_dir / "tokenizer.json").read_text())
    except FileNotFoundError:
        return []
    text = token.get("content") if isinstance(token, dict) else token
    return [word["id"] for word in words.get("added_tokens", ()) if word["content"] == text]


def vocab_size(settings: EngineSettings) -> int:
    """Rows of the embedding, by the folder's config.json.

    Raises:
        EngineBroken: it does not say.
    """
    try:
        rows = rows_of(read_config(Path(settings.model_dir)), 0)
    except ConfigError as e:
        raise EngineBroken(str(e)) from e
    if not rows:
        raise EngineBroken(f"{settings.model_dir}: config.json has no vocab_size")
    return rows


class VllmEngine:
    """One engine, or one rank of it. All calls from one thread. Raises EngineBroken: it does not start."""

    def __init__(self, settings: EngineSettings, place: EnginePlace = EnginePlace()) -> None:
        self.settings = settings
        self.end_tokens = () if settings.fixed_length else end_tokens(Path(settings.model_dir))
        # OMP_NUM_THREADS has no effect once torch is imported, and OpenMP keeps the number per thread.
        torch.set_num_threads(1)
        if settings.num_ranks > 1:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else vLLM wants a core for each rank
        vllm = import_vllm()
        keep_storage_readable()
        _register_architecture(vllm, Path(settings.model_dir))
        try:
            self._llm = _start(settings, place)
        except (OSError, ValueError, RuntimeError) as e:
            raise EngineBroken(f"engine of {settings.model_dir} does not start: {e}") from e
        self._in_flight: set[str] = set()
        if settings.num_ranks > 1 and settings.device == "cpu":
            _time_exchanges()
        self._rpc("rolecall_prepare")
        gc.freeze()

    def add(
        self, request_id: str, tokens: Sequence[int], *, num_new_max: int, seed: int, temperature: float | None = None
    ) -> None:
        """Queues a request. Samples as the settings say, with a per-request generator. `temperature`: in place of
        theirs; 0: greedy."""
        sampling = self.settings.sampling
        # Only a stop text needs the answer as text.
        stops = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
        parameters = _sampling(
            temperature=sampling.temperature if temperature is None else temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            detokenize=bool(sampling.stop),
            **stops,
            seed=seed,
            max_tokens=num_new_max,
            logprobs=0,  # of the sampled token only
            stop_token_ids=list(self.end_tokens),
            ignore_eos=self.settings.fixed_length,
            output_kind="DELTA",
        )
        self._llm.add_request(request_id, _prompt(tokens), parameters)
        self._in_flight.add(request_id)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drops requests; unknown ones are ignored."""
        known = [r for r in request_ids if r in self._in_flight]
        if known:
            self._llm.abort_request(known)
            self._in_flight.difference_update(known)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def step(self) -> list[NewTokens]:
        """One forward pass over the requests in flight."""
        made = []
        for output in self._llm.step():
            one = output.outputs[0]
            tokens = tuple(int(t) for t in one.token_ids)
            logprobs = tuple(float(entry[t].logprob) for t, entry in zip(tokens, one.logprobs or (), strict=True))
            reason = str(one.finish_reason or "") if output.finished else ""
            if output.finished:
                self._in_flight.discard(output.request_id)
            made.append(NewTokens(request_id=output.request_id, tokens=tokens, logprobs=logprobs, finish_reason=reason))
        return made

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Loads weights, drops key-value blocks of older ones. Returns parameters not loaded, over all ranks."""
        self._llm.reset_prefix_cache(reset_running_requests=True)
        return sorted({name for rank in self._rpc("rolecall_load", tensors) for name in rank})

    def sleep(self) -> None:
        """Frees the device memory of weights and KV cache. Requests in flight stay, and are computed again after `wake`
        and `load`. On a CPU only the caller's pause remains."""
        self._llm.reset_prefix_cache(reset_running_requests=True)
        if self._frees_memory:
            self._rpc("sleep", DISCARD)

    def wake(self) -> None:
        """Takes the memory back; its content is undefined until `load`."""
        if self._frees_memory:
            self._rpc("wake_up")

    @property
    def _frees_memory(self) -> bool:
        return self.settings.sleeps and self.settings.device == "cuda"

    def storage(self) -> list[Storage]:
        """Digests of the parameter storage, by rank."""
        return cast(list[Storage], self._rpc("rolecall_storage"))

    def canary(self) -> tuple[float, ...]:
        """Log-probabilities of the canary, computed alone, through the same path that serves requests.

        No other request advances during it: nothing may be generated with unproven weights.

        Raises:
            DeadlineExceeded: it did not finish within its steps.
        """
        core = self._llm.engine_core.engine_core
        # Every running request returns to the queue, and only one may be admitted: the canary, by its priority.
        self._llm.reset_prefix_cache(reset_running_requests=True)
        admitted = core.scheduler.max_num_active_reqs
        core.scheduler.max_num_active_reqs = 1
        try:
            parameters = _sampling(temperature=1.0, max_tokens=1, prompt_logprobs=0, output_kind="FINAL_ONLY")
            self._llm.add_request(CANARY_ID, _prompt(CANARY), parameters, priority=-1)
            for _ in range(CANARY_STEPS_MAX):
                for output in self._llm.step():
                    assert output.request_id == CANARY_ID, "a request advanced beside the canary"
                    if output.finished:
                        pairs = zip(CANARY[1:], output.prompt_logprobs[1:], strict=True)
                        return tuple(float(entry[token].logprob) for token, entry in pairs)
            self._llm.abort_request([CANARY_ID])
            raise DeadlineExceeded(waited_for=f"canary, {CANARY_STEPS_MAX} engine steps", seconds=0.0)
        finally:
            core.scheduler.max_num_active_reqs = admitted

    def close(self) -> None:
        """Closes the process groups with their ports and threads. The process exits afterwards and frees the memory:
        vLLM's own shutdown would collect garbage twice first (1.7 s).
        """
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return cast(list[Any], self._llm.collective_rpc(method, args=args))


def _time_exchanges() -> None:
    """Makes the collectives of this rank's tensor-parallel group exchanges. Not on GPUs, where they are kernels and may
    be part of a graph."""
    from vllm.distributed.parallel_state import get_tp_group

    communicator = get_tp_group().device_communicator
    for name in COLLECTIVES:
        setattr(communicator, name, exchanging(getattr(communicator, name)))


def _prompt(tokens: Sequence[int]) -> Any:
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(tokens))


def _sampling(*, output_kind: str, detokenize: bool = False, **parameters: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(detokenize=detokenize, output_kind=RequestOutputKind[output_kind], **parameters)


def _register_architecture(vllm: Any, model_dir: Path) -> None:
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise EngineBroken(f"{model_dir / 'config.json'}: {e}") from e
    for name in config.get("architectures", []):
        if name in KNOWN_ARCHITECTURES:
            module = importlib.import_module(KNOWN_ARCHITECTURES[name])
            vllm.ModelRegistry.register_model(name, getattr(module, name))


def _executor(place: EnginePlace) -> Any:
    """One rank of a tensor-parallel engine in this process."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Executor(ExecutorWithExternalLauncher):  # type: ignore[misc]  # vllm has no types here
        # With torchrun's variables all engines of a machine would share one segment of memory, which vLLM names by what
        # follows the last colon; a port would be open to every address.
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{place.file}", place.rank, place.rank

    return Executor


def _device_arguments(settings: EngineSettings) -> dict[str, Any]:
    if settings.device == "cpu":
        return {"enforce_eager": True, "kv_cache_memory_bytes": settings.kv_cache_bytes}
    return {
        "enforce_eager": not settings.cuda_graphs,
        "gpu_memory_utilization": settings.memory_share,
        "enable_sleep_mode": settings.sleeps,
    }


def _start(settings: EngineSettings, place: EnginePlace) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=settings.model_dir,
        skip_tokenizer_init=not settings.sampling.stop,
        load_format="dummy",  # weights come by transfer, with proof; weights from the folder would be discarded
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.num_seqs_max,
        max_num_batched_tokens=max(BATCHED_TOKENS_MIN, settings.max_model_len),
        # For a prompt computed in chunks, vLLM rewinds the request's generator by one draw, which is not possible on a
        # CPU.
        enable_chunked_prefill=False,
        enable_prefix_caching=True,  # samples of a group share their prompt; dropped at every update
        async_scheduling=False,  # a token must belong to the step that generated it
        scheduling_policy="priority",  # equal for all requests; the canary goes first
        logprobs_mode="processed_logprobs",
        tensor_parallel_size=settings.num_ranks,
        distributed_executor_backend="uni" if settings.num_ranks == 1 else _executor(place),
        worker_extension_cls=f"{RolecallWorker.__module__}.{RolecallWorker.__qualname__}",
        disable_log_stats=True,
        **_device_arguments(settings),
    )
    return LLMEngine.from_engine_args(arguments)
