"""Measures what choosing a token costs: for rows of 151,936 logits, by the parameters that are asked for.

Usage: python scripts/bench_sampler.py [--rows 16] [--repeats 60]

Rows are normal noise of deviation 3 with some likely tokens, which is flatter than most of what the model says. The
prompt that is penalized has 500 tokens. Processor time of one thread is measured, in milliseconds a token. At the end
stands what taking the highest logits of all rows costs, in one call and row by row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.logprobs import token_logprobs
from qwenonnx.engine.sampler import Sampler
from qwenonnx.engine.sampling import SamplingParams

VOCAB, TOKENS = 151_936, 151_665
CASES = {
    "greedy": SamplingParams(),
    "greedy, repetition penalty": SamplingParams(repetition_penalty=1.1),
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p 0.8": SamplingParams(temperature=0.7, top_p=0.8),
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "top-p 0.99, temperature 2": SamplingParams(temperature=2.0, top_p=0.99),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "top-k 20, top-p 0.8, repetition": SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1),
    "top-p 0.95, all penalties": SamplingParams(
        temperature=0.7, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
}


def some_logits(rows: int, seed: int) -> NDArray[np.float32]:
    """Rows `[rows, vocab]`."""
    generator = np.random.default_rng(seed)
    logits = (3 * generator.standard_normal((rows, VOCAB))).astype(np.float32)
    for row in logits:
        row[generator.integers(0, TOKENS, 20)] += generator.uniform(5, 15, 20).astype(np.float32)
    return logits


def milliseconds(work: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Median and least of one call."""
    times = []
    for repeat in range(repeats + 3):
        began = time.thread_time()
        work(repeat)
        if repeat >= 3:
            times.append(1e3 * (time.thread_time() - began))
    return statistics.median(times), min(times)


def main() -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    logits = some_logits(arguments.rows, 0)
    prompt = np.random.default_rng(1).integers(0, TOKENS, 500).tolist()
    print(f"{'a token':34} median   least")
    for name, params in CASES.items():
        sampler = Sampler(params, prompt, num_tokens=TOKENS)
        median, least = milliseconds(lambda i, s=sampler: s.sample(logits[i % len(logits)]), arguments.repeats)  # type: ignore[misc]
        print(f"{name:34} {median:6.3f}  {least:6.3f}")
    median, least = milliseconds(lambda i: token_logprobs(logits[i % len(logits)], 5, 20), arguments.repeats)
    print(f"{'20 log-probabilities':34} {median:6.3f}  {least:6.3f}")
    print(f"{arguments.rows} rows")
    for name, work in {
        "highest logits, one call": lambda _: logits[:, :TOKENS].argmax(axis=1),
        "highest logits, row by row": lambda _: [int(row[:TOKENS].argmax()) for row in logits],
    }.items():
        median, least = milliseconds(work, arguments.repeats)
        print(f"{name:34} {median:6.3f}  {least:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
