from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qwenonnx.engine.sampler import Sampler, _wide_nucleus
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.errors import NumericalError

Logits = NDArray[np.float32]


def row(seed: int = 0, size: int = 50, scale: float = 2.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def sampler(prompt: tuple[int, ...] = (), *, size: int = 50, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, num_tokens=size)


def reference(logits: Logits, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Logits:
    """Probabilities by the definitions, one filter after the other."""
    values = logits.astype(np.float64) / temperature
    probs = np.exp(values - values.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        order = order[:top_k]
    mass = sum(probs[i] for i in order)
    kept: list[int] = []
    total = 0.0
    for i in order:
        if kept and total >= top_p * mass:
            break
        kept.append(i)
        total += probs[i]
    kept = [i for i in kept if probs[i] >= min_p * probs.max()]
    result = np.zeros(len(probs), dtype=np.float32)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-9, 1e-45])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    for seed in range(20):
        assert sampler(temperature=temperature).sample(row(seed)) == row(seed).argmax()


def test_top_k_of_one_is_greedy_and_equal_logits_take_the_lowest_id() -> None:
    assert sampler(temperature=5.0, top_k=1).sample(row()) == row().argmax()
    assert sampler().sample(np.ones(50, dtype=np.float32)) == 0


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.8},
        {"top_p": 0.999},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 10, "top_p": 0.9, "min_p": 0.05},
        {"top_p": 0.9, "min_p": 0.2},
    ],
)
def test_samples_follow_the_reference_distribution(params: dict[str, Any]) -> None:
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    # 1,300 tokens make several blocks; most of the mass lies on some of them.
    for logits in (row(1), row(2, size=1300, scale=3.0)):
        expected = reference(logits, **full)
        chooser = sampler(size=len(logits), seed=7, **full)
        draws = 2000
        counts = np.bincount([chooser.sample(logits) for _ in range(draws)], minlength=len(logits))
        assert not counts[expected == 0].any()
        # Six standard deviations and a little for rare tokens; the seed is fixed, so this cannot flicker.
        deviation = np.sqrt(draws * expected * (1 - expected))
        assert (np.abs(counts - draws * expected) <= 6 * deviation + 3).all()


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.integers(0, 2**32),
)
def test_never_leaves_the_filters(values: list[int], top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = np.array(values, dtype=np.float32) + np.linspace(0, 1e-3, len(values), dtype=np.float32)
    settings: dict[str, Any] = {"temperature": 1.3, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    allowed = np.flatnonzero(reference(logits, **settings))
    chooser = sampler(size=len(values), seed=seed, **settings)
    assert {chooser.sample(logits) for _ in range(8)} <= set(allowed)


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    chooser = sampler(temperature=1.0, top_k=3, seed=0)
    seen = {chooser.sample(np.zeros(50, dtype=np.float32)) for _ in range(200)}
    assert seen == {0, 1, 2}


def test_equal_seeds_give_equal_tokens_whatever_runs_between() -> None:
    def tokens(seed: int | None, disturb: Callable[[], object]) -> list[int]:
        chooser = sampler(temperature=1.0, seed=seed)
        result = []
        for index in range(30):
            disturb()
            result.append(chooser.sample(row(index)))
        return result

    other = sampler(temperature=1.0, seed=3)
    alone = tokens(3, lambda: None)
    assert tokens(3, lambda: other.sample(row())) == alone
    assert tokens(3, lambda: np.random.seed(0)) == alone
    assert tokens(4, lambda: None) != alone
    assert tokens(None, lambda: None) != tokens(None, lambda: None)
    assert len(tokens(-1, lambda: None)) == len(tokens(2**70, lambda: None)) == 30


def test_rows_without_a_token_are_never_chosen() -> None:
    logits = row(size=60)
    logits[50:] = 100.0
    assert sampler().sample(logits) == logits[:50].argmax()
    chooser = sampler(temperature=2.0, seed=0)
    assert max(chooser.sample(logits) for _ in range(2000)) < 50


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_unusable_rows_are_an_error(value: float, params: dict[str, Any]) -> None:
    with pytest.raises(NumericalError, match="not finite"):
        sampler(**params).sample(np.full(50, value, dtype=np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}])
def test_one_bad_logit_is_an_error_even_where_it_is_banned(value: float, params: dict[str, Any]) -> None:
    logits = row()
    logits[9] = value
    chooser = Sampler(SamplingParams(**params), (), num_tokens=50, end_ids=(9,), min_tokens=1)
    with pytest.raises(NumericalError):
        chooser.sample(logits)


def test_nothing_left_after_the_ban_is_an_error() -> None:
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[7] = 1.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        with pytest.raises(NumericalError):
            Sampler(params, (), num_tokens=50, end_ids=(7,), min_tokens=1).sample(logits)


def test_some_impossible_tokens_are_no_error() -> None:
    logits = row()
    logits[:40] = -np.inf
    chooser = sampler(temperature=1.0, seed=0, repetition_penalty=1.3, prompt=tuple(range(50)))
    assert {chooser.sample(logits) for _ in range(200)} <= set(range(40, 50))


def test_extreme_logits_do_not_overflow() -> None:
    logits = np.array([3e38, -3e38, 0.0], dtype=np.float32)
    assert sampler(size=3, temperature=1e-5).sample(logits) == 0


def test_logits_are_left_as_they_are() -> None:
    logits = row()
    logits.flags.writeable = False
    for params in ({}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0}):
        sampler(**params).sample(logits)  # type: ignore[arg-type]
    assert (logits == row()).all()


