"""What a job adds to the layers of a model folder: activations that are computed again, and low-rank adapters of linear
layers, made by `peft`: W + alpha / rank * B A, of which A and B are trained.

An adapted layer computes with its merged weight, which is also what engines are sent: rounded to the dtype of the model
once, after each optimizer step. Trainer and engines thus have the same weights, also in bfloat16, where a small B A
changes few weights or none. The product of the adapters is computed in addition for its gradient only, and counts as 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolecall.core.config.job import ModelConfig
from rolecall.core.config.lora import LoraSettings
from rolecall.core.errors import ConfigError

ADAPTER = "default"
BASE = ".base_layer."
"""`peft` puts it into the name of an adapted layer's own parameters."""


def add_layers(model: Any, config: ModelConfig, lora: LoraSettings | None, seed: int) -> None:
    """Adds what the job wants beyond the folder's own layers: adapters, and activations that are computed again.

    Raises:
        ConfigError: this architecture has no such layers, or `peft` is not installed.
    """
    if lora is not None:
        add_adapters(model, lora, seed)
    if config.gradient_checkpointing:
        checkpoint_layers(model)


def checkpoint_layers(model: nn.Module) -> None:
    """From now on, computes the activations of each decoder layer again in the backward pass.

    The library's own switch needs a model in training mode, which would turn dropout on.

    Raises:
        ConfigError: the library knows of no such layers in this architecture.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError([f"model.gradient_checkpointing: {type(model).__name__} has no layers for it"])
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def add_adapters(model: Any, settings: LoraSettings, seed: int) -> None:
    """Adds fresh adapters, with B = 0, and freezes all other parameters. The same arguments give the same bits.

    Raises:
        ConfigError: `peft` is not installed, or a target is not a linear layer of this model.
    """
    targets = target_layers(model, settings)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise ConfigError([f"lora: needs peft, which cannot be imported ({e}): pip install '.[lora]'"]) from e
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.forward = _merged_forward(layer)
    model.eval()


def target_layers(model: Any, settings: LoraSettings) -> list[str]:
    """Full names of the layers to adapt. Raises ConfigError: names each target that the model does not have."""
    output = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    if settings.target_modules == "all-linear":
        return linear
    wanted = settings.target_modules
    known = sorted({name.rpartition(".")[2] for name in linear})
    unknown = [t for t in wanted if not any(name == t or name.endswith(f".{t}") for name in linear)]
    if unknown:
        why = f"is no linear layer before the output layer; the model has {', '.join(known)}"
        raise ConfigError([f"lora.target_modules: {target!r} {why}" for target in unknown])
    return [name for name in linear if any(name == t or name.endswith(f".{t}") for t in wanted)]


class AdaptedLayer:
    """One adapted layer of a network. `weight`: the merged one, which it computes with; never a trained parameter.

    Of a sharded network, a rank merges its rows of the weight: the product of its rows of B and all of A. Of tensor
    ranks, each has the part of B or A that belongs to its part of the weight.
    """

    def __init__(self, layer: Any, local: Callable[[nn.Parameter], Tensor], whole: Callable[[Any], Tensor]) -> None:
        """`local`: this rank's rows of a parameter, in the same memory; `whole`: those of all shards; all call it."""
        self._layer, self._whole = layer, whole
        self.weight: nn.Parameter = layer.base_layer.weight
        self._rows, self._b = local(self.weight), local(layer.lora_B[ADAPTER].weight)
        self._base = self._rows.clone()

    @torch.no_grad()
    def merge(self) -> None:
        """Sets `weight` from the adapters. In float64 and rounded once, so that each trainer has the same bits."""
        a = self._whole(self._layer.lora_A[ADAPTER].weight).double()
        merged = self._base.double().addmm_(self._b.double(), a, alpha=self._layer.scaling[ADAPTER])
        self._rows.copy_(merged)


def adapted_layers(
    module: nn.Module, local: Callable[[nn.Parameter], Tensor], whole: Callable[[Any], Tensor]
) -> list[AdaptedLayer]:
    """Without adapters, an empty list. The weights of the module must be those of its model folder, in their dtype.
    `local`, `whole`: as in `AdaptedLayer`."""
    return [AdaptedLayer(layer, local, whole) for layer in module.modules() if hasattr(layer, "lora_A")]


def plain_layer(layer: Any) -> Any:
    """The layer of the model folder inside one that is adapted; any other layer itself."""
    return layer.base_layer if hasattr(layer, "lora_A") else layer


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name in the module."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The parameter's name in the model folder."""
    return name.replace(BASE, ".")


def _merged_forward(layer: Any) -> Callable[[Tensor], Tensor]:
    base, a, b, scaling = layer.base_layer, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], layer.scaling[ADAPTER]

    def forward(x: Tensor) -> Tensor:
        out: Tensor = base(x)
        if not torch.is_grad_enabled():
            return out
        # The input's gradient comes through the merged weight alone, that of A and B through this product alone.
        product: Tensor = b(a(x.detach().to(a.weight.dtype))) * scaling
        return out + (product - product.detach()).to(out.dtype)

    return forward
