"""A model that says what the test wrote down, for everything above the runtime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qwenonnx.errors import EngineError

Script = Sequence[int] | Callable[[tuple[int, ...]], Sequence[int]]
Fault = Exception | Literal["nan", "inf", "-inf"]


class ScriptedRunner:
    """Implements `ModelRunner`: greedy sampling yields the script, output token by output token.

    `script` is a list of ids or a function from the prompt to one; past its end the last id repeats. The
    prompt is what was in the row when the last prefill ended, so chunks and reused prefixes do not matter.

    `faults[i]` happens when output token `i` is due: an exception is raised, or the row is filled with that
    value. `delay` seconds pass in each call. `hold()` makes calls wait until `release()`; `entered` is set
    whenever a call has begun, and `cancel()` ends a held prefill with EngineError.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = 1000,
        num_slots: int = 1,
        context_length: int = 512,
        delay: float = 0.0,
        sharpness: float = 10.0,
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._context_length = context_length
        self._delay = delay
        self._sharpness = sharpness
        self._rows: list[list[int]] = [[] for _ in range(num_slots)]
        self._prompt_lengths = [0] * num_slots
        self._outputs: list[Sequence[int]] = [()] * num_slots
        self._gate = threading.Event()
        self._gate.set()
        self._prefilling = False
        self._cancelled = threading.Event()
        self.faults: dict[int, Fault] = dict(faults or {})
        self.entered = threading.Event()
        self.prefill_calls: list[tuple[int, tuple[int, ...], int]] = []
        self.decode_calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.num_cancels = 0
        self.score_calls: list[tuple[int, tuple[int, ...], int]] = []
        self.moves: list[tuple[str | int, ...]] = []

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def max_batch(self) -> int:
        return self._num_slots

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def hold(self) -> None:
        """Makes the following calls wait."""
        self.entered.clear()
        self._gate.clear()

    def release(self) -> None:
        """Lets waiting calls go on."""
        self._gate.set()

    def prefill(self, slot: int, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        if not token_ids:
            raise ValueError("empty prefill")
        self._write(slot, token_ids, start)
        self.prefill_calls.append((slot, tuple(token_ids), start))
        self._cancelled.clear()
        self._prefilling = True
        try:
            self._pass_time()
        finally:
            self._prefilling = False
        prompt = tuple(self._rows[slot])
        self._prompt_lengths[slot] = len(prompt)
        self._outputs[slot] = self._script(prompt) if callable(self._script) else self._script
        return self._logits(slot)

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        for slot, (token_id, start) in enumerate(zip(token_ids, starts, strict=True)):
            self._write(slot, (token_id,), start)
        self.decode_calls.append((tuple(token_ids), tuple(starts)))
        self._pass_time()
        return np.stack([self._logits(slot) for slot in range(len(token_ids))])

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        if start == 0 or start < self._prompt_lengths[slot]:  # a prompt
            rows = [np.full(self._vocab_size, float(token_id % 7), dtype=np.float32) for token_id in token_ids]
            rows[-1] = self.prefill(slot, token_ids, start)
            return np.stack(rows)
        self.score_calls.append((slot, tuple(token_ids), start))
        rows = []
        for at, token_id in enumerate(token_ids):
            self._write(slot, (token_id,), start + at)
            rows.append(self._logits(slot))
        return np.stack(rows)

    def copy_row(self, source: int, target: int, length: int) -> None:
        if length > len(self._rows[source]):
            raise ValueError(f"{length} tokens of a row of {len(self._rows[source])}")
        self._rows[target] = self._rows[source][:length]
        self.moves.append(("copy", source, target, length))

    def swap_rows(self, first: int, second: int, first_length: int, second_length: int) -> None:
        if len(self._rows[first]) < first_length or len(self._rows[second]) < second_length:
            raise ValueError("rows hold less than is to be exchanged")
        lists: tuple[list[Any], ...] = (self._rows, self._prompt_lengths, self._outputs)
        for values in lists:
            values[first], values[second] = values[second], values[first]
        del self._rows[first][second_length:], self._rows[second][first_length:]
        self.moves.append(("swap", first, second, first_length, second_length))

    def release_row(self, slot: int, keep: int) -> None:
        del self._rows[slot][keep:]

    def cancel(self) -> None:
        self.num_cancels += 1
        if self._prefilling:
            self._cancelled.set()

    def _write(self, slot: int, token_ids: Sequence[int], start: int) -> None:
        row = self._rows[slot]
        if start > len(row):
            raise ValueError(f"position {start} of slot {slot}, but only {len(row)} were written")
        if start + len(token_ids) > self._context_length:
            raise ValueError(f"position {start + len(token_ids)} is outside of the context")
        row[start:] = token_ids

    def _pass_time(self) -> None:
        self.entered.set()
        if self._delay:
            time.sleep(self._delay)
        while not self._gate.wait(0.002):
            if self._cancelled.is_set():
                break
        if self._cancelled.is_set():
            self._cancelled.clear()
            raise EngineError("the prefill was cancelled")

    def _logits(self, slot: int) -> NDArray[np.float32]:
        index = len(self._rows[slot]) - self._prompt_lengths[slot]
        fault = self.faults.get(index)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return np.full(self._vocab_size, float(fault), dtype=np.float32)
        logits = np.zeros(self._vocab_size, dtype=np.float32)
        script = self._outputs[slot]
        logits[script[min(index, len(script) - 1)]] = self._sharpness
        return logits
