"""Running the scheduler's steps on the model."""

from __future__ import annotations

import itertools
import logging
import threading

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.rows import SMALLEST_CHUNK, RowMove
from qwenonnx.engine.runner import ModelRunner
from qwenonnx.engine.scheduler import DecodeStep, PrefillChunk, VerifyStep
from qwenonnx.engine.sequence import Sequence
from qwenonnx.errors import EngineError

logger = logging.getLogger(__name__)

# Tokens of a prompt whose logits are held at once, where they are asked for: 39 MB.
_SCORED_AT_ONCE = 64


class StepRunner:
    """Runs moves of rows, chunks of prompts and steps of answers; a chunk can be interrupted from other threads."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        # Guards that a cancellation interrupts the prefill of its own request only.
        self._lock = threading.RLock()
        self._prefilling: Sequence | None = None

    def interrupt(self, sequence: Sequence | None = None) -> None:
        """Ends a chunk of this sequence, or of any, that is under way; it raises EngineError."""
        with self._lock:
            if self._prefilling is not None and sequence in (None, self._prefilling):
                self._runner.cancel()

    def move(self, move: RowMove) -> None:
        """Copies, exchanges or gives back memory of the cache."""
        if move.kind == "swap":
            self._runner.swap_rows(move.source, move.target, *move.lengths)
        elif move.kind == "copy":
            self._runner.copy_row(move.source, move.target, move.lengths[0])
        else:
            self._runner.release_row(move.source, move.lengths[0])

    def release(self, slot: int) -> None:
        """Gives all memory of a row back."""
        self._runner.release_row(slot, 0)

    def run(self, slot: int, token_ids: list[int], start: int) -> None:
        """Runs tokens for the sake of their keys and values."""
        self._runner.prefill(slot, token_ids, start)

    def prefill(self, chunk: PrefillChunk) -> NDArray[np.float32]:
        """Runs a chunk; returns the logits `[vocab]` of its last token, and tells the sequence all if it wants them."""
        with self._lock:
            self._prefilling = chunk.sequence
        try:
            if chunk.sequence.wants_prompt_logits:
                return self._score(chunk)
            return self._runner.prefill(chunk.sequence.slot, chunk.token_ids, chunk.start)
        finally:
            with self._lock:
                self._prefilling = None

    def decode(self, step: DecodeStep) -> list[NDArray[np.float32] | EngineError]:
        """The logits `[vocab]` of each row, or why there are none: a step that fails is tried again row by row.

        Raises:
            EngineError: the step failed, and there is only one row.
        """
        try:
            return list(self._runner.decode(step.token_ids, step.starts))
        except EngineError as error:
            if len(step.sequences) == 1:
                raise
            logger.warning("a step for %d requests failed (%s); they run one by one", len(step.sequences), error)
        rows: list[NDArray[np.float32] | EngineError] = []
        for sequence, token_id, start in zip(step.sequences, step.token_ids, step.starts, strict=True):
            try:
                rows.append(self._runner.prefill(sequence.slot, [token_id], start).copy())
            except EngineError as error:
                rows.append(error)
        return rows

    def verify(self, step: VerifyStep) -> NDArray[np.float32]:
        """Runs the newest token and a draft; returns the logits `[1 + draft, vocab]`."""
        return self._runner.score(step.token_ids, step.start, step.sequence.slot)

    def _score(self, chunk: PrefillChunk) -> NDArray[np.float32]:
        """Runs a chunk for the logits of all its tokens; returns those of the last one."""
        bounds = [*range(0, len(chunk.token_ids), _SCORED_AT_ONCE), len(chunk.token_ids)]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] < SMALLEST_CHUNK:
            del bounds[-2]
        for start, end in itertools.pairwise(bounds):
            logits = self._runner.score(chunk.token_ids[start:end], chunk.start + start, chunk.sequence.slot)
            chunk.sequence.add_prompt_logits(logits)
        last: NDArray[np.float32] = logits[-1]
        return last
