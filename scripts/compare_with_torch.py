"""Compares an fp32 package with the same weights in PyTorch: logits at every position, and the KV cache in pieces.

Usage: python scripts/compare_with_torch.py CHECKPOINT PACKAGE     (needs the `optimum` extra for torch)
Exits with 1 if an argmax differs or a logit differs by 5e-3 or more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.checkpoint.layout import expected_shapes
from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package
from qwenonnx.runtime.fused_runner import FusedRunner
from qwenonnx.runtime.load import load_runner, session_config
from qwenonnx.text.tokenizer import Tokenizer

MAX_TOKENS = 512
LIMIT = 5e-3


def torch_model(checkpoint: Checkpoint) -> Any:
    """Transformers' Qwen2 with the checkpoint's weights, in fp32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**checkpoint.config.to_hf())
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    names = expected_shapes(checkpoint.config)
    state = {name: torch.from_numpy(np.ascontiguousarray(checkpoint.tensor(name))) for name in names}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is no weight
    return model.eval()


def compare_texts(model: Any, runner: FusedRunner, tokenizer: Tokenizer) -> bool:
    """Prints a line per text; whether all are within the limit."""
    import torch

    good = True
    for text in bundled_texts():
        ids = tokenizer.encode(text.text)[:MAX_TOKENS]
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].numpy()
        actual = runner.score(ids, 0)
        same = int((expected.argmax(-1) == actual.argmax(-1)).sum())
        difference = float(np.abs(expected - actual).max())
        good &= same == len(ids) and difference < LIMIT
        print(f"{text.name:16} {len(ids):4} tokens  same argmax {same:4}  max |difference| {difference:.2e}")
    return good


def compare_pieces(runner: FusedRunner, tokenizer: Tokenizer) -> bool:
    """Prints how 12 tokens at once, one by one and as 5 + 7 compare; whether all argmax are equal."""
    ids = tokenizer.encode("The river rises in the mountains and reaches the sea after many days.")[:12]
    whole = runner.score(ids, 0)
    ways = {
        "one by one": np.concatenate([runner.score([token], i) for i, token in enumerate(ids)]),
        "5 + 7": np.concatenate([runner.score(ids[:5], 0), runner.score(ids[5:], 5)]),
    }
    good = True
    for name, logits in ways.items():
        same = bool((whole.argmax(-1) == logits.argmax(-1)).all())
        good &= same
        print(f"{name:10} against 12 at once: same argmax {same}, max |difference| {np.abs(whole - logits).max():.2e}")
    return good


def main() -> int:
    """Runs both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("package", type=Path)
    arguments = parser.parse_args()
    package = Package.open(arguments.package)
    tokenizer = Tokenizer.load(package.folder)
    runner = load_runner(package, session_config(), context_length=MAX_TOKENS)
    texts = compare_texts(torch_model(open_checkpoint(arguments.checkpoint)), runner, tokenizer)
    pieces = compare_pieces(runner, tokenizer)
    return 0 if texts and pieces else 1


if __name__ == "__main__":
    sys.exit(main())
