"""How long the next turn of a growing conversation waits for its first token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from qwenonnx.bench.jobs import greedy, run_together
from qwenonnx.bench.prompts import token_ids
from qwenonnx.engine.engine import Engine
from qwenonnx.files import Progress


@dataclass(frozen=True, slots=True)
class TurnMeasurement:
    """A turn: tokens of the whole prompt, those of them that were in the cache, and the median `ttft` in seconds."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft: float


def measure_turns(
    engine: Engine,
    vocabulary: int,
    *,
    turns: int,
    turn_tokens: int,
    new_tokens: int,
    repeats: int,
    progress: Progress | None = None,
) -> list[TurnMeasurement]:
    """Runs conversations one after the other, each turn with everything before it and `turn_tokens` new tokens.

    Raises:
        QwenonnxError: a request failed.
    """
    runs: list[list[TurnMeasurement]] = []
    for repeat in range(repeats + 1):
        prompt: list[int] = []
        run: list[TurnMeasurement] = []
        for turn in range(turns):
            prompt = prompt + token_ids(turn_tokens, vocabulary, seed=1000 * repeat + turn)
            (job,) = run_together(engine, [greedy(prompt, new_tokens)])
            usage = job.wait().usage
            run.append(TurnMeasurement(turn + 1, usage.prompt_tokens, usage.cached_tokens, job.times[0]))
            prompt = prompt + job.token_ids
            if progress is not None:
                progress(repeat * turns + turn + 1, (repeats + 1) * turns)
        if repeat:  # the first round warms up
            runs.append(run)
    return [_median(same) for same in zip(*runs, strict=True)]


def _median(measured: Sequence[TurnMeasurement]) -> TurnMeasurement:
    first = measured[0]
    ttft = statistics.median(entry.ttft for entry in measured)
    return TurnMeasurement(first.turn, first.prompt_tokens, first.cached_tokens, ttft)