def penalized(logits: Logits, prompt: list[int], output: list[int], params: SamplingParams) -> Logits:
    result = logits.astype(np.float64)
    for token_id in {*prompt, *output}:
        factor = params.repetition_penalty
        result[token_id] = result[token_id] / factor if result[token_id] > 0 else result[token_id] * factor
    for token_id in set(output):
        result[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
    for token_id, bias in params.logit_bias.items():
        result[token_id] += bias
    return result.astype(np.float32)


@given(
    st.lists(st.integers(0, 49), max_size=20),
    st.sampled_from([1.0, 1.1, 2.0, 0.8]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([0.0, 0.3, -0.2]),
    st.dictionaries(st.integers(0, 49), st.integers(-100, 100), max_size=3),
)
def test_penalties_and_bias_equal_the_reference(
    prompt: list[int], repetition: float, presence: float, frequency: float, bias: dict[int, float]
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    chooser = Sampler(params, prompt, num_tokens=50)
    output: list[int] = []
    for seed in range(100):
        logits = row(seed)
        expected = penalized(logits, prompt, output, params)
        token_id = chooser.sample(logits)
        assert expected[token_id] == pytest.approx(expected.max(), abs=1e-5)
        output.append(token_id)


def test_prompt_ids_and_biases_without_a_token_are_ignored() -> None:
    chooser = sampler((3, 55), repetition_penalty=1.5, logit_bias={55: 100.0})
    assert chooser.sample(row(size=60)) < 50


def test_min_tokens_bans_end_ids_until_that_many_are_out() -> None:
    logits = np.zeros(50, dtype=np.float32)
    logits[[7, 9]] = 5.0
    logits[4] = 1.0
    for temperature in (0.0, 0.01):
        chooser = Sampler(
            SamplingParams(temperature=temperature, seed=0),
            (),
            num_tokens=50,
            end_ids=(7, 9, 55),
            min_tokens=3,
        )
        tokens = [chooser.sample(logits) for _ in range(4)]
        assert tokens[:3] == [4, 4, 4]
        assert tokens[3] in (7, 9)


def test_frequency_penalty_breaks_a_loop() -> None:
    def distinct(**params: Any) -> int:
        chooser = sampler(**params)
        return len({chooser.sample(row()) for _ in range(40)})

    assert distinct() == 1
    assert distinct(frequency_penalty=0.5) > 5


@pytest.mark.parametrize("scale", [0.0, 0.5])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_the_nucleus_of_flat_rows_is_that_of_the_definition(scale: float, top_p: float) -> None:
    size, levels = 9000, 40
    noise = np.random.default_rng(5).standard_normal(size)
    logits = (np.round(noise * levels / 4) / levels * scale).astype(np.float32)
    expected = reference(logits, temperature=1.0, top_k=0, top_p=top_p, min_p=0.0)
    chooser = sampler(size=size, temperature=1.0, top_p=top_p, seed=2)
    draws = 600
    chosen = np.array([chooser.sample(logits) for _ in range(draws)])
    # A sum that is rounded otherwise may put one token more or less at the end.
    assert np.count_nonzero(expected[chosen] == 0) <= 2
    tenths = np.array_split(np.flatnonzero(expected), 10)
    for ids in tenths:
        share = float(expected[ids].sum())
        deviation = np.sqrt(draws * share * (1 - share))
        assert abs(np.isin(chosen, ids).sum() - draws * share) <= 6 * deviation


@given(
    st.integers(4097, 9000),
    st.floats(0.0, 3.0),
    st.sampled_from([0.0, 0.2, 0.7, 0.95, 0.9999]),
    st.integers(0, 2**32),
)
def test_a_wide_nucleus_is_the_smallest_that_holds_the_mass(size: int, scale: float, top_p: float, seed: int) -> None:
    weights = np.exp(-np.abs(np.random.default_rng(seed).standard_normal(size) * scale)).astype(np.float32)
    weights[np.random.default_rng(seed).integers(0, size, size // 3)] = weights[7]
    weights[seed % size] = 1.0
    mass = top_p * float(weights.sum(dtype=np.float64))
    kept = np.flatnonzero(_wide_nucleus(weights, mass))
    order = np.lexsort((np.arange(size), -weights))
    assert kept.tolist() == sorted(order[: len(kept)].tolist())
    least = float(weights[order[len(kept) - 1]])
    assert float(weights[kept].sum(dtype=np.float64)) >= mass - 1e-6
    assert len(kept) == 1 or float(weights[kept].sum(dtype=np.float64)) - least <= mass + 1e-6
