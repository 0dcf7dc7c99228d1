"""What steps of several tokens cost beside a step of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from qwenonnx.engine.runner import ModelRunner

# Sizes that are measured, how often, and behind how many tokens.
_FEW, _MANY, _ROWS, _REPEATS, _PAST = 2, 9, 8, 5, 64

# Less is not believed: something else was running.
_LEAST_BASE, _LEAST_SLOPE = 1.05, 0.03


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Durations, in those of a step of one token for one row.

    A draft of n tokens takes `draft_base + draft_slope * n`, a step of n rows `1 + row_slope * (n - 1)`. The defaults
    are those of the int8 recipe on two cores with VNNI.
    """

    draft_base: float = 1.1
    draft_slope: float = 0.07
    row_slope: float = 0.15

    def draft(self, count: int) -> float:
        """A step that also runs a draft of so many tokens."""
        return self.draft_base + self.draft_slope * count if count else 1.0

    def rows(self, count: int) -> float:
        """A step of so many rows."""
        return 1.0 + self.row_slope * (count - 1)

    @classmethod
    def measured(cls, runner: ModelRunner) -> StepCosts:
        """Runs a few steps of each kind in turn and takes the quickest; the usual ones where the context is too short.

        Values are rounded, so that a model loaded again drafts as before. The rows of the cache are empty after it.
        """
        usual = cls()
        rows = min(_ROWS, runner.max_batch)
        if runner.context_length <= _PAST + _MANY:
            return usual
        runner.prefill(0, [0] * _PAST, 0)
        kinds: dict[str, Callable[[], object]] = {
            "one": partial(runner.decode, [0], [_PAST]),
            "few": partial(runner.score, [0] * (1 + _FEW), _PAST, 0),
            "many": partial(runner.score, [0] * (1 + _MANY), _PAST, 0),
        }
        if rows > 1:
            kinds["rows"] = partial(runner.decode, [0] * rows, [_PAST] + [0] * (rows - 1))
        seconds = {kind: min(times) for kind, times in _timed(kinds).items()}
        for slot in range(rows):
            runner.release_row(slot, 0)
        few, many = seconds["few"] / seconds["one"], seconds["many"] / seconds["one"]
        slope = max((many - few) / (_MANY - _FEW), _LEAST_SLOPE)
        row_slope = usual.row_slope
        if rows > 1:
            row_slope = max((seconds["rows"] / seconds["one"] - 1) / (rows - 1), _LEAST_SLOPE)
        return cls(
            draft_base=max(round(few - slope * _FEW, 1), _LEAST_BASE),
            draft_slope=round(slope, 2),
            row_slope=round(row_slope, 2),
        )


def _timed(kinds: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each kind of step, run in turn."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(_REPEATS):
        for kind, step in kinds.items():
            start = time.perf_counter()
            step()
            seconds[kind].append(time.perf_counter() - start)
    return seconds
