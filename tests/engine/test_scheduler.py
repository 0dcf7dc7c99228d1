from __future__ import annotations

import pytest

from qwenonnx.engine.config import SchedulerConfig
from qwenonnx.engine.request import Event, GenerationRequest
from qwenonnx.engine.scheduler import DecodeStep, PrefillChunk, Scheduler
from qwenonnx.engine.sequence import Sequence
from qwenonnx.errors import QueueFullError
from qwenonnx.text.tokenizer import Tokenizer


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(SchedulerConfig(prefill_chunk=4, max_queue=2))


def ignore(event: Event) -> None:
    pass


def sequence(tokenizer: Tokenizer, *prompt: int) -> Sequence:
    return Sequence(GenerationRequest(prompt_ids=prompt), ignore, tokenizer, context_length=64, end_ids=frozenset())


def run_prefill(scheduler: Scheduler) -> list[tuple[tuple[int, ...], int, bool]]:
    """Runs chunks until the last one; the sequence then gets its first token, 99."""
    chunks = []
    while isinstance(step := scheduler.schedule(), PrefillChunk):
        scheduler.computed(step)
        chunks.append((step.token_ids, step.start, step.is_last))
        if step.is_last:
            step.sequence.token_ids.append(99)
            break
    return chunks


def test_cuts_a_prompt_into_chunks_and_then_decodes(scheduler: Scheduler, tiny_tokenizer: Tokenizer) -> None:
    assert scheduler.schedule() is None
    first = sequence(tiny_tokenizer, *range(10))
    scheduler.add(first)
    assert scheduler.has_work
    assert run_prefill(scheduler) == [
        ((0, 1, 2, 3), 0, False),
        ((4, 5, 6, 7), 4, False),
        ((8, 9), 8, True),
    ]
    step = scheduler.schedule()
    assert isinstance(step, DecodeStep)
    assert (step.sequences, step.token_ids, step.starts) == ((first,), (99,), (10,))
    scheduler.computed(step)
    assert first.num_computed == 11


def test_first_come_first_served(scheduler: Scheduler, tiny_tokenizer: Tokenizer) -> None:
    sequences = [sequence(tiny_tokenizer, n, n) for n in range(3)]
    order = []
    for item in sequences:
        scheduler.add(item)
    while (step := scheduler.schedule()) is not None:
        assert isinstance(step, PrefillChunk)
        assert scheduler.num_running == 1
        scheduler.computed(step)
        order.append(step.sequence)
        scheduler.remove(step.sequence)
    assert order == sequences


def test_the_queue_is_bounded_and_cancelled_requests_leave_it(scheduler: Scheduler, tiny_tokenizer: Tokenizer) -> None:
    waiting = [sequence(tiny_tokenizer, 1) for _ in range(3)]  # one of them takes the free place
    for item in waiting:
        scheduler.add(item)
    for _ in range(2):
        with pytest.raises(QueueFullError, match="waiting already") as caught:
            scheduler.add(sequence(tiny_tokenizer, 1))
        assert 1.0 <= caught.value.retry_after <= 60.0
        scheduler.schedule()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    waiting[1].cancel_requested = True
    assert scheduler.num_waiting == 1
    scheduler.add(sequence(tiny_tokenizer, 1))
    assert scheduler.drop_cancelled() == [waiting[1]]
    waiting[0].cancel_requested = True
    assert scheduler.drop_cancelled() == [waiting[0]]
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)


def test_no_queue_still_serves_one(tiny_tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(SchedulerConfig(prefill_chunk=4, max_queue=0))
    scheduler.add(sequence(tiny_tokenizer, 1))
    with pytest.raises(QueueFullError):
        scheduler.add(sequence(tiny_tokenizer, 1))


def test_trusts_only_what_was_computed(scheduler: Scheduler, tiny_tokenizer: Tokenizer) -> None:
    broken = sequence(tiny_tokenizer, *range(10))
    scheduler.add(broken)
    step = scheduler.schedule()
    assert isinstance(step, PrefillChunk)
    scheduler.computed(step)
    scheduler.schedule()  # this chunk fails half-way: never reported as computed
    scheduler.remove(broken)
    again = sequence(tiny_tokenizer, *range(10))
    scheduler.add(again)
    assert run_prefill(scheduler) == [((4, 5, 6, 7), 4, False), ((8, 9), 8, True)]
    assert again.num_cached == 4
    scheduler.remove(again)
    shorter = sequence(tiny_tokenizer, 0, 1, 7, 7)
    scheduler.add(shorter)
    assert run_prefill(scheduler) == [((7, 7), 2, True)]
    scheduler.remove(shorter)
    scheduler.add(sequence(tiny_tokenizer, *range(10)))  # what the shorter one overwrote is gone
    assert run_prefill(scheduler)[0][1] == 2


def test_drop_all_tells_running_from_waiting(scheduler: Scheduler, tiny_tokenizer: Tokenizer) -> None:
    first, second = sequence(tiny_tokenizer, 1), sequence(tiny_tokenizer, 1)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    assert scheduler.drop_all() == ([first], [second])
    assert not scheduler.has_work
