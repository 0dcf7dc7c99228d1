"""How faithful a package is: teacher-forced comparison with a reference package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qwenonnx.errors import NumericalError, UsageError
from qwenonnx.evaluate.metrics import Comparison, Predictions, compare_predictions
from qwenonnx.evaluate.texts import EvaluationText
from qwenonnx.files import Progress

# Positions whose predictions are held at once: logits and log-probabilities of two models, 64 x 151,936 fp32 each, are
# 156 MB.
CHUNK = 64


class Scorer(Protocol):
    """Gives the logits of every token of a chunk."""

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits `[n, vocab]` of tokens at positions `[start, start + n)`."""


class Encoder(Protocol):
    """Turns text into token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids; control tokens in the text are read as such."""


@dataclass(frozen=True, slots=True)
class TextResult:
    """The comparison of one text."""

    name: str
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """Results per text and over all positions."""

    texts: tuple[TextResult, ...]

    @property
    def overall(self) -> Comparison:
        """All texts together, each position counting the same."""
        return sum((text.comparison for text in self.texts), Comparison())

    @property
    def worst(self) -> TextResult:
        """The text with the largest mean KL."""
        return max(self.texts, key=lambda text: text.comparison.kl_mean)

    @property
    def worst_position(self) -> TextResult:
        """The text that holds the position with the largest KL; which one is in its comparison."""
        return max(self.texts, key=lambda text: text.comparison.worst_kl)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            **_figures(self.overall),
            "worst_text": self.worst.name,
            "kl_worst_text": self.worst_position.name,
            "texts": {text.name: _figures(text.comparison) for text in self.texts},
        }


def measure_fidelity(
    reference: Scorer,
    candidate: Scorer,
    encoder: Encoder,
    texts: Sequence[EvaluationText],
    *,
    max_tokens: int = 512,
    progress: Progress | None = None,
) -> FidelityReport:
    """Compares two models; see `measure_candidates`."""
    reports = measure_candidates(reference, {"": candidate}, encoder, texts, max_tokens=max_tokens, progress=progress)
    return reports[""]


def measure_candidates(
    reference: Scorer,
    candidates: Mapping[str, Scorer],
    encoder: Encoder,
    texts: Sequence[EvaluationText],
    *,
    max_tokens: int = 512,
    progress: Progress | None = None,
) -> dict[str, FidelityReport]:
    """Compares named models with a reference on the first `max_tokens` tokens of each text.

    Texts go in chunks of bounded memory, and the reference runs once for all candidates.

    Raises:
        UsageError: a text has fewer than two tokens.
        NumericalError: a model gives NaN or infinite logits; a candidate's name is said.
    """
    encoded = [(text.name, encoder.encode(text.text)[:max_tokens]) for text in texts]
    total = sum(len(ids) for _, ids in encoded)
    done = 0
    results: dict[str, list[TextResult]] = {name: [] for name in candidates}
    for text_name, ids in encoded:
        if len(ids) < 2:
            raise UsageError(f"the text {text_name!r} has fewer than two tokens, so nothing can be predicted in it.")
        comparisons = dict.fromkeys(candidates, Comparison())
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            following = np.asarray(ids[start + 1 : start + 1 + len(part)], dtype=np.int64)
            expected = Predictions.of(reference.score(part, start))
            for name, candidate in candidates.items():
                with _named(name):
                    actual = Predictions.of(candidate.score(part, start))
                comparisons[name] += compare_predictions(expected, actual, following, start=start)
            done += len(part)
            if progress is not None:
                progress(done, total)
        for name, comparison in comparisons.items():
            results[name].append(TextResult(text_name, comparison))
    return {name: FidelityReport(tuple(entries)) for name, entries in results.items()}


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Lets an error about a model's numbers say which of the models it is."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{name}: {error}" if name else str(error)) from error


def _figures(comparison: Comparison) -> dict[str, float | int]:
    return {
        "positions": comparison.positions,
        "kl_mean": comparison.kl_mean,
        "kl_worst": comparison.worst_kl,
        "kl_worst_position": comparison.worst_position,
        "top1_agreement": comparison.top1_agreement,
        "max_logit_difference": comparison.largest_difference,
        "perplexity": comparison.perplexity,
        "reference_perplexity": comparison.reference_perplexity,
    }
