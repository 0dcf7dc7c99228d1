from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qwenonnx.engine.logprobs import token_logprobs


@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=50), st.data())
def test_agrees_with_the_definition(values: list[float], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(values) - 1))
    count = data.draw(st.integers(0, 60))
    entry = token_logprobs(np.array(values, dtype=np.float32), chosen, count)
    exact = [value - max(values) - math.log(math.fsum(math.exp(v - max(values)) for v in values)) for value in values]
    assert math.isclose(entry.chosen.logprob, exact[chosen], abs_tol=1e-4)
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert [one.token_id for one in entry.top] == ranked
    assert all(math.isclose(one.logprob, exact[one.token_id], abs_tol=1e-4) for one in entry.top)


def test_impossible_tokens_are_minus_infinity() -> None:
    entry = token_logprobs(np.array([0.0, -np.inf], dtype=np.float32), 1, 2)
    assert entry.chosen.logprob == -math.inf
    assert entry.top[0].logprob == 0.0
