"""What prompt lookup gains where an answer repeats its prompt, and costs where it does not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from qwenonnx.bench.jobs import Job
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import GenerationRequest
from qwenonnx.files import Progress
from qwenonnx.text.chat_template import ChatTemplate

_LINES = 60
_COPY = "Rename the class `Job` to `Work` in this file. Answer with all of it.\n```python\n{}\n```"
_FREE = "Write a short story about a lighthouse keeper who finds a letter in a bottle."


@dataclass(frozen=True, slots=True)
class CopyMeasurement:
    """Rates in tokens per second after the first one, medians, without and with prompt lookup.

    `ratio` is the median of the ratios of runs that followed each other, and `same` whether all answers were equal.
    """

    task: str
    tokens: int
    rate_without: float
    rate_with: float
    ratio: float
    same: bool


def measure_copying(
    engine: Callable[[bool], Engine],
    template: ChatTemplate,
    *,
    new_tokens: int,
    repeats: int,
    progress: Progress | None = None,
) -> list[CopyMeasurement]:
    """Runs an edit of a file and free text, without and with prompt lookup in turn.

    `engine` makes an engine, not started, with an empty cache, that runs ahead or does not.

    Raises:
        QwenonnxError: a request failed.
    """
    file = "\n".join((resources.files("qwenonnx.bench") / "jobs.py").read_text("utf-8").splitlines()[:_LINES])
    tasks = {"edit of a file": (_COPY.format(file), 4 * new_tokens), "free text": (_FREE, new_tokens)}
    results = []
    for place, (name, (text, count)) in enumerate(tasks.items()):
        prompt = tuple(template.encode([{"role": "user", "content": text}]))
        request = GenerationRequest(prompt, max_tokens=count)
        pairs = []
        for repeat in range(repeats):
            pairs.append((_run(engine(False), request), _run(engine(True), request)))
            if progress is not None:
                progress(place * repeats + repeat + 1, len(tasks) * repeats)
        results.append(_summary(name, pairs))
    return results


def _run(engine: Engine, request: GenerationRequest) -> Job:
    job = Job(request)
    engine.start()
    try:
        job.start(engine)
        job.wait()
    finally:
        engine.close()
    return job


def _rate(job: Job) -> float:
    return (len(job.times) - 1) / (job.times[-1] - job.times[0]) if len(job.times) > 1 else float("nan")


def _summary(name: str, pairs: Sequence[tuple[Job, Job]]) -> CopyMeasurement:
    first = pairs[0][0]
    return CopyMeasurement(
        task=name,
        tokens=len(first.token_ids),
        rate_without=statistics.median(_rate(without) for without, _ in pairs),
        rate_with=statistics.median(_rate(ahead) for _, ahead in pairs),
        ratio=statistics.median(_rate(ahead) / _rate(without) for without, ahead in pairs),
        same=all(job.token_ids == first.token_ids for pair in pairs for job in pair),
    )
