"""What runs next: which requests have a row of the cache, and whether a prompt or the running answers go on."""

from __future__ import annotations

from dataclasses import dataclass

from qwenonnx.engine.config import SchedulerConfig
from qwenonnx.engine.prefill_pace import PrefillPace, running_mean
from qwenonnx.engine.rows import RowMove, Rows, chunk_end
from qwenonnx.engine.sequence import Sequence
from qwenonnx.engine.waiting_line import WaitingLine


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of one prompt to run; after the `is_last` one, its logits yield the first token."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    start: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.start + len(self.token_ids) == self.sequence.num_to_prefill


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


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """The newest token of one sequence and a draft of what may follow, to run at once."""

    sequence: Sequence
    draft: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The newest token and the draft."""
        return (self.sequence.token_ids[-1], *self.draft)

    @property
    def start(self) -> int:
        """The position of the newest token."""
        return self.sequence.num_computed


Step = PrefillChunk | DecodeStep | VerifyStep


class Scheduler:
    """First come, first served; whoever has a row runs, prompts in turns with the answers that are being written.

    Higher priorities leave the queue first. Answers are written in rows 0 to n - 1, in one step for all of them.
    Prompts are read in any row behind those, chunk by chunk. Where the memory of the cache runs out, rows that nobody
    uses are emptied, and then the request that came last has to start again later, with the tokens it has.

    Not thread-safe: the engine guards it. Nothing here looks at a clock: `computed` is told how long steps take.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._waiting = WaitingLine(config.max_queue)
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._rows = Rows(config.num_rows, config.kv_tokens)
        self._prefilled_last = False
        self._drafted_last = False
        self._pace = PrefillPace(config)
        self._mean_seconds = 1.0

    @property
    def max_running(self) -> int:
        """Requests that can have a row at once."""
        return self._config.max_running

    @property
    def num_running(self) -> int:
        """Requests that have a row of the cache."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, without those that were cancelled there."""
        return len(self._waiting)

    @property
    def rows(self) -> Rows:
        """What the rows of the cache hold; while a request has a row, only the scheduler may change it."""
        return self._rows

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values take memory, those of ended requests included."""
        return self._rows.touched

    @property
    def has_work(self) -> bool:
        """Whether there is anything to run or to drop."""
        return bool(self._decoding or self._prefilling or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Puts a request into the queue, behind those of its priority.

        Raises:
            QueueFullError: `max_queue` requests wait already; carries an estimate of when a place gets free.
        """
        seconds = self._mean_seconds / max(self.num_running, 1)
        self._waiting.add(sequence, free=self._config.max_running - self.num_running, seconds=seconds)

    def drop_cancelled(self) -> list[Sequence]:
        """Takes out and returns all requests whose cancellation was asked for."""
        dropped = [s for s in (*self._decoding, *self._prefilling, *self._waiting) if s.cancel_requested]
        for sequence in dropped:
            self.remove(sequence)
        return dropped

    def drop_late(self, now: float) -> list[Sequence]:
        """Takes out and returns all requests whose deadline has passed."""
        everyone = (*self._decoding, *self._prefilling, *self._waiting)
        late = [sequence for sequence in everyone if sequence.deadline is not None and sequence.deadline <= now]
        for sequence in late:
            self.remove(sequence)
        return late

    def drop_all(self) -> tuple[list[Sequence], list[Sequence]]:
        """Takes out everything; returns the running and the waiting requests."""
        running = [*self._decoding, *self._prefilling]
        self._decoding, self._prefilling = [], []
        return running, self._waiting.clear()

    def remove(self, sequence: Sequence) -> None:
        """Takes out a request that has ended; its tokens stay in the cache for others."""
        if not self._waiting.remove(sequence) and self._leave_row(sequence):
            self._mean_seconds = running_mean(self._mean_seconds, sequence.service_seconds)

    def schedule(self) -> Step | None:
        """The next piece of work; None when there is none. The cache holds it only once `computed` is told.

        What `take_moves` yields has to be done before it.
        """
        self._promote()
        while self._admit():
            pass
        if self._prefilling and not (self._decoding and self._prefilled_last):
            self._prefilled_last = True
            return self._next_chunk()
        self._prefilled_last = False
        self._make_room()
        step = self._next_draft()
        if step is not None:
            return step
        return DecodeStep(tuple(self._decoding)) if self._decoding else None

    def take_moves(self) -> list[RowMove]:
        """What has to be done with the cache's memory before the next step, in this order."""
        return self._rows.take_moves()

    def verified(self, step: VerifyStep, right: int) -> None:
        """Notes that a draft has run, and how much of it the answer goes on with."""
        self._rows[step.sequence.slot].token_ids += step.token_ids[: 1 + right]
        step.sequence.num_computed += 1 + right

    def computed(self, step: PrefillChunk | DecodeStep, seconds: float = 0.0) -> None:
        """Notes that a step has run without fault, and how long it took."""
        if isinstance(step, PrefillChunk):
            sequence = step.sequence
            self._rows[sequence.slot].token_ids += step.token_ids
            sequence.num_computed += len(step.token_ids)
            self._pace.chunk_took(len(step.token_ids), seconds)
            return
        self._pace.step_took(seconds)
        for sequence, token_id in zip(step.sequences, step.token_ids, strict=True):
            self._rows[sequence.slot].token_ids.append(token_id)
            sequence.num_computed += 1

    def _admit(self) -> bool:
        """Gives the first in the queue a row, if there is one with room for its prompt."""
        if not self._waiting or self.num_running >= self._config.max_running:
            return False
        sequence = self._waiting.first
        place = self._rows.place(
            sequence.token_ids[: sequence.num_to_prefill],
            reserve=sequence.num_to_prefill + 1,
            busy=self._busy(),
            fresh=sequence.wants_prompt_logits,
        )
        if place is None:
            return False
        self._waiting.remove(sequence)
        sequence.admit(*place)
        self._prefilling.append(sequence)
        return True

    def _promote(self) -> None:
        """Moves sequences whose prompt has run behind the rows that are being written."""
        for sequence in [sequence for sequence in self._prefilling if not sequence.is_prefilling]:
            self._prefilling.remove(sequence)
            self._decoding.append(sequence)
            self._swap(sequence.slot, len(self._decoding) - 1)

    def _next_chunk(self) -> PrefillChunk:
        sequence = self._pace.choose(self._prefilling)
        size = self._pace.size(beside_answers=bool(self._decoding))
        start = sequence.num_computed
        end = chunk_end(start, size, sequence.num_to_prefill)
        return PrefillChunk(sequence, tuple(sequence.token_ids[start:end]), start)

    def _next_draft(self) -> VerifyStep | None:
        """A draft for one answer, where it promises more tokens by time than a step of all; then all have a step.

        Where prompts make several answers wait already, there is none.
        """
        count = len(self._decoding)
        if not self._config.speculate or (count > 1 and (self._drafted_last or self._prefilling)):
            self._drafted_last = False
            return None
        for sequence in sorted(self._decoding, key=lambda sequence: sequence.num_drafts):
            draft = sequence.draft(self._config.costs, rate=count / self._config.costs.rows(count))
            if draft and self._rows.grow([sequence.slot], 1 + len(draft), busy=self._busy()):
                self._drafted_last = True
                return VerifyStep(sequence, draft)
        return None

    def _make_room(self) -> None:
        """Sees to it that each answer has room for one more token; who came last makes way if need be."""
        while self._decoding and not self._rows.grow(range(len(self._decoding)), busy=self._busy()):
            everyone = (*self._decoding, *self._prefilling)
            last = max(everyone, key=lambda sequence: (-sequence.request.priority, sequence.order))
            self._leave_row(last)
            self._rows.release(last.slot)
            last.preempt()
            self._waiting.put_back(last)

    def _leave_row(self, sequence: Sequence) -> bool:
        """Makes a sequence's row idle; False if it has none."""
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        elif sequence in self._decoding:
            last = len(self._decoding) - 1
            self._swap(sequence.slot, last)
            self._decoding.remove(sequence)
            sequence.slot = last
        else:
            return False
        self._rows.use(sequence.slot)
        self._rows.trim(sequence.slot)
        return True

    def _swap(self, first: int, second: int) -> None:
        if first == second:
            return
        self._rows.swap(first, second)
        other = {first: second, second: first}
        for sequence in (*self._decoding, *self._prefilling):
            sequence.slot = other.get(sequence.slot, sequence.slot)
        self._decoding.sort(key=lambda sequence: sequence.slot)

    def _busy(self) -> set[int]:
        return {sequence.slot for sequence in (*self._decoding, *self._prefilling)}
