"""Checking an exported graph against the checkpoint it was written from, before anybody can use it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwenonnx.config import ModelConfig
from qwenonnx.errors import NumericalError, VerificationError
from qwenonnx.evaluate.fidelity import Scorer
from qwenonnx.evaluate.metrics import compare_logits
from qwenonnx.export.reference import reference_logits
from qwenonnx.graph.weights import Weights

SAMPLE_TEXT = (
    "def fibonacci(n: int) -> list[int]:\n    values = [0, 1]\n    while len(values) < n:\n"
    "        values.append(values[-1] + values[-2])\n    return values[:n]\n\n"
    "The river rises in the mountains and reaches the sea after 300 km. 今天天气很好，我们去公园散步吧。"
)
SAMPLE_TOKENS = 64
MAX_LOGIT_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the graph is from the reference on the sample text; all limits were met."""

    positions: int
    max_logit_difference: float
    top1_agreement: float
    kl_mean: float
    chunked_difference: float


def verify_export(
    runner: Scorer, where: Path, config: ModelConfig, weights: Weights, token_ids: Sequence[int]
) -> Verification:
    """Runs the graph and the numpy reference over up to 64 of `token_ids`, whole and in chunks.

    `where` is the folder that messages name.

    Raises:
        VerificationError: logits are NaN, flat, or differ by more than rounding.
    """
    ids = [min(token, config.vocab_size - 1) for token in token_ids][: min(SAMPLE_TOKENS, config.context_length)]
    expected = reference_logits(config, weights, ids)
    whole = runner.score(ids, 0)
    cuts = [0, *(cut for cut in (5, 12, 13) if cut < len(ids)), len(ids)]
    chunks = [runner.score(ids[a:b], a) for a, b in itertools.pairwise(cuts)]
    chunked = np.concatenate(chunks)
    try:
        comparison = compare_logits(expected, whole, np.asarray(ids[1:]))
        pieces = compare_logits(whole, chunked, np.asarray(ids[1:]))
    except NumericalError as error:
        raise VerificationError(f"{where}: the exported graph fails its check: {error}") from error
    result = Verification(
        positions=comparison.positions,
        max_logit_difference=comparison.largest_difference,
        top1_agreement=comparison.top1_agreement,
        kl_mean=comparison.kl_mean,
        chunked_difference=pieces.largest_difference,
    )
    problem = None
    if comparison.is_flat:
        problem = "its predictions are as good as uniform, so the head is wrong"
    elif result.top1_agreement < 1 or result.max_logit_difference > MAX_LOGIT_DIFFERENCE:
        problem = "it differs from the checkpoint"
    elif pieces.top1_agreement < 1 or result.chunked_difference > MAX_LOGIT_DIFFERENCE:
        problem = "a text gives other results in chunks than at once, so the KV cache is wrong"
    if problem:
        raise VerificationError(
            f"{where}: the exported graph fails its check: {problem} (largest logit difference "
            f"{result.max_logit_difference:.2e}, in chunks {result.chunked_difference:.2e}, same top token at "
            f"{result.top1_agreement:.1%} of {result.positions} positions, mean KL {result.kl_mean:.2e})."
        )
    return result
