"""Extension of the engine's workers (one per tensor-parallel rank): loads weights and reads them back.

vLLM mixes this class into its worker and calls it by name through `collective_rpc`, so the same path serves any number
of ranks. This module must be importable without vLLM; the worker provides `model_runner`, `model_config`,
`vllm_config`.

Readable storage. vLLM's CPU backend packs linear weights into a private format and empties the parameter (16 of the 35
of a small Qwen3), which leaves nothing to read back. With `keep_storage_readable()` called before the model is built,
linear layers keep their weights and use torch's own linear instead: measured at the same speed for a small model (8.7
ms a step for 64 requests either way), all 35 parameters covered, and loading is an in-place copy (1.6 ms instead of 16
to 29 ms for vLLM's reload). Without it, packed layers are listed as uncovered.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch

from rolecall.rl_runtime.protocol.messages import TensorEntry
from rolecall.rl_runtime.weights.digest import DTYPE_NAMES, entries_digest, tensor_digest, tensor_entry


class Storage(TypedDict):
    """One rank's parameters and buffers, read back."""

    digest: str  # over all entries
    layout: str  # over names, dtypes and shapes, including uncovered ones
    digests: list[tuple[str, str]]  # (name, digest) per covered parameter
    uncovered: list[str]
    wrong: list[str]  # covered, but different from the expected result of the last loaded tensors


def keep_storage_readable() -> None:
    """Makes linear layers built from now on keep their weights readable (vLLM on a CPU only)."""
    _linear_base()._cpu_skip_gemm_dispatch = True


class RolecallWorker:
    """Mixed into vLLM's worker. The name prefix avoids clashes with its own methods."""

    model_runner: Any
    vllm_config: Any

    def rolecall_prepare(self) -> None:
        """Called after the start: makes embeddings compute from the readable storage, not a packed copy."""
        self._rolecall_expected: dict[str, str] = {}
        if getattr(_linear_base(), "_cpu_skip_gemm_dispatch", False):
            for module in self.model_runner.get_model().modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = torch.nn.functional.linear

    def rolecall_load(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Loads weights under their Hugging Face names. Returns parameters that were not loaded."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        names = [name for name, _ in model.named_parameters()]
        self._rolecall_expected = _expected(model, tensors)
        if any(p.numel() == 0 for p in model.parameters()):
            # Packed layers must be unpacked, loaded and repacked: vLLM does that layer by layer.
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
            return []
        loaded = model.load_weights(iter(tensors.items()))
        return [] if loaded is None else sorted(set(names) - set(loaded))

    def rolecall_storage(self) -> Storage:
        """Digests of everything that this rank computes with, read from its current location."""
        model = self.model_runner.get_model()
        entries, layout, uncovered = list[TensorEntry](), list[TensorEntry](), list[str]()
        for name, tensor, readable in _named_storage(model):
            dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            layout.append(TensorEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), digest=str(readable)))
            if readable:
                entries.append(tensor_entry(name, tensor))
            else:
                uncovered.append(name)
        expected = self._rolecall_expected
        return Storage(
            digest=entries_digest(entries),
            layout=entries_digest(layout),
            digests=[(e.name, e.digest) for e in entries],
            uncovered=sorted(uncovered),
            wrong=sorted(e.name for e in entries if expected.get(e.name, e.digest) != e.digest),
        )


def _linear_base() -> Any:
    from vllm.model_executor.layers.linear import LinearBase

    return LinearBase


def _named_storage(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Each parameter and buffer by name, and whether the model computes with the storage that is read."""
    packed = {
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if getattr(module, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor, name not in packed and tensor.numel() > 0 and tensor.dtype in DTYPE_NAMES


def _expected(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest that each parameter must have once `tensors` are loaded, where it can be determined without the loader.

    Covers parameters that are one tensor, or a concatenation of several (query, key, value; gate, up), in the same
    dtype, and padded with zero rows where vLLM pads the vocabulary; of several ranks, its equal share of each along the
    one dimension that is cut: all of a dense model. Omits others (quantised; keys and values that ranks share).
    """
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found = {}
    for name, parameter in model.named_parameters():
        sources = [tensors[s] for s in _sources(name, packed) if s in tensors]
        if len(sources) != len(_sources(name, packed)):
            continue
        whole = _share(sources, parameter, rank, size)
        if whole.dtype == parameter.dtype and whole.shape == parameter.shape:
            found[name] = tensor_digest(whole)
    return found


def _share(sources: Sequence[torch.Tensor], parameter: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What `rank` has of the sources of a parameter, if it is cut into equal shares."""
    first = sources[0]
    if size > 1 and first.dim() == 2 and first.shape[1] == size * parameter.shape[1]:  # cut by columns
        return first.chunk(size, dim=1)[rank].contiguous()
    rows = sum(s.shape[0] for s in sources) if first.dim() else 0
    num_padding = 0
    if len(sources) == 1 and first.dim() and getattr(parameter, "output_dim", None) == 0:
        num_padding = size * parameter.shape[0] - rows
    elif len(sources) == 1 and first.dim():
        num_padding = parameter.shape[0] - rows
    if num_padding > 0:
        sources = [torch.cat([first, first.new_zeros(num_padding, *first.shape[1:])])]
    if size > 1 and first.dim() and sum(s.shape[0] for s in sources) == size * parameter.shape[0]:  # cut by rows
        sources = [s.chunk(size)[rank] for s in sources if s.shape[0] % size == 0]
    return sources[0].contiguous() if len(sources) == 1 else torch.cat(list(sources))


def _sources(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """`...qkv_proj.weight` -> `...q_proj.weight`, `...k_proj.weight`, `...v_proj.weight`; others: the name itself."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in packed:
            return [".".join([*parts[:i], source, *parts[i + 1 :]]) for source in packed[part]]
    return [name]
