"""The gate: what passes, and what is refused whatever the limits are."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from qwenonnx.evaluate.gate import GATE_TOKENS, GateLimits, run_gate
from qwenonnx.evaluate.texts import EvaluationText

VOCAB = 50
TEXTS = [EvaluationText("a", "some text"), EvaluationText("b", "another")]
LIMITS = GateLimits(kl_mean=0.01, top1_agreement=0.9)
LOGITS = (np.random.default_rng(0).standard_normal((200, VOCAB)) * 5).astype(np.float32)


class Model:
    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits
        self.seen = 0

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        self.seen += len(token_ids)
        return self._logits[start : start + len(token_ids)]


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text * 20]


def failure(candidate: NDArray[np.float32], limits: GateLimits = LIMITS) -> str | None:
    result = run_gate(Model(LOGITS), Model(candidate), Letters(), TEXTS, limits)
    assert result.passed is (result.failure is None)
    json.dumps(result.to_json(), allow_nan=False)
    return result.failure


def test_a_faithful_model_passes() -> None:
    assert failure(LOGITS) is None
    assert failure(LOGITS + np.float32(0.01) * LOGITS[::-1]) is None


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (LOGITS + 2 * LOGITS[::-1], "mean KL"),
        (np.full_like(LOGITS, np.nan), "unusable"),
        (np.where(np.arange(VOCAB) == 3, np.inf, LOGITS).astype(np.float32), "unusable"),
        (LOGITS * 0.001, "uniform"),
    ],
)
def test_a_damaged_model_fails(candidate: NDArray[np.float32], reason: str) -> None:
    assert reason in (failure(candidate) or "")


def test_flat_and_nan_logits_fail_with_the_loosest_limits() -> None:
    loose = GateLimits(kl_mean=1e9, top1_agreement=0)

    assert failure(LOGITS + 2 * LOGITS[::-1], loose) is None
    assert failure(LOGITS * 0.001, loose)
    assert failure(np.full_like(LOGITS, np.nan), loose)


def test_too_little_agreement_fails() -> None:
    swapped = LOGITS.copy()
    order = np.argsort(swapped, axis=1)
    rows = np.arange(len(swapped))
    best, second = order[:, -1], order[:, -2]
    swapped[rows, best], swapped[rows, second] = LOGITS[rows, second], LOGITS[rows, best]

    assert "likeliest token" in (failure(swapped, GateLimits(kl_mean=100, top1_agreement=0.9)) or "")


def test_it_looks_at_the_beginning_of_each_text_only() -> None:
    model = Model(LOGITS)

    run_gate(Model(LOGITS), model, Letters(), TEXTS, LIMITS)

    assert model.seen == 2 * GATE_TOKENS
