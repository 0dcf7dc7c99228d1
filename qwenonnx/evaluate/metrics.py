"""Comparing two models' logits at the same positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenonnx.errors import NumericalError

Array = NDArray[np.float32]
# Mean log-probability at or below this fraction of log(1/vocab) means that the model predicts nothing.
FLATNESS = 0.9


@dataclass(frozen=True, slots=True)
class Comparison:
    """Sums over positions; comparisons of parts of a text add up.

    `kl` is the sum of KL(reference || candidate), `nll` sums are negative log-likelihoods of the true next tokens,
    `candidate_peak` sums the log-probabilities of the candidate's likeliest tokens, and `uniform` what those would be
    if it predicted nothing. `worst_position` is where `worst_kl` was met.
    """

    positions: int = 0
    predicted: int = 0
    agreeing: int = 0
    kl: float = 0.0
    worst_kl: float = 0.0
    worst_position: int = 0
    largest_difference: float = 0.0
    reference_nll: float = 0.0
    candidate_nll: float = 0.0
    candidate_peak: float = 0.0
    uniform: float = 0.0

    def __add__(self, other: Comparison) -> Comparison:
        worst = self if self.worst_kl >= other.worst_kl else other
        return Comparison(
            positions=self.positions + other.positions,
            predicted=self.predicted + other.predicted,
            agreeing=self.agreeing + other.agreeing,
            kl=self.kl + other.kl,
            worst_kl=worst.worst_kl,
            worst_position=worst.worst_position,
            largest_difference=max(self.largest_difference, other.largest_difference),
            reference_nll=self.reference_nll + other.reference_nll,
            candidate_nll=self.candidate_nll + other.candidate_nll,
            candidate_peak=self.candidate_peak + other.candidate_peak,
            uniform=self.uniform + other.uniform,
        )

    @property
    def kl_mean(self) -> float:
        """Mean KL divergence a position, in nats."""
        return self.kl / max(self.positions, 1)

    @property
    def top1_agreement(self) -> float:
        """Share of positions whose most probable token is the same."""
        return self.agreeing / max(self.positions, 1)

    @property
    def reference_perplexity(self) -> float:
        """Perplexity of the reference."""
        return float(np.exp(self.reference_nll / max(self.predicted, 1)))

    @property
    def perplexity(self) -> float:
        """Perplexity of the candidate."""
        return float(np.exp(self.candidate_nll / max(self.predicted, 1)))

    @property
    def is_flat(self) -> bool:
        """Whether the candidate's distributions are as good as uniform: what a wrong head gives."""
        return self.candidate_peak <= FLATNESS * self.uniform


@dataclass(frozen=True, slots=True)
class Predictions:
    """Logits `[n, vocab]` and the log-probabilities that they stand for."""

    logits: Array
    log_probabilities: Array

    @classmethod
    def of(cls, logits: Array) -> Predictions:
        """Computes the log-probabilities.

        Raises:
            NumericalError: a logit is NaN or infinite.
        """
        return cls(logits, log_softmax(logits))


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis.

    Raises:
        NumericalError: a logit is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise NumericalError("the model produced NaN or infinite logits.")
    shifted = logits - logits.max(axis=-1, keepdims=True)
    totals = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(totals), dtype=np.float32)


def compare_logits(reference: Array, candidate: Array, next_ids: NDArray[np.int64], *, start: int = 0) -> Comparison:
    """Compares logits `[n, vocab]`; see `compare_predictions`."""
    return compare_predictions(Predictions.of(reference), Predictions.of(candidate), next_ids, start=start)


def compare_predictions(
    reference: Predictions, candidate: Predictions, next_ids: NDArray[np.int64], *, start: int = 0
) -> Comparison:
    """Compares two models on n positions; `next_ids` are the true next tokens of the first rows (n of them, or n - 1).

    `start` is the position of the first row in its text.
    """
    log_p, log_q = reference.log_probabilities, candidate.log_probabilities
    divergence = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1, dtype=np.float64)
    rows = np.arange(len(next_ids))
    return Comparison(
        positions=len(log_p),
        predicted=len(next_ids),
        agreeing=int((reference.logits.argmax(axis=-1) == candidate.logits.argmax(axis=-1)).sum()),
        kl=float(divergence.sum()),
        worst_kl=float(divergence.max()),
        worst_position=start + int(divergence.argmax()),
        largest_difference=float(np.abs(reference.logits - candidate.logits).max()),
        reference_nll=float(-log_p[rows, next_ids].sum(dtype=np.float64)),
        candidate_nll=float(-log_q[rows, next_ids].sum(dtype=np.float64)),
        candidate_peak=float(log_q.max(axis=-1).sum(dtype=np.float64)),
        uniform=float(-len(log_q) * np.log(log_q.shape[-1])),
    )
