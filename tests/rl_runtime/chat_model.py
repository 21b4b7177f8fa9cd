"""A model folder of a few kilobytes with a real tokenizer and chat template: words are tokens."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolecall.rl_runtime.trainer.qwen3 import Qwen3, Qwen3Shape

WORDS = ["<pad>", "<bos>", "<end>", "user", "system", "assistant", "say", "yes", "no", "please", *map(str, range(22))]
TEMPLATE = (
    "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<bos> assistant{% endif %}"
)


def write_chat_model(folder: Path, *, template: str | None = TEMPLATE, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<end>", unk_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    shape = Qwen3Shape(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        rope_theta=100.0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3(shape)
    (folder / "config.json").write_text(json.dumps(shape.to_config(pad=0, bos=1, eos=2)))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
