"""Log-probabilities of tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.request import TokenLogprob, TokenLogprobs


def token_logprobs(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """The log-probability of `token_id` by its logits `[tokens]`, with the `count` most probable tokens.

    Of equally probable ones, those with lower ids come first.
    """
    peak = float(logits.max())
    with np.errstate(under="ignore"):
        total = peak + math.log(float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    best = _best(logits, min(count, len(logits)))
    return TokenLogprobs(
        chosen=TokenLogprob(token_id, float(logits[token_id]) - total),
        top=tuple(TokenLogprob(int(i), float(logits[i]) - total) for i in best),
    )


def _best(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= threshold)
    order = np.lexsort((candidates, -logits[candidates]))[:count]
    best: NDArray[np.int64] = candidates[order]
    return best
