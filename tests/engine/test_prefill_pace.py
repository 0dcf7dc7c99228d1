"""How large the pieces of prompts are beside answers."""

from __future__ import annotations

import pytest

from qwenonnx.engine.config import SchedulerConfig
from qwenonnx.engine.prefill_pace import PrefillPace


def pace(**changes: float) -> PrefillPace:
    return PrefillPace(SchedulerConfig(prefill_chunk=256, max_queue=1, max_step_delay=changes.get("delay", 0.1)))


def test_alone_a_prompt_runs_in_the_largest_chunks() -> None:
    slow = pace()
    slow.chunk_took(10, 1.0)
    assert slow.size(beside_answers=False) == 256


def test_beside_answers_a_chunk_takes_as_long_as_they_may_be_held_up() -> None:
    measured = pace()
    assert measured.size(beside_answers=True) == 256  # nothing is known yet
    measured.chunk_took(100, 0.2)
    assert measured.size(beside_answers=True) == 48  # 500 a second, for a tenth of one


def test_there_is_a_least_size_so_that_prompts_get_on() -> None:
    measured = pace(delay=0.01)
    measured.chunk_took(100, 1.0)
    assert measured.size(beside_answers=True) == 16


def test_where_steps_are_slow_chunks_may_be_as_well() -> None:
    measured = pace()
    measured.chunk_took(200, 1.0)
    measured.step_took(0.4)
    assert measured.size(beside_answers=True) == 120  # 200 a second, for 1.5 times 0.4


@pytest.mark.parametrize("first", [16, 256])
def test_sizes_settle_at_the_delay_that_is_allowed(first: int) -> None:
    measured = pace()
    size = first
    for _ in range(60):
        measured.chunk_took(size, 0.02 + 0.002 * size)  # what a chunk costs: reading the weights, and computing
        size = measured.size(beside_answers=True)
    assert 0.08 <= 0.02 + 0.002 * size <= 0.1
