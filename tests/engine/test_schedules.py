"""The scheduler simulated: many requests at once, with rows that are checked like memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenonnx.engine.config import SchedulerConfig
from qwenonnx.engine.request import Event, Finished, GenerationRequest
from qwenonnx.engine.rows import SMALLEST_CHUNK
from qwenonnx.engine.scheduler import DecodeStep, PrefillChunk, Scheduler
from qwenonnx.engine.sequence import Sequence
from qwenonnx.text.tokenizer import Tokenizer


@dataclass
class Simulation:
    """A scheduler, and the rows' contents as the moves and steps leave them."""

    tokenizer: Tokenizer
    config: SchedulerConfig
    context: int = 256
    memory: list[list[int]] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)
    chunks: list[PrefillChunk] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.memory = [[] for _ in range(self.config.num_rows)]

    def add(self, name: str, prompt: list[int], count: int, priority: int = 0) -> Sequence:
        self.events[name] = []
        request = GenerationRequest(
            tuple(prompt), max_tokens=count, ignore_eos=True, request_id=name, priority=priority
        )
        sequence = Sequence(
            request, self.events[name].append, self.tokenizer, context_length=self.context, end_ids=frozenset()
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self, seconds: float = 0.0) -> bool:
        step = self.scheduler.schedule()
        for move in self.scheduler.take_moves():
            a, b, (first, second) = move.source, move.target, move.lengths
            if move.kind == "swap":
                self.memory[a], self.memory[b] = self.memory[b][:second], self.memory[a][:first]
            elif move.kind == "copy":
                assert len(self.memory[a]) >= first
                self.memory[b] = self.memory[a][:first]
            else:
                del self.memory[a][first:]
        assert self.scheduler.kv_tokens <= self.config.kv_tokens
        if isinstance(step, PrefillChunk):
            assert len(step.token_ids) >= min(SMALLEST_CHUNK, step.sequence.num_prompt)
            self.chunks.append(step)
            self._write(step.sequence, list(step.token_ids), step.start)
            self.scheduler.computed(step, seconds)
            if step.is_last and not step.sequence.num_output:
                self._advance(step.sequence)
        elif isinstance(step, DecodeStep):
            assert [sequence.slot for sequence in step.sequences] == list(range(len(step.sequences)))
            self.widths.append(len(step.sequences))
            for sequence, token_id, start in zip(step.sequences, step.token_ids, step.starts, strict=True):
                self._write(sequence, [token_id], start)
            self.scheduler.computed(step)
            for sequence in step.sequences:
                self._advance(sequence)
        return step is not None

    def run(self) -> None:
        for _ in range(20_000):
            if not self.step():
                assert not self.scheduler.has_work
                return
        raise AssertionError("the schedule does not end")

    def _write(self, sequence: Sequence, token_ids: list[int], start: int) -> None:
        row = self.memory[sequence.slot]
        del row[start:]
        assert row == sequence.token_ids[:start]  # all that attention will read is this sequence's own
        row += token_ids

    def _advance(self, sequence: Sequence) -> None:
        logits = np.zeros(512, dtype=np.float32)
        logits[1 + sum(sequence.token_ids) % 300] = 1.0
        sequence.advance(logits)
        if sequence.is_finished:
            self.scheduler.remove(sequence)

    def output(self, name: str) -> tuple[int, ...]:
        last = self.events[name][-1]
        assert isinstance(last, Finished)
        return tuple(i for event in self.events[name][:-1] for i in getattr(event, "token_ids", ()))


def config(**changes: Any) -> SchedulerConfig:
    return replace(SchedulerConfig(prefill_chunk=16, max_queue=1000, max_running=4, num_rows=6), **changes)


PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=14
)


@settings(max_examples=60, deadline=None)
@given(
    PROMPTS,
    st.integers(2, 40),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 20),
    st.lists(st.integers(0, 13), max_size=4),
)
def test_any_schedule_keeps_memory_and_answers_apart(
    tiny_tokenizer: Tokenizer,
    prompts: list[tuple[int, int, int, int]],
    chunk: int,
    running: int,
    idle: int,
    spare_pages: int,
    cancelled: list[int],
) -> None:
    shape = config(prefill_chunk=chunk, max_running=running, num_rows=running + idle, kv_tokens=16 * (8 + spare_pages))
    together = Simulation(tiny_tokenizer, shape)
    sequences = []
    for i, (family, length, tail, count) in enumerate(prompts):
        sequences.append(together.add(str(i), [family + 1] * length + [tail + 9] * 3, count))
    for _ in range(3):
        together.step()
    for i in cancelled:
        if i < len(sequences):
            sequences[i].cancel_requested = True
    for sequence in together.scheduler.drop_cancelled():
        sequence.finish("cancelled")
    together.run()
    for i, (family, length, tail, count) in enumerate(prompts):
        if sequences[i].cancel_requested:
            continue
        alone = Simulation(tiny_tokenizer, config(max_running=1, num_rows=1))
        alone.add("", [family + 1] * length + [tail + 9] * 3, count)
        alone.run()
        assert together.output(str(i)) == alone.output("")


