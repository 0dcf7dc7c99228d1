from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scripted import ScriptedRunner

from qwenonnx.engine.step_costs import StepCosts


class TimedRunner(ScriptedRunner):
    """Moves a clock as steps are run."""

    def __init__(self, *, draft: Callable[[int], float], rows: Callable[[int], float], slots: int = 8) -> None:
        super().__init__([1], num_slots=slots)
        self.draft, self.rows = draft, rows
        self.now = 0.0
        self.released: list[tuple[int, int]] = []

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        self.now += self.rows(len(token_ids))
        return np.zeros((len(token_ids), self.vocab_size), dtype=np.float32)

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        self.now += self.draft(len(token_ids) - 1)
        return np.zeros((len(token_ids), self.vocab_size), dtype=np.float32)

    def release_row(self, slot: int, keep: int) -> None:
        self.released.append((slot, keep))


def measured(monkeypatch: pytest.MonkeyPatch, runner: TimedRunner) -> StepCosts:
    monkeypatch.setattr(time, "perf_counter", lambda: runner.now)
    return StepCosts.measured(runner)


def test_what_a_runner_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TimedRunner(draft=lambda n: 0.02 * (1.2 + 0.08 * n), rows=lambda n: 0.02 * (1 + 0.25 * (n - 1)))
    assert measured(monkeypatch, runner) == StepCosts(draft_base=1.2, draft_slope=0.08, row_slope=0.25)


def test_a_runner_that_scores_token_by_token_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured(monkeypatch, TimedRunner(draft=lambda n: 0.02 * (1 + n), rows=lambda n: 0.02 * n))
    assert costs == StepCosts(draft_base=1.05, draft_slope=1.0, row_slope=1.0)


def test_what_cannot_be_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured(monkeypatch, TimedRunner(draft=lambda n: 0.5, rows=lambda n: 1.0 / n))
    assert costs == StepCosts(draft_base=1.05, draft_slope=0.03, row_slope=0.03)


def test_one_row_has_no_cost_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured(monkeypatch, TimedRunner(draft=lambda n: 1.0, rows=lambda n: 1.0, slots=1))
    assert costs.row_slope == StepCosts().row_slope


def test_a_context_without_room_has_the_usual_costs() -> None:
    runner = ScriptedRunner([1], context_length=32)
    assert StepCosts.measured(runner) == StepCosts()
    assert not runner.decode_calls


def test_costs_are_in_steps_of_one_token() -> None:
    costs = StepCosts(draft_base=1.1, draft_slope=0.1, row_slope=0.5)
    assert [costs.draft(0), costs.draft(1), costs.draft(9)] == pytest.approx([1.0, 1.2, 2.0])
    assert [costs.rows(1), costs.rows(3)] == [1.0, 2.0]


def test_rows_are_empty_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TimedRunner(draft=lambda n: 1.0 + n, rows=lambda n: float(n), slots=3)
    measured(monkeypatch, runner)
    assert runner.released == [(0, 0), (1, 0), (2, 0)]
