"""Which request runs next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from qwenonnx.engine.kv_row import SMALLEST_CHUNK, KVRow
from qwenonnx.engine.sequence import Sequence
from qwenonnx.errors import QueueFullError

_MAX_RUNNING = 1

# How much a new duration counts in the running mean that the retry estimate is made of.
_MEAN_WEIGHT = 0.2

_RETRY_LIMITS = (1.0, 60.0)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of one prompt to run; after the `is_last` one, its logits yield the first token."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    start: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.start + len(self.token_ids) == self.sequence.num_prompt


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token each to run for sequences in slots 0, 1, and so on."""

    sequences: tuple[Sequence, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The newest token of each sequence."""
        return tuple(sequence.token_ids[-1] for sequence in self.sequences)

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each of these tokens."""
        return tuple(sequence.num_computed for sequence in self.sequences)


Step = PrefillChunk | DecodeStep


class Scheduler:
    """First come, first served; one request runs at a time, the others wait in a bounded queue.

    Not thread-safe: the engine guards it. Prompts run in chunks of `prefill_chunk` tokens, so that a
    cancellation never waits for more than one chunk.
    """

    def __init__(self, *, prefill_chunk: int, max_queue: int) -> None:
        self._prefill_chunk = prefill_chunk
        self._max_queue = max_queue
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._row = KVRow()
        self._mean_seconds = _RETRY_LIMITS[0]

    @property
    def num_running(self) -> int:
        """Requests that have a row of the cache."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, without those that were cancelled there."""
        return sum(not sequence.cancel_requested for sequence in self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to run or to drop."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Puts a request at the end of the queue.

        Raises:
            QueueFullError: `max_queue` requests wait already; carries an estimate of when a place gets free.
        """
        waiting = self.num_waiting
        if waiting >= self._max_queue + _MAX_RUNNING - len(self._running):
            low, high = _RETRY_LIMITS
            raise QueueFullError(
                f"{waiting} requests are waiting already; try again later.",
                retry_after=min(max(self._mean_seconds, low), high),
            )
        self._waiting.append(sequence)

    def drop_cancelled(self) -> list[Sequence]:
        """Takes out and returns all requests whose cancellation was asked for."""
        dropped = [s for s in (*self._running, *self._waiting) if s.cancel_requested]
        for sequence in dropped:
            self.remove(sequence)
        return dropped

    def drop_all(self) -> tuple[list[Sequence], list[Sequence]]:
        """Takes out everything; returns the running and the waiting requests."""
        running, waiting = self._running, list(self._waiting)
        self._running, self._waiting = [], deque()
        return running, waiting

    def remove(self, sequence: Sequence) -> None:
        """Takes out a request that has ended; its tokens stay in the cache for the next one."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._mean_seconds += _MEAN_WEIGHT * (sequence.service_seconds - self._mean_seconds)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def schedule(self) -> Step | None:
        """The next piece of work; None when there is none. The cache holds it only once `computed` is told."""
        if self._waiting and len(self._running) < _MAX_RUNNING:
            sequence = self._waiting.popleft()
            sequence.admit(slot=len(self._running), num_cached=self._row.reuse(sequence.request.prompt_ids))
            self._running.append(sequence)
        if not self._running:
            return None
        sequence = self._running[0]
        start = sequence.num_computed
        if sequence.is_prefilling:
            end = min(start + self._prefill_chunk, sequence.num_prompt)
            if sequence.num_prompt - end < SMALLEST_CHUNK:
                end = sequence.num_prompt  # no chunk of its own for the last token
            return PrefillChunk(sequence, tuple(sequence.request.prompt_ids[start:end]), start)
        return DecodeStep((sequence,))

    def computed(self, step: Step) -> None:
        """Notes that a step has run without fault."""
        if isinstance(step, PrefillChunk):
            self._row.extend(step.token_ids)
            step.sequence.num_computed += len(step.token_ids)
            return
        self._row.extend(step.token_ids)
        for sequence in step.sequences:
            sequence.num_computed += 1
