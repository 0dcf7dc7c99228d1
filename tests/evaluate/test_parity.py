"""Comparing two models position by position: likeliest tokens, ties, and the largest difference's place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from packages import TOKENS, package_runner

from qwenonnx.errors import NumericalError
from qwenonnx.evaluate.parity import TIE, Parity, TokenText, compare_models, compare_pieces, compare_rows
from qwenonnx.package.package import Package

Logits = NDArray[np.float32]
TEXT = TokenText("text", TOKENS)


def logits(*rows: Sequence[float]) -> Logits:
    return np.asarray(rows, dtype=np.float32)


class Recorded:
    """A model that gives the same logits at each position, whatever the tokens are."""

    def __init__(self, rows: Logits) -> None:
        self.rows = rows
        self.calls: list[tuple[int, int]] = []

    def score(self, token_ids: Sequence[int], start: int) -> Logits:
        self.calls.append((start, len(token_ids)))
        return self.rows[start : start + len(token_ids)]


def test_equal_logits_agree_everywhere() -> None:
    rows = logits([1, 2, 3], [3, 1, 2])

    parity = compare_rows(rows, rows)

    assert (parity.positions, parity.same, parity.ties, parity.largest_difference) == (2, 2, 0, 0)
    assert parity.holds(0)


def test_a_difference_is_found_with_its_text_and_position() -> None:
    expected, actual = logits([1, 2, 3], [3, 1, 2]), logits([1, 2, 3], [3, 1, 2.25])

    parity = compare_rows(expected, actual, "story", start=40)

    assert (parity.text, parity.position, parity.largest_difference) == ("story", 41, 0.25)
    assert parity.holds(0.25)
    assert not parity.holds(0.2)


def test_another_likeliest_token_fails_whatever_the_tolerance_is() -> None:
    parity = compare_rows(logits([1.0, 1.5]), logits([1.5, 1.25]))

    assert (parity.same, parity.ties, parity.widest_margin) == (0, 0, 0.5)
    assert not parity.holds(100)


def test_two_tokens_that_are_as_likely_are_a_tie() -> None:
    near = TIE / 4
    parity = compare_rows(logits([1.0, 1.0 + near]), logits([1.0 + near, 1.0]))

    assert (parity.same, parity.ties) == (0, 1)
    assert parity.holds(1e-3)


def test_parts_add_up_and_the_worst_place_stays() -> None:
    small = Parity(10, 10, 0, 0.0, 0.1, "first", 3)
    large = Parity(5, 3, 1, 0.7, 0.4, "second", 2)

    assert small + large == large + small == Parity(15, 13, 1, 0.7, 0.4, "second", 2)
    assert sum([small, large], Parity()) == small + large


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("broken", ["reference", "candidate"])
def test_logits_that_are_no_numbers_are_an_error(value: float, broken: str) -> None:
    good, bad = logits([1, 2]), logits([1, value])
    pair = (bad, good) if broken == "reference" else (good, bad)

    with pytest.raises(NumericalError, match=r"NaN or infinite logits in 'story' from position 7"):
        compare_rows(*pair, "story", 7)


def test_long_texts_go_in_chunks_and_are_reported_by_text() -> None:
    rows = np.zeros((100, 4), dtype=np.float32)
    other = rows.copy()
    other[90, 0] = 1.0
    texts = [TokenText("short", (1,) * 5), TokenText("long", (1,) * 100)]
    progress: list[tuple[int, int]] = []
    candidate = Recorded(other)

    short, long = compare_models(Recorded(rows), candidate, texts, lambda done, total: progress.append((done, total)))

    assert (short.positions, short.largest_difference) == (5, 0)
    assert (long.positions, long.text, long.position) == (100, "long", 90)
    assert candidate.calls == [(0, 5), (0, 64), (64, 36)]
    assert progress == [(5, 105), (69, 105), (105, 105)]


@pytest.mark.parametrize("kind", ["tiny_fp32", "tiny_int8"])
def test_a_package_computes_the_same_in_pieces(kind: str, request: pytest.FixtureRequest) -> None:
    package: Package = request.getfixturevalue(kind)
    long = TokenText("long", TOKENS * 4)

    results = compare_pieces(package_runner(package, slots=4), [TEXT, long], steps=8)

    assert list(results) == ["in chunks of 16", "one by one", "in a batch of 4"]
    assert [parity.positions for parity in results.values()] == [60, 16, 16]
    assert results["in chunks of 16"].holds(1e-4)
    assert results["in a batch of 4"].holds(1e-4)
    if kind == "tiny_fp32":
        assert results["one by one"].holds(1e-4)


def test_a_cache_that_forgets_is_found_in_pieces(tiny_fp32: Package) -> None:
    class Forgetful:
        """Runs every chunk as if it were the beginning."""

        def __init__(self) -> None:
            self.runner = package_runner(tiny_fp32, slots=4)

        def score(self, token_ids: Sequence[int], start: int) -> Logits:
            return self.runner.score(token_ids, 0)

        def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> Logits:
            return self.runner.decode(token_ids, [0] * len(starts))

    results = compare_pieces(Forgetful(), [TokenText("long", TOKENS * 2)], steps=8)

    assert not results["in chunks of 16"].holds(1)
    assert not results["one by one"].holds(1)
