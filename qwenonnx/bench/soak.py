"""Many mixed requests, a part of them given up: whether answers stay right and nothing is left behind."""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass

from qwenonnx.bench.jobs import Job, greedy, run_together
from qwenonnx.engine.engine import Engine
from qwenonnx.files import Progress
from qwenonnx.runtime.memory import process_memory

_ABORTED = 0.3
_PROMPTS = (4, 300)
_ANSWERS = (1, 40)
# One in so many finished answers is compared with one that is written alone.
_COMPARED = 20


@dataclass(frozen=True, slots=True)
class SoakReport:
    """Resident bytes after a quarter of the requests and after all; and how many answers were compared and differed."""

    requests: int
    aborted: int
    failed: int
    compared: int
    differing: int
    resident_after_quarter: int
    resident_in_the_end: int
    left_over: int
    threads_left_over: int


def soak(
    engine: Engine, vocabulary: int, *, requests: int, streams: int, progress: Progress | None = None
) -> SoakReport:
    """Keeps `streams` requests going until all have ended. The engine must run and have nothing else to do.

    Prompts of a few families share beginnings, so that rows are reused, copied and exchanged.
    """
    chance = random.Random(requests)
    families = [[chance.randrange(vocabulary) for _ in range(_PROMPTS[1])] for _ in range(5)]
    threads = threading.active_count()
    running: deque[tuple[Job, bool]] = deque()
    compared: list[Job] = []
    finished = aborted = failed = quarter = 0
    for number in range(requests + streams):
        if len(running) >= streams or number >= requests:
            if not running:
                break
            job, given_up = running.popleft()
            job.ended.wait()
            if not given_up:
                failed += job.last is None or len(job.token_ids) != job.request.max_tokens
                finished += 1
                if finished % _COMPARED == 1:  # all of them would take memory that is to be measured
                    compared.append(job)
        if number < requests:
            length = chance.randint(*_PROMPTS)
            shared = chance.randrange(length)
            prompt = chance.choice(families)[:shared] + [chance.randrange(vocabulary) for _ in range(length - shared)]
            job = Job(greedy(prompt, chance.randint(*_ANSWERS)))
            ticket = job.start(engine)
            given_up = chance.random() < _ABORTED
            if given_up:
                aborted += 1
                threading.Timer(chance.random() * 0.5, ticket.cancel).start()
            running.append((job, given_up))
            if progress is not None:
                progress(number + 1, requests)
            if number == requests // 4:
                quarter = process_memory().resident
    resident = process_memory().resident
    differing = sum(job.token_ids != run_together(engine, [job.request])[0].token_ids for job in compared)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    return SoakReport(
        requests=requests,
        aborted=aborted,
        failed=failed,
        compared=len(compared),
        differing=differing,
        resident_after_quarter=quarter,
        resident_in_the_end=resident,
        left_over=engine.num_running + engine.num_waiting,
        threads_left_over=threading.active_count() - threads,
    )
