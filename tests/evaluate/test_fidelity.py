"""Comparing two models: the figures against a plain double-precision computation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from qwenonnx.errors import NumericalError, UsageError
from qwenonnx.evaluate.fidelity import CHUNK, FidelityReport, TextResult, measure_candidates, measure_fidelity
from qwenonnx.evaluate.metrics import Comparison, compare_logits, log_softmax
from qwenonnx.evaluate.texts import EvaluationText


def random_logits(n: int, seed: int, vocab: int = 300) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * 4).astype(np.float32)


class Table:
    """A model whose logits at each position are written down."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits
        self.largest = 0
        self.calls = 0

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        self.calls += 1
        self.largest = max(self.largest, len(token_ids))
        return self._logits[start : start + len(token_ids)]


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 300 for letter in text]


def test_figures_equal_a_double_precision_computation() -> None:
    p_logits, q_logits = random_logits(40, 1), random_logits(40, 1) + random_logits(40, 2) * np.float32(0.125)
    following = np.random.default_rng(3).integers(0, 300, 39)

    comparison = compare_logits(p_logits, q_logits, following)

    p, q = (softmax(x.astype(np.float64)) for x in (p_logits, q_logits))
    divergence = (p * np.log(p / q)).sum(axis=1)
    rows = np.arange(39)
    assert comparison.positions == 40
    assert comparison.kl_mean == pytest.approx(divergence.mean(), rel=1e-4)
    assert comparison.worst_kl == pytest.approx(divergence.max(), rel=1e-4)
    assert comparison.top1_agreement == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert 0 < comparison.top1_agreement < 1
    assert comparison.reference_perplexity == pytest.approx(math.exp(-np.log(p[rows, following]).mean()), rel=1e-5)
    assert comparison.perplexity == pytest.approx(math.exp(-np.log(q[rows, following]).mean()), rel=1e-5)
    assert comparison.largest_difference == np.abs(p_logits - q_logits).max()


def test_a_model_equals_itself() -> None:
    logits = random_logits(20, 5)

    comparison = compare_logits(logits, logits, np.arange(20))

    assert comparison.kl_mean == pytest.approx(0, abs=1e-6)
    assert comparison.top1_agreement == 1
    assert comparison.perplexity == comparison.reference_perplexity


