"""Our Qwen3 is the library's, to the bit."""

import pytest
import torch
from torch.nn import functional

from rolecall.rl_runtime.trainer.qwen3 import Qwen3, Qwen3Shape

SHAPE = Qwen3Shape(
    vocab_size=20,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rope_theta=100.0,
    initializer_range=0.05,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_equals_the_library_in_logits_gradients_and_names() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    ours = Qwen3(SHAPE).eval()
    config = SHAPE.to_config(pad=0, bos=1, eos=2)
    for name in ("architectures", "model_type", "dtype"):
        del config[name]
    theirs = Qwen3ForCausalLM(Qwen3Config(**config)).float().eval()
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(1, SHAPE.vocab_size, (3, 24))  # 0 is the pad: the library cuts its gradient
    mine, other = ours(tokens).logits, theirs(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)
    functional.cross_entropy(mine.flatten(0, 1), tokens.flatten()).backward()
    functional.cross_entropy(other.flatten(0, 1), tokens.flatten()).backward()
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert float((p.grad - q.grad).norm() / q.grad.norm()) < 1e-4, name  # the order of additions differs


def test_a_token_sees_only_those_before_it() -> None:
    torch.manual_seed(1)
    model = Qwen3(SHAPE).eval()
    tokens = torch.randint(0, SHAPE.vocab_size, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % SHAPE.vocab_size
    a, b = model(tokens).logits, model(changed).logits
    assert torch.equal(a[0, :7], b[0, :7])
    assert not torch.allclose(a[0, 7:], b[0, 7:])
