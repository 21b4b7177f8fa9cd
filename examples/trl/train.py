"""GRPO with TRL that rolecall can watch: python examples/trl/train.py [--steps N] [--hang-at N] [--model FOLDER]

Without a model it trains a random one of 0.1 M parameters, which needs no download and no GPU. `--hang-at N` blocks the
reward function in step N, so that the hang can be seen in `rolecall incidents`; `--reward-seconds S` makes it take S
seconds in the other steps.
"""

import argparse
import time

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rolecall.integrations.transformers import RolecallCallback

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=100)
options.add_argument("--hang-at", type=int, default=0)
options.add_argument("--reward-seconds", type=float, default=0.0)
options.add_argument("--model", default="")
options = options.parse_args()


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")


def random_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    return Qwen2ForCausalLM(config)


def letters(completions: list[str], trainer_state: object = None, **columns: object) -> list[float]:
    """The share of small letters."""
    if options.hang_at and getattr(trainer_state, "global_step", 0) + 1 >= options.hang_at:
        time.sleep(3600)  # stands for a sandbox that does not answer
    time.sleep(options.reward_seconds)
    return [sum("a" <= c <= "z" for c in text) / max(1, len(text)) for text in completions]


tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else bytes_tokenizer()
model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else random_model(tokenizer)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="trl-run",
        max_steps=options.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": [f"{n} is a number" for n in range(200)]}),
    processing_class=tokenizer,
    callbacks=[RolecallCallback()],
)
trainer.train()
