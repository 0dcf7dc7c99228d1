"""The first run of somebody else's graph: whole, and through its KV cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwenonnx.errors import EngineError, NumericalError, PackageError
from qwenonnx.evaluate.metrics import compare_logits
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.runtime.load import PackageRunner
from qwenonnx.text.tokenizer import Tokenizer

TOKENS = 32
STEPS = 4
# Largest difference of a logit between a text at once and the same text through the cache, by recipe: rounding.
LIMITS = {"fp32": 1e-2, "fp16": 1.0}


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it: the largest logit difference and the mean KL divergence between both ways."""

    tokens: int
    cache_difference: float
    cache_kl: float

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data, for the manifest."""
        return asdict(self)


def try_graph(runner: PackageRunner, tokenizer: Tokenizer, recipe: str, where: Path) -> Trial:
    """Runs a short text at once, then a part of it and the rest token by token, and compares the logits.

    Of a quantized graph both may differ, as its noise depends on what runs together; only nonsense is refused.

    Raises:
        PackageError: the graph cannot be run, gives NaN, infinite or flat logits, or others through its cache.
    """
    ids = tokenizer.encode(bundled_texts()[0].text)[: min(TOKENS, runner.context_length)]
    split = max(1, len(ids) - STEPS)
    try:
        whole = runner.score(ids, 0)
        pieces = [runner.score(ids[:split], 0)]
        pieces += [runner.decode([ids[at]], [at]).copy() for at in range(split, len(ids))]
        comparison = compare_logits(whole, np.concatenate(pieces), np.asarray(ids[1:]))
    except NumericalError as error:
        raise PackageError(
            f"{where}: it gives NaN or infinite logits, as fp16 exports of this model do on CPUs; take another file "
            "with --file, or export it in fp32."
        ) from error
    except EngineError as error:
        raise PackageError(f"{where}: its first run failed: {error}") from error
    if comparison.is_flat:
        raise PackageError(f"{where}: its predictions are as good as uniform, so its head is wrong; export it again.")
    limit = LIMITS.get(recipe)
    if limit is not None and comparison.largest_difference > limit:
        raise PackageError(
            f"{where}: a text gives other logits through the KV cache than at once (they differ by up to "
            f"{comparison.largest_difference:.2g}), so the cache is wrong; export it again."
        )
    return Trial(comparison.positions, comparison.largest_difference, max(0.0, comparison.kl_mean))
