"""Several requests at once, and when each of their tokens came."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Event, Failed, Finished, GenerationRequest
from qwenonnx.engine.ticket import Ticket


@dataclass(slots=True)
class Job:
    """A request, its tokens with the seconds from submitting to each, and its last event."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    last: Finished | Failed | None = None
    submitted: float = field(default_factory=time.perf_counter)
    ended: threading.Event = field(default_factory=threading.Event)

    def receive(self, event: Event) -> None:
        """The sink of the request."""
        if isinstance(event, Delta):
            self.token_ids += event.token_ids
            self.times += [time.perf_counter() - self.submitted] * len(event.token_ids)
        elif isinstance(event, Finished | Failed):
            self.last = event
            self.ended.set()

    def start(self, engine: Engine) -> Ticket:
        """Submits the request.

        Raises:
            QwenonnxError: it is refused.
        """
        self.submitted = time.perf_counter()
        return engine.submit(self.request, self.receive)

    def wait(self) -> Finished:
        """Waits for the end.

        Raises:
            QwenonnxError: the request failed.
        """
        self.ended.wait()
        if isinstance(self.last, Failed):
            raise self.last.error
        if self.last is None:
            raise RuntimeError("a request ended without an event")
        return self.last

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def greedy(prompt: Sequence[int], new_tokens: int) -> GenerationRequest:
    """Exactly so many tokens after a prompt."""
    return GenerationRequest(tuple(prompt), max_tokens=new_tokens, ignore_eos=True)


def run_together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Job]:
    """Submits requests at once and waits for all.

    Raises:
        QwenonnxError: one is refused or failed.
    """
    jobs = [Job(request) for request in requests]
    for job in jobs:
        job.start(engine)
    for job in jobs:
        job.wait()
    return jobs


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which about so much of all values lie."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))]
