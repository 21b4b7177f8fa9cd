"""Tensor parallelism inside a trainer replica: which layers the ranks share, and how they compute together.

As in Megatron-LM (arXiv 1909.08053): of a column-wise layer each rank computes some outputs, its attention heads or its
units of the feed-forward layer; a row-wise layer takes those as its inputs, and its outputs are summed over the ranks.
All other parameters are replicated, and all ranks compute the same with them.

The plan of an architecture names its layers and how each is shared, in the words of `transformers`
(`base_model_tp_plan`). Unlike in torch's `parallelize_module`, parameters stay plain tensors: FSDP2 cuts them by rows
as usual, nothing is sent when a replica starts, and each wait for other ranks is counted and timed.

Adapters B A follow their layer. Of a column-wise one, B is shared like its weight and A is replicated; of a row-wise
one, A is shared and B replicated. The replicated matrix gets the sum of the ranks' gradients. Adapters add no exchange,
because their product counts as 0 in the forward pass (`model_layers.py`).
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall.core.errors import ConfigError
from rolecall.rl_runtime.exchanges import exchange
from rolecall.rl_runtime.model_layers import plain_layer

SETTING: Final = "runtime.trainer_tensor_ranks"


class Style(StrEnum):
    """How ranks share a layer; of a parameter, how they share that."""

    COLUMN = "colwise"
    ROW = "rowwise"
    SUMMED = "replicated_with_grad_allreduce"
    """Every rank has it whole, and a gradient from its own heads, or units, only."""


CUT: Final[Mapping[Style, int]] = {Style.COLUMN: 0, Style.ROW: 1}
"""Dimension of a weight, outputs x inputs, of which each rank holds a part."""
OF_ADAPTER: Final[Mapping[Style, Mapping[str, Style]]] = {
    Style.COLUMN: {"lora_A": Style.SUMMED, "lora_B": Style.COLUMN},
    Style.ROW: {"lora_A": Style.ROW, "lora_B": Style.SUMMED},
}
"""Style of a layer -> that of its adapter's matrices, rank x inputs and outputs x rank."""


def tensor_plan(body: Any, ranks: int) -> dict[str, Style]:
    """Layer -> style, by the layer's name in `body`, the model without its output layer.

    Raises:
        ConfigError: the architecture has no plan, one with other styles, or layers that `ranks` do not divide.
    """
    name = type(body).__name__
    own = getattr(body, "base_model_tp_plan", None)
    patterns: Mapping[str, str] = own or getattr(body.config, "base_model_tp_plan", None) or {}
    unknown = sorted(f"{p}: {style}" for p, style in patterns.items() if style not in set(Style))
    if unknown:
        raise ConfigError([f"{SETTING}: {name} shares layers in ways that trainers do not know ({unknown[0]})"])
    layers = {n: (m, re.sub(r"(?<=\.)\d+(?=\.)", "*", n)) for n, m in body.named_modules()}
    plan = {n: Style(patterns[p]) for n, (_, p) in layers.items() if p in patterns}
    if not CUT.keys() & plan.values():
        raise ConfigError([f"{SETTING}: {name} has no plan of layers that ranks can share"])
    for n, style in plan.items():
        layer = plain_layer(layers[n][0])
        if style in CUT and not isinstance(layer, nn.Linear):
            raise ConfigError([f"{SETTING}: {n} of {name} is no linear layer"])
        if style in CUT and layer.weight.shape[CUT[style]] % ranks:
            what = f"{layer.weight.shape[CUT[style]]} {'outputs' if style is Style.COLUMN else 'inputs'} of {n}"
            raise ConfigError([f"{SETTING}: {ranks} ranks do not divide the {what}"])
    return plan


def share_layers(body: nn.Module, *, rank: int, ranks: int, group: Any) -> dict[str, Style]:
    """Leaves of each layer in the plan of `body` what is this rank's, of `ranks` in `group`.

    Returns the style of each parameter that the ranks share, by its name in `body`: all others are replicated.

    Raises:
        ConfigError: as in `tensor_plan`.
    """
    found: dict[str, Style] = {}
    for name, of_layer in tensor_plan(body, ranks).items():
        layer: Any = body.get_submodule(name)
        for own, parameter in list(layer.named_parameters()):
            inner, _, leaf = own.rpartition(".")
            if of_layer is Style.ROW and leaf == "bias":
                continue  # added once, to the sum
            style = OF_ADAPTER.get(of_layer, {}).get(own.partition(".")[0], of_layer)
            found[f"{name}.{own}"] = style
            if style in CUT:
                part = parameter.detach().chunk(ranks, CUT[style])[rank].clone()
                setattr(layer.get_submodule(inner), leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if of_layer in CUT:
            plain = plain_layer(layer)
            plain.forward = partial(_column_wise if of_layer is Style.COLUMN else _row_wise, plain, group)
    return found


def _column_wise(layer: Any, group: Any, x: Tensor) -> Tensor:
    shared: Tensor = _Shared.apply(x, group)  # type: ignore[no-untyped-call]
    return functional.linear(shared, layer.weight, layer.bias)


def _row_wise(layer: Any, group: Any, x: Tensor) -> Tensor:
    out: Tensor = _Summed.apply(functional.linear(x, layer.weight), group)  # type: ignore[no-untyped-call]
    return out if layer.bias is None else out + layer.bias


class _Shared(torch.autograd.Function):
    """The same input for each rank: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum of the ranks' outputs: its gradient is that of each of them."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _sum(x: Tensor, group: Any) -> Tensor:
    import torch.distributed as dist

    out = x.clone(memory_format=torch.contiguous_format)
    with exchange():
        dist.all_reduce(out, group=group)
    return out