def test_answers_are_written_together(tiny_tokenizer: Tokenizer) -> None:
    simulation = Simulation(tiny_tokenizer, config())
    for i in range(4):
        simulation.add(str(i), [i + 1] * 10, 20)
    simulation.run()
    assert max(simulation.widths) == 4
    assert sum(simulation.widths) == 4 * 19


def order_of(simulation: Simulation, steps: int) -> list[str]:
    """What runs in the next steps: names of prompts, and `decode`."""
    order = []
    for _ in range(steps):
        before = len(simulation.chunks)
        simulation.step()
        order.append(simulation.chunks[-1].sequence.request.request_id if len(simulation.chunks) > before else "decode")
    return order


def test_prompts_take_turns_with_answers_and_short_ones_soon_get_through(tiny_tokenizer: Tokenizer) -> None:
    simulation = Simulation(tiny_tokenizer, config())
    simulation.add("writer", [1] * 5, 100)
    simulation.step()
    simulation.add("long", [2] * 200, 1)
    simulation.add("short", [3] * 20, 1)
    order = order_of(simulation, 12)
    assert order[::2] == ["decode"] * 6
    assert sorted(order[1:8:2]) == ["long", "long", "short", "short"]
    assert isinstance(simulation.events["short"][-1], Finished)


def test_a_long_prompt_has_half_of_the_time_however_many_short_ones_come(tiny_tokenizer: Tokenizer) -> None:
    simulation = Simulation(tiny_tokenizer, config())
    simulation.add("long", [2] * 160, 1)
    chunks = 0
    while not simulation.events["long"]:
        chunks += 1
        simulation.add(f"short {chunks}", [3, chunks, 5], 1)
        simulation.step()
    assert chunks <= 2 * 160 / 16


def test_of_equal_prompts_each_is_answered_before_the_next(tiny_tokenizer: Tokenizer) -> None:
    simulation = Simulation(tiny_tokenizer, config())
    for i in range(4):
        simulation.add(str(i), [i + 1] * 64, 1)
    order = [name for name in order_of(simulation, 16) if name != "decode"]
    assert order == sorted(order)


def test_chunks_shrink_to_what_a_step_may_be_delayed(tiny_tokenizer: Tokenizer) -> None:
    shape = SchedulerConfig(prefill_chunk=128, max_queue=9, max_running=4, num_rows=4, max_step_delay=0.1)
    simulation = Simulation(tiny_tokenizer, shape)
    simulation.add("first", [1] * 128, 100)
    simulation.step(seconds=0.4)  # 320 tokens a second, so 32 in a tenth of one
    simulation.add("second", [2] * 200, 1)
    while simulation.step(seconds=0.1) and "Finished" not in str(simulation.events["second"]):
        pass
    sizes = [len(chunk.token_ids) for chunk in simulation.chunks if chunk.sequence.request.request_id == "second"]
    assert sizes[0] == 32
    assert len(simulation.chunks[0].token_ids) == 128


def test_who_came_last_makes_way_and_still_gets_its_answer(tiny_tokenizer: Tokenizer) -> None:
    simulation = Simulation(tiny_tokenizer, config(kv_tokens=96, max_running=3, num_rows=3), context=96)
    for i in range(3):
        simulation.add(str(i), [i + 1] * 20, 40)
    simulation.run()
    assert [len(simulation.output(str(i))) for i in range(3)] == [40, 40, 40]
    again = [chunk for chunk in simulation.chunks if chunk.sequence.num_to_prefill > 20]
    assert again
    assert {chunk.sequence.request.request_id for chunk in again} <= {"1", "2"}


def test_the_lowest_priority_makes_way_first(tiny_tokenizer: Tokenizer) -> None:
    simulation = Simulation(tiny_tokenizer, config(kv_tokens=128, max_running=3, num_rows=3), context=96)
    for i, priority in enumerate((-1, 0, 0)):
        simulation.add(str(i), [i + 1] * 20, 40, priority=priority)
    simulation.run()
    again = [
        chunk.sequence.request.request_id for chunk in simulation.chunks if chunk.start + len(chunk.token_ids) > 20
    ]
    assert set(again) == {"0"}
    assert [len(simulation.output(str(i))) for i in range(3)] == [40, 40, 40]


def test_late_requests_leave_wherever_they_are(tiny_tokenizer: Tokenizer) -> None:
    simulation = Simulation(tiny_tokenizer, config(max_running=2))
    sequences = [simulation.add(str(i), [i + 1] * 40, 40) for i in range(4)]
    simulation.step()
    for sequence, deadline in zip(sequences, (5.0, None, 5.0, 9.0), strict=True):
        sequence.deadline = deadline
    assert simulation.scheduler.drop_late(4.9) == []
    late = simulation.scheduler.drop_late(5.0)
    assert late == [sequences[0], sequences[2]]
    simulation.run()
    assert [len(simulation.output(name)) for name in ("1", "3")] == [40, 40]
