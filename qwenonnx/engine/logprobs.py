"""Log-probabilities of tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.logits import check_peak, highest
from qwenonnx.engine.request import TokenLogprob, TokenLogprobs


def token_logprobs(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """The log-probability of `token_id` by its logits `[tokens]`, with the `count` most probable tokens.

    Of equally probable ones, those with lower ids come first.

    Raises:
        NumericalError: a logit is NaN or plus infinity, or no token is possible.
    """
    peak = logits.max()
    check_peak(peak)
    weights = logits - peak
    with np.errstate(under="ignore"):
        np.exp(weights, out=weights)
    total = float(peak) + math.log(float(weights.sum(dtype=np.float64)))
    best = highest(logits, count)
    best = best[np.argsort(-logits[best], kind="stable")]
    return TokenLogprobs(
        chosen=TokenLogprob(token_id, float(logits[token_id]) - total),
        top=tuple(TokenLogprob(int(i), float(logits[i]) - total) for i in best),
    )
