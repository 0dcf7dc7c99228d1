"""How fast many answers are written together, and how evenly while long prompts arrive."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from qwenonnx.bench.jobs import Job, greedy, percentile, run_together
from qwenonnx.bench.prompts import token_ids
from qwenonnx.engine.engine import Engine
from qwenonnx.files import Progress


@dataclass(frozen=True, slots=True)
class StreamsMeasurement:
    """Medians over the repeats; rates are of all streams together, in tokens per second.

    `decode_rate` counts from the moment when all streams have a token until the first one has all of its, `whole_rate`
    the whole time, prompts included. Latencies are seconds, over all streams. `decode_rate` is None if the first stream
    ended before the last one began.
    """

    streams: int
    prompt_tokens: int
    new_tokens: int
    decode_rate: float | None
    whole_rate: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float


@dataclass(frozen=True, slots=True)
class Interference:
    """What long prompts do to answers that are being written: inter-token latencies in seconds, alone and beside.

    `long_ttft` is None if no prompt was through before the answers ended.
    """

    streams: int
    prompt_tokens: int
    itl_p95_alone: float
    itl_p95_beside: float
    itl_max_beside: float
    long_ttft: float | None


def measure_streams(
    engine: Engine,
    vocabulary: int,
    streams: Sequence[int],
    *,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    progress: Progress | None = None,
) -> list[StreamsMeasurement]:
    """Runs so many equal requests at once, numbers of streams in turn within each repeat.

    Raises:
        QwenonnxError: a request failed.
    """
    runs: dict[int, list[list[Job]]] = {count: [] for count in streams}
    for repeat in range(repeats + 1):
        for done, count in enumerate(runs):
            prompts = [
                token_ids(prompt_tokens, vocabulary, seed=10_000 * repeat + 100 * count + i) for i in range(count)
            ]
            jobs = run_together(engine, [greedy(prompt, new_tokens if repeat else 2) for prompt in prompts])
            if repeat:  # the first round warms up
                runs[count].append(jobs)
            if progress is not None:
                progress(repeat * len(runs) + done + 1, len(runs) * (repeats + 1))
    return [_summary(prompt_tokens, new_tokens, runs[count]) for count in runs]


def measure_interference(
    engine: Engine, vocabulary: int, *, streams: int, prompt_tokens: int, new_tokens: int
) -> Interference:
    """Lets some answers be written alone, then again while prompts of `prompt_tokens` arrive one after the other.

    Raises:
        QwenonnxError: a request failed.
    """
    alone = run_together(engine, [greedy(token_ids(64, vocabulary, seed=i), new_tokens) for i in range(streams)])
    writers = [Job(greedy(token_ids(64, vocabulary, seed=500 + i), new_tokens)) for i in range(streams)]
    for writer in writers:
        writer.start(engine)
    waits: list[float] = []
    pause = threading.Event()
    while not all(len(writer.times) > 1 for writer in writers):
        pause.wait(0.01)
    begun = [len(writer.times) for writer in writers]
    seed = 900
    while True:
        long = Job(greedy(token_ids(prompt_tokens, vocabulary, seed=seed), 1))
        ticket = long.start(engine)
        while not long.ended.is_set() and not all(writer.ended.is_set() for writer in writers):
            pause.wait(0.01)
        if not long.ended.is_set():
            ticket.cancel()
            break
        long.wait()
        waits.append(long.times[0])
        seed += 1
    for writer in writers:
        writer.wait()
    beside = [gap for writer, first in zip(writers, begun, strict=True) for gap in writer.gaps[first:] or writer.gaps]
    return Interference(
        streams,
        prompt_tokens,
        itl_p95_alone=percentile([gap for job in alone for gap in job.gaps[_settled(alone) :] or job.gaps], 0.95),
        itl_p95_beside=percentile(beside, 0.95),
        itl_max_beside=max(beside),
        long_ttft=statistics.median(waits) if waits else None,
    )


def _settled(jobs: Sequence[Job]) -> int:
    """Tokens of the first job until all the others have one."""
    begun = max(job.submitted + job.times[0] for job in jobs)
    return max(sum(job.submitted + moment <= begun for moment in job.times) for job in jobs)


def _summary(prompt_tokens: int, new_tokens: int, runs: Sequence[Sequence[Job]]) -> StreamsMeasurement:
    jobs = [job for run in runs for job in run]
    first_tokens = [job.times[0] for job in jobs]
    gaps = [gap for job in jobs for gap in job.gaps]
    rates = [rate for run in runs if (rate := _decode_rate(run)) is not None]
    return StreamsMeasurement(
        streams=len(runs[0]),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        decode_rate=statistics.median(rates) if len(rates) == len(runs) else None,
        whole_rate=statistics.median(_whole_rate(run) for run in runs),
        ttft_p50=percentile(first_tokens, 0.5),
        ttft_p95=percentile(first_tokens, 0.95),
        itl_p50=percentile(gaps, 0.5),
        itl_p95=percentile(gaps, 0.95),
    )


def _decode_rate(jobs: Sequence[Job]) -> float | None:
    moments = [[job.submitted + moment for moment in job.times] for job in jobs]
    begin, end = max(times[0] for times in moments), min(times[-1] for times in moments)
    count = sum(begin < moment <= end for times in moments for moment in times)
    return count / (end - begin) if end > begin else None


def _whole_rate(jobs: Sequence[Job]) -> float:
    begin = min(job.submitted for job in jobs)
    end = max(job.submitted + job.times[-1] for job in jobs)
    return sum(len(job.times) for job in jobs) / (end - begin)
