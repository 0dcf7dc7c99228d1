"""Measuring a model through the engine: the same events that the server and the terminal consume."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from qwenonnx.bench.prompts import token_ids
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Failed, GenerationRequest
from qwenonnx.files import Progress


@dataclass(frozen=True, slots=True)
class Workload:
    """What to run: prompt lengths, tokens to generate after each, and how often (medians are reported)."""

    prompt_lengths: tuple[int, ...] = (40, 512)
    new_tokens: int = 128
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians over the repeats for one prompt length.

    `ttft` is the time from submitting to the first token in seconds, `prefill_rate` prompt tokens per second until
    then, `decode_rate` tokens per second after it, `itl_p50` and `itl_p95` the inter-token latency in seconds.
    """

    prompt_tokens: int
    new_tokens: int
    ttft: float
    prefill_rate: float
    decode_rate: float
    itl_p50: float
    itl_p95: float


def measure(engine: Engine, vocabulary: int, workload: Workload, progress: Progress | None = None) -> list[Measurement]:
    """Runs the workload, lengths in turn within each repeat so that drift of the machine hits all alike.

    Raises:
        QwenonnxError: a request failed.
    """
    runs: dict[int, list[list[float]]] = {length: [] for length in workload.prompt_lengths}
    total = len(runs) * (workload.repeats + 1)
    done = 0
    for repeat in range(workload.repeats + 1):
        for length in runs:
            prompt = token_ids(length, vocabulary, seed=1 + repeat * 1000 + length)
            times = _token_times(engine, prompt, workload.new_tokens)
            if repeat:  # the first round warms up
                runs[length].append(times)
            done += 1
            if progress is not None:
                progress(done, total)
    return [_summary(length, times) for length, times in runs.items()]


def _token_times(engine: Engine, prompt: Sequence[int], new_tokens: int) -> list[float]:
    """Seconds from submitting to each token."""
    request = GenerationRequest(tuple(prompt), max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    times: list[float] = []
    with engine.generate(request) as events:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                times += [time.perf_counter() - start] * len(event.token_ids)
    return times


def _summary(length: int, runs: Sequence[Sequence[float]]) -> Measurement:
    ttft = statistics.median(run[0] for run in runs)
    gaps = sorted(later - earlier for run in runs for earlier, later in itertools.pairwise(run))
    return Measurement(
        prompt_tokens=length,
        new_tokens=len(runs[0]),
        ttft=ttft,
        prefill_rate=length / ttft,
        decode_rate=statistics.median((len(run) - 1) / (run[-1] - run[0]) for run in runs),
        itl_p50=statistics.median(gaps),
        itl_p95=gaps[int(0.95 * (len(gaps) - 1))],
    )
