"""The one thread that owns the model."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from qwenonnx.engine.checks import check_request
from qwenonnx.engine.config import EngineConfig, SchedulerConfig
from qwenonnx.engine.event_streams import AsyncEventStream, EventStream
from qwenonnx.engine.idle_time import IdleTime
from qwenonnx.engine.prefix_cache import PrefixCache, pinned_tokens
from qwenonnx.engine.prefix_files import PrefixFiles
from qwenonnx.engine.request import Event, GenerationRequest
from qwenonnx.engine.rows import PAGE_TOKENS, pages
from qwenonnx.engine.runner import ModelRunner
from qwenonnx.engine.scheduler import DecodeStep, PrefillChunk, Scheduler, Step, VerifyStep
from qwenonnx.engine.sequence import Sequence
from qwenonnx.engine.steps import StepRunner
from qwenonnx.engine.ticket import Ticket
from qwenonnx.errors import DeadlineError, EngineError, QwenonnxError, UnavailableError, UsageError
from qwenonnx.text.tokenizer import Tokenizer, end_token_ids

logger = logging.getLogger(__name__)


class Engine:
    """Serves generation requests with one model, many at a time, on a thread of its own.

    A request's events go to its sink in order and end with exactly one `Finished` or `Failed`. A request that
    fails takes no other with it. Keys and values of ended requests stay, so that a prompt that begins like one of
    them runs only what differs; at least the last two tokens always run.

    Memory for slow readers is bounded by the answer itself: the engine never waits for a reader, and a
    request has at most `max_tokens + 2` small events.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        end_ids: frozenset[int] | None = None,
        prefix_files: PrefixFiles | None = None,
    ) -> None:
        """`end_ids` None takes those that the tokenizer alone tells; see `end_token_ids`."""
        self._runner = runner
        self._steps = StepRunner(runner)
        self._tokenizer = tokenizer
        self._config = config or EngineConfig()
        self._end_ids = end_token_ids(tokenizer, {}) if end_ids is None else end_ids
        most = runner.num_slots * pages(runner.context_length)
        self._kv_tokens = min(most, self._config.kv_tokens or most)
        # One request alone always has room, so that nobody waits for ever.
        self._context_length = min(runner.context_length, self._kv_tokens)
        self._scheduler = Scheduler(
            SchedulerConfig(
                prefill_chunk=self._config.prefill_chunk,
                max_queue=self._config.max_queue,
                max_running=max(1, min(self._config.max_running, runner.max_batch, runner.num_slots)),
                num_rows=runner.num_slots,
                kv_tokens=pages(self._kv_tokens),
                max_step_delay=self._config.max_step_delay,
                speculate=self._config.speculate,
                costs=self._config.costs,
            )
        )
        self._prefixes = PrefixCache(self._scheduler.rows, self._steps, runner, prefix_files)
        self._wake = threading.Condition()
        chores = [(self._config.save_after, lambda: self._prefixes.save(self._is_wanted))]
        if self._config.release_after is not None:
            chores.append((self._config.release_after, lambda: self._prefixes.release(self._is_wanted)))
        self._idle = IdleTime(self._wake, chores)
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def context_length(self) -> int:
        """Tokens that one request can have, prompt and output together."""
        return self._context_length

    @property
    def max_running(self) -> int:
        """Requests that run at once."""
        return self._scheduler.max_running

    @property
    def num_running(self) -> int:
        """Requests being worked on."""
        with self._wake:
            return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        with self._wake:
            return self._scheduler.num_waiting

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def preload(self, prompts: Iterable[tuple[int, ...]] = ()) -> None:
        """Loads what earlier processes have kept in files, and reads `prompts`, which then stay; before `start`.

        Raises:
            UsageError: the prompts leave no room for a request.
            EngineError: the model failed.
        """
        self._prefixes.restore(self._context_length)
        self._prefixes.preload(prompts, self._config.prefill_chunk)
        room = self._kv_tokens - pinned_tokens(self._scheduler.rows)
        if room < PAGE_TOKENS:
            raise UsageError(f"prompts loaded beforehand fill the memory of {self._kv_tokens:,} tokens.")
        self._context_length = min(self._context_length, room)

    def start(self) -> None:
        """Starts the engine thread; requests submitted before are served then.

        Raises:
            UnavailableError: the engine was closed.
        """
        with self._wake:
            if self._closing:
                raise UnavailableError("The engine is shut down; make a new one.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="qwenonnx-engine", daemon=True)
                self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Ends everything and joins the thread, for at most `timeout` seconds; may be called again.

        Running requests end with `Finished("cancelled")`, waiting ones with `Failed(UnavailableError)`.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
            thread = self._thread
        self._steps.interrupt()
        if thread is None:
            self._end_all()
        elif thread is not threading.current_thread():
            thread.join(timeout)

    def submit(self, request: GenerationRequest, sink: Callable[[Event], None]) -> Ticket:
        """Queues a request; `sink` is called from the engine thread and should return soon.

        Raises:
            InvalidRequestError: the prompt is empty, or a value is out of its range.
            ContextLengthError: the prompt leaves no room for a token.
            QueueFullError: too many requests are waiting.
            UnavailableError: the engine was closed.
        """
        if request.timeout is None and self._config.timeout is not None:
            request = replace(request, timeout=self._config.timeout)
        check_request(request, self._runner.vocab_size, self._context_length)
        sequence = Sequence(
            request,
            sink,
            self._tokenizer,
            context_length=self._context_length,
            end_ids=self._end_ids,
        )
        with self._wake:
            if self._closing:
                raise UnavailableError("The server is shutting down; try again later.")
            self._scheduler.add(sequence)
            self._wake.notify_all()
        return Ticket(lambda: self._cancel(sequence))

    def generate(self, request: GenerationRequest) -> EventStream:
        """Submits a request and returns its events as a blocking iterator; closing that cancels the request.

        Raises:
            QwenonnxError: as `submit`, at once.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        return EventStream(events, self.submit(request, events.put))

    def stream(self, request: GenerationRequest) -> AsyncEventStream:
        """Submits a request and returns its events as an asynchronous iterator for the running event loop.

        Closing it, or cancelling the task that waits for an event, cancels the request.

        Raises:
            QwenonnxError: as `submit`, at once.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        return AsyncEventStream(events, self.submit(request, sink))

    def _cancel(self, sequence: Sequence) -> None:
        # No need to wake the thread: it sleeps only when no request is left.
        sequence.cancel_requested = True
        self._steps.interrupt(sequence)

    def _run(self) -> None:
        try:
            while True:
                self._idle.wait_until(self._is_wanted)
                with self._wake:
                    if self._closing:
                        return
                    dropped = self._scheduler.drop_cancelled()
                    late = self._scheduler.drop_late(time.perf_counter())
                    step = self._scheduler.schedule()
                    moves = self._scheduler.take_moves()
                for sequence in dropped:
                    sequence.finish("cancelled")
                for sequence in late:
                    sequence.fail(DeadlineError(f"The request's {sequence.request.timeout:g} seconds are over."))
                for move in moves:
                    self._steps.move(move)
                if step is not None:
                    self._execute(step)
        finally:
            # Also after a fault of the engine's own: no reader is left waiting, no request is taken any more.
            self._end_all()
            self._prefixes.save()

    def _is_wanted(self) -> bool:
        return self._closing or self._scheduler.has_work

    def _execute(self, step: Step) -> None:
        """Runs a step: forward pass, sampling, events. What goes wrong ends the requests in it, no more."""
        sequences = step.sequences if isinstance(step, DecodeStep) else (step.sequence,)
        try:
            if isinstance(step, PrefillChunk):
                self._prefill(step)
            elif isinstance(step, VerifyStep):
                self._verify(step)
            else:
                self._decode(step)
        except Exception as error:
            for sequence in sequences:
                self._end_with(sequence, error)
        with self._wake:
            for sequence in sequences:
                if sequence.is_finished:
                    self._scheduler.remove(sequence)

    def _prefill(self, chunk: PrefillChunk) -> None:
        began = time.perf_counter()
        logits = self._steps.prefill(chunk)
        with self._wake:
            self._scheduler.computed(chunk, time.perf_counter() - began)
        if chunk.is_last and not chunk.sequence.num_output:  # else it was preempted, and has its next token already
            chunk.sequence.advance(logits)

    def _verify(self, step: VerifyStep) -> None:
        right = step.sequence.advance_drafted(self._steps.verify(step), step.draft)
        with self._wake:
            self._scheduler.verified(step, right)

    def _decode(self, step: DecodeStep) -> None:
        began = time.perf_counter()
        rows = self._steps.decode(step)
        with self._wake:
            self._scheduler.computed(step, time.perf_counter() - began)
        for sequence, logits in zip(step.sequences, rows, strict=True):
            try:
                if isinstance(logits, EngineError):
                    raise logits
                sequence.advance(logits)
            except EngineError as error:  # of this row alone
                sequence.fail(error)

    def _end_with(self, sequence: Sequence, error: Exception) -> None:
        if isinstance(error, EngineError) and (sequence.cancel_requested or self._closing):
            sequence.finish("cancelled")  # this is what the interrupted prefill raised
        elif isinstance(error, QwenonnxError):
            sequence.fail(error)
        else:
            logger.error("request %s failed", sequence.request.request_id, exc_info=error)
            sequence.fail(EngineError(f"Generation failed unexpectedly ({type(error).__name__}: {error})."))

    def _end_all(self) -> None:
        with self._wake:
            self._closing = True
            running, waiting = self._scheduler.drop_all()
        for sequence in running:
            sequence.finish("cancelled")
        for sequence in waiting:
            if sequence.cancel_requested:
                sequence.finish("cancelled")
            else:
                sequence.fail(UnavailableError("The server is shutting down; try again later."))
