"""Who waits, in which order, and who is sent away."""

from __future__ import annotations

import pytest

from qwenonnx.engine.request import GenerationRequest
from qwenonnx.engine.sequence import Sequence
from qwenonnx.engine.waiting_line import WaitingLine
from qwenonnx.errors import QueueFullError
from qwenonnx.text.tokenizer import Tokenizer


def sequence(tokenizer: Tokenizer, priority: int = 0) -> Sequence:
    request = GenerationRequest((1, 2, 3), priority=priority)
    return Sequence(request, lambda event: None, tokenizer, context_length=64, end_ids=frozenset())


def test_higher_priorities_come_first_and_equals_in_order_of_arrival(tiny_tokenizer: Tokenizer) -> None:
    line = WaitingLine(limit=9)
    sequences = [sequence(tiny_tokenizer, priority) for priority in (0, 5, 0, -1, 5)]
    for item in sequences:
        line.add(item, free=0, seconds=1)
    assert list(line) == [sequences[i] for i in (1, 4, 0, 2, 3)]
    assert line.first is sequences[1]


def test_who_has_to_wait_again_is_before_all_that_came_later(tiny_tokenizer: Tokenizer) -> None:
    line = WaitingLine(limit=9)
    first, second, third = (sequence(tiny_tokenizer) for _ in range(3))
    for item in (first, second):
        line.add(item, free=0, seconds=1)
    assert line.remove(first)
    assert not line.remove(first)
    line.add(third, free=0, seconds=1)
    line.put_back(first)
    assert list(line) == [first, second, third]


def test_the_refusal_says_place_limit_and_when_to_try_again(tiny_tokenizer: Tokenizer) -> None:
    line = WaitingLine(limit=2)
    for _ in range(3):
        line.add(sequence(tiny_tokenizer), free=1, seconds=7)
    with pytest.raises(QueueFullError, match="3 requests are waiting already") as refusal:
        line.add(sequence(tiny_tokenizer), free=1, seconds=7)
    assert (refusal.value.position, refusal.value.limit, refusal.value.retry_after) == (4, 2, 7)
    for seconds, bound in ((0.01, 1.0), (1e9, 60.0)):
        with pytest.raises(QueueFullError) as refusal:
            line.add(sequence(tiny_tokenizer), free=0, seconds=seconds)
        assert refusal.value.retry_after == bound


def test_cancelled_ones_take_no_place(tiny_tokenizer: Tokenizer) -> None:
    line = WaitingLine(limit=1)
    gone = sequence(tiny_tokenizer)
    line.add(gone, free=0, seconds=1)
    gone.cancel_requested = True
    assert len(line) == 0
    assert line  # it is still there to be taken out
    line.add(sequence(tiny_tokenizer), free=0, seconds=1)
    assert len(line) == 1