def test_log_softmax_stands_huge_logits() -> None:
    logits = np.array([[1e4, 0, -1e4], [-3e38, 0, 0]], dtype=np.float32)

    np.testing.assert_allclose(log_softmax(logits)[0], [0, -1e4, -2e4])
    np.testing.assert_allclose(log_softmax(logits)[1, 1:], [-math.log(2)] * 2, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_nan_and_infinite_logits_are_an_error(value: float, side: str) -> None:
    pair = {"reference": random_logits(3, 1), "candidate": random_logits(3, 1)}
    pair[side][1, 7] = value

    with pytest.raises(NumericalError, match="NaN or infinite"):
        compare_logits(pair["reference"], pair["candidate"], np.array([1, 2]))


@pytest.mark.parametrize("vocab", [300, 151_936])
def test_flat_predictions_are_recognised(vocab: int) -> None:
    noise = random_logits(4, 1, vocab)

    def is_flat(logits: NDArray[np.float32]) -> bool:
        return compare_logits(noise, logits, np.arange(4)).is_flat

    assert is_flat(np.zeros((4, vocab), dtype=np.float32))
    assert is_flat(noise * 0.01)
    assert not is_flat(noise)


def test_parts_of_a_text_add_up_to_the_whole() -> None:
    p, q, following = random_logits(30, 1), random_logits(30, 2), np.arange(30)

    parts = compare_logits(p[:11], q[:11], following[:11]) + compare_logits(p[11:], q[11:], following[11:])

    whole = compare_logits(p, q, following)
    for name in ("positions", "agreeing", "predicted", "worst_kl", "largest_difference"):
        assert getattr(parts, name) == getattr(whole, name)
    for name in ("kl", "reference_nll", "candidate_nll"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-6)
    assert whole + Comparison() == whole


def test_texts_are_compared_in_bounded_chunks() -> None:
    length = 2 * CHUNK + 5
    text = EvaluationText("long", "".join(chr(65 + i % 50) for i in range(length + 20)))
    p, q = random_logits(length, 1), random_logits(length, 2)
    reference, candidate = Table(p), Table(q)
    calls: list[tuple[int, int]] = []

    report = measure_fidelity(
        reference,
        candidate,
        Letters(),
        [text],
        max_tokens=length,
        progress=lambda done, total: calls.append((done, total)),
    )

    ids = np.array(Letters().encode(text.text)[:length])
    whole = compare_logits(p, q, ids[1:])
    assert reference.largest == candidate.largest == CHUNK
    assert calls == [(CHUNK, length), (2 * CHUNK, length), (length, length)]
    assert report.overall.predicted == length - 1
    assert report.overall.kl_mean == pytest.approx(whole.kl_mean, rel=1e-5)
    assert report.overall.perplexity == pytest.approx(whole.perplexity, rel=1e-5)


def test_several_candidates_are_compared_with_one_run_of_the_reference() -> None:
    texts = [EvaluationText("first", "some words of it" * 5), EvaluationText("second", "others")]
    reference = Table(random_logits(100, 1))
    candidates = {name: Table(random_logits(100, seed)) for seed, name in enumerate(("a", "b", "c"), start=2)}

    reports = measure_candidates(reference, candidates, Letters(), texts)

    assert reference.calls == candidates["a"].calls == 3  # 64 and 16 tokens, and 6
    assert list(reports) == ["a", "b", "c"]
    for name, candidate in candidates.items():
        assert reports[name] == measure_fidelity(reference, candidate, Letters(), texts)
    assert reports["a"] != reports["b"]


def test_of_several_candidates_the_one_with_unusable_logits_is_named() -> None:
    good, bad = Table(random_logits(20, 1)), Table(np.full((20, 300), np.nan, dtype=np.float32))
    text = EvaluationText("text", "some words")

    with pytest.raises(NumericalError, match=r"^int4: the model produced NaN or infinite logits\.$"):
        measure_candidates(good, {"int8": good, "int4": bad}, Letters(), [text])
    with pytest.raises(NumericalError, match=r"^the model produced"):
        measure_fidelity(good, bad, Letters(), [text])


def test_the_worst_position_is_found_with_its_text() -> None:
    small = Comparison(positions=10, kl=5.0, worst_kl=0.6, worst_position=2)
    large = Comparison(positions=10, kl=1.0, worst_kl=0.9, worst_position=7)

    report = FidelityReport((TextResult("small", small), TextResult("large", large)))

    assert report.worst.name == "small"
    assert (report.worst_position.name, report.worst_position.comparison.worst_position) == ("large", 7)
    values = report.to_json()
    assert (values["worst_text"], values["kl_worst_text"], values["kl_worst_position"]) == ("small", "large", 7)


def test_overall_weighs_every_position_the_same() -> None:
    short = Comparison(positions=10, predicted=9, kl=1.0, agreeing=10)
    long = Comparison(positions=90, predicted=89, kl=1.0, agreeing=45)

    report = FidelityReport((TextResult("short", short), TextResult("long", long)))

    assert report.overall.kl_mean == pytest.approx(0.02)
    assert report.to_json()["top1_agreement"] == pytest.approx(0.55)
    assert set(report.to_json()["texts"]) == {"short", "long"}


@pytest.mark.parametrize("text", ["", "x"])
def test_a_text_in_which_nothing_can_be_predicted_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="'tiny' has fewer than two tokens"):
        measure_fidelity(
            Table(random_logits(1, 1)), Table(random_logits(1, 1)), Letters(), [EvaluationText("tiny", text)]
        )


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))
