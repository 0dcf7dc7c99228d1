"""How prompts get on beside answers that are being written, and beside each other."""

from __future__ import annotations

from collections.abc import Sequence as List

from qwenonnx.engine.config import SchedulerConfig
from qwenonnx.engine.sequence import Sequence

# How much a new duration counts in the running means that estimates are made of.
_MEAN_WEIGHT = 0.2

# Where a step takes longer than the delay that is allowed, a chunk may take so many steps; or else prompts starve.
_STEPS_A_CHUNK = 1.5

# Chunks beside answers have a multiple of so many tokens, and twice as many at least.
_UNIT = 8


class PrefillPace:
    """Chooses whose prompt goes on, and by how many tokens.

    In turn, the prompt that came first goes on and the one that has least left. So a short prompt soon gets through
    beside long ones, the oldest one has half of the time at least, and of equal ones each ends before the next.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tokens_a_second = 0.0
        self._step_seconds = 0.0
        self._oldest_last = False

    def choose(self, prefilling: List[Sequence]) -> Sequence:
        """Whose prompt goes on; they are given in the order in which they came."""
        self._oldest_last = not self._oldest_last
        if self._oldest_last:
            return prefilling[0]
        return min(prefilling, key=lambda sequence: sequence.num_to_prefill - sequence.num_computed)

    def size(self, *, beside_answers: bool) -> int:
        """Tokens of the next chunk at most; beside answers as many as may hold these up."""
        size = self._config.prefill_chunk
        if beside_answers and self._tokens_a_second:
            delay = max(self._config.max_step_delay, _STEPS_A_CHUNK * self._step_seconds)
            bound = int(self._tokens_a_second * delay) // _UNIT * _UNIT
            size = min(size, max(bound, 2 * _UNIT))
        return size

    def chunk_took(self, count: int, seconds: float) -> None:
        """Notes how long a chunk of so many tokens took."""
        if seconds > 0:
            self._tokens_a_second = running_mean(self._tokens_a_second, count / seconds)

    def step_took(self, seconds: float) -> None:
        """Notes how long a step of all answers took."""
        if seconds > 0:
            self._step_seconds = running_mean(self._step_seconds, seconds)


def running_mean(mean: float, value: float) -> float:
    """A mean with a new value, which counts a fifth; the first one stands alone."""
    return mean + (_MEAN_WEIGHT if mean else 1.0) * (value - mean)
