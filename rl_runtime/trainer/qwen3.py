"""The Qwen3 decoder (arXiv 2505.09388) in plain PyTorch, with Hugging Face's parameter names.

Importing the library's Qwen3 would cost 2.9 CPU seconds on top of torch. A replacement trainer pays that while its
peers work; on the two cores of the demo this is most of its recovery time. A test checks that this model equals the
library's. Folders of other architectures still use the library (`model.load_model_folder`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Shape:
    """The fields of a Qwen3 config.json that matter here."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    initializer_range: float
    rms_norm_eps: float = 1e-6

    def to_config(self, *, pad: int, bos: int, eos: int) -> dict[str, Any]:
        """config.json for an engine."""
        shape = asdict(self)
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "rope_parameters": {"rope_theta": shape.pop("rope_theta"), "rope_type": "default"},
            **shape,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "use_cache": True,
            "pad_token_id": pad,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "dtype": "float32",
        }


class DecoderOutput(NamedTuple):
    """A tuple, because FSDP2 looks for tensors in tuples, lists and dicts to hook its backward pass to."""

    last_hidden_state: Tensor


class ModelOutput(NamedTuple):
    logits: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def _rotate(x_bhsd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    low, high = x_bhsd.chunk(2, dim=-1)
    return x_bhsd * cos_sd + torch.cat((-high, low), dim=-1) * sin_sd


class Attention(nn.Module):
    """Grouped-query attention with a norm on each head's query and key."""

    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x_bsh: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
        heads = (*x_bsh.shape[:2], -1, self.head_dim)
        q = _rotate(self.q_norm(self.q_proj(x_bsh).view(heads)).transpose(1, 2), cos_sd, sin_sd)
        k = _rotate(self.k_norm(self.k_proj(x_bsh).view(heads)).transpose(1, 2), cos_sd, sin_sd)
        v = self.v_proj(x_bsh).view(heads).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sd, sin_sd)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The body: `decoder(input_ids).last_hidden_state`, like the library's model."""

    base_model_tp_plan: ClassVar[Mapping[str, str]] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    """See `tensor_parallel`."""

    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> DecoderOutput:
        del use_cache  # no cache: a trainer sees each sequence as a whole
        cos_sd, sin_sd = self._angles(input_ids.shape[1], input_ids.device)
        x_bsh = self.embed_tokens(input_ids)
        for layer in self.layers:
            x_bsh = layer(x_bsh, cos_sd, sin_sd)
        return DecoderOutput(last_hidden_state=self.norm(x_bsh))

    def _angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        even = torch.arange(0, self.shape.head_dim, 2, dtype=torch.int64, device=device).float()
        inverse = 1.0 / (self.shape.rope_theta ** (even / self.shape.head_dim))
        angles = torch.outer(torch.arange(length, device=device).float(), inverse)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()


class Qwen3(nn.Module):
    """`model(input_ids).logits`, of shape (batch, sequence, vocabulary), like the library's model."""

    def __init__(self, shape: Qwen3Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=shape.initializer_range)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> ModelOutput:
        return ModelOutput(logits=self.lm_head(self.model(input_ids, use_cache).last_hidden_state))

    @property
    def base_model(self) -> Decoder:
        """The body, under the library's name for it."""
        return self.model
