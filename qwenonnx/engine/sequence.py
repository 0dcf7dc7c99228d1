"""One request in flight."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.logprobs import token_logprobs
from qwenonnx.engine.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    Timings,
    TokenLogprobs,
    Usage,
)
from qwenonnx.engine.sampler import Sampler
from qwenonnx.engine.speculation import PromptLookup
from qwenonnx.engine.step_costs import StepCosts
from qwenonnx.errors import QwenonnxError
from qwenonnx.text.detokenizer import Detokenizer
from qwenonnx.text.stops import StopMatcher
from qwenonnx.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Sequence:
    """The tokens of a request, and what a new one means: stop rules, text and events.

    All but `cancel_requested` belongs to the engine thread. Should the sink raise, the request counts as
    cancelled and the sink gets no more events.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: Callable[[Event], None],
        tokenizer: Tokenizer,
        *,
        context_length: int,
        end_ids: frozenset[int],
    ) -> None:
        room = context_length - len(request.prompt_ids)
        self.request = request
        self.token_ids = list(request.prompt_ids)
        self.num_to_prefill = len(request.prompt_ids)
        self.num_computed = 0
        self.num_cached = 0
        self.num_drafts = 0
        self.order = 0.0
        self.arrival = 0
        self.slot = -1
        self.cancel_requested = False
        self.is_finished = False
        self._max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        self._end_ids = request.stop_token_ids | (frozenset() if request.ignore_eos else end_ids)
        self._num_tokens = tokenizer.num_tokens
        self._sink: Callable[[Event], None] | None = sink
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(request.stop)
        self._sampler = Sampler(
            request.sampling,
            request.prompt_ids,
            num_tokens=tokenizer.num_tokens,
            end_ids=end_ids | request.stop_token_ids,
            min_tokens=request.min_tokens,
        )
        self._lookup = PromptLookup()
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._submitted = time.perf_counter()
        self.deadline = None if request.timeout is None else self._submitted + request.timeout
        self._admitted: float | None = None
        self._first_token: float | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, without an end token."""
        return len(self.token_ids) - self.num_prompt

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of the prompt has not run yet (or, after `preempt`, of the tokens before the newest)."""
        return self.num_computed < self.num_to_prefill

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the logits of the whole prompt are asked for, so that none of it may come from the cache."""
        return self.request.prompt_logprobs is not None

    @property
    def service_seconds(self) -> float:
        """Time since the request left the queue."""
        return 0.0 if self._admitted is None else time.perf_counter() - self._admitted

    def admit(self, slot: int, num_cached: int) -> None:
        """Leaves the queue for a row of the cache that holds the prompt's first `num_cached` tokens."""
        self.slot = slot
        self.num_computed = num_cached
        if self._admitted is None:
            self.num_cached = num_cached
            self._admitted = self.order = time.perf_counter()

    def preempt(self) -> None:
        """Goes back to the queue; what was computed has to be computed again."""
        self.slot = -1
        self.num_computed = 0
        self.num_to_prefill = max(self.num_prompt, len(self.token_ids) - 1)

    def add_prompt_logits(self, logits: NDArray[np.float32]) -> None:
        """Takes the logits `[n, vocab]` of the prompt's next tokens, chunk by chunk; tells the sink after the last."""
        count = self.request.prompt_logprobs or 0
        ids = self.request.prompt_ids
        for row in logits:
            if len(self._prompt_logprobs) == len(ids):
                break  # the last row belongs to the answer
            following = ids[len(self._prompt_logprobs)]
            self._prompt_logprobs.append(self._logprobs(row, following, count))
        if len(self._prompt_logprobs) == len(ids):
            self._send(PromptLogprobs(tuple(self._prompt_logprobs)))

    def _logprobs(self, logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs | None:
        """None for a token that the tokenizer does not have, as a prompt of ids may hold."""
        return token_logprobs(logits[: self._num_tokens], token_id, count) if token_id < self._num_tokens else None

    def advance(self, logits: NDArray[np.float32]) -> None:
        """Samples the next token by its logits `[vocab]`, tells the sink, and finishes where a rule says so.

        Raises:
            NumericalError: the logits are unusable.
        """
        token_id = self._sampler.sample(logits)
        if self._first_token is None:
            self._first_token = time.perf_counter()
        if token_id in self._end_ids:
            self._emit(self._last_text())
            self.finish("stop")
            return
        self.token_ids.append(token_id)
        entries: tuple[TokenLogprobs, ...] = ()
        if self.request.logprobs is not None:
            entries = (token_logprobs(logits[: self._num_tokens], token_id, self.request.logprobs),)
        text = self._before_stop(self._detokenizer.push(token_id))
        is_full = self.num_output >= self._max_tokens
        if is_full:
            text += self._last_text()
        self._emit(text, (token_id,), entries)
        if self._stops.stopped:
            self.finish("stop")
        elif is_full:
            self.finish("length")

    def draft(self, costs: StepCosts, rate: float = 1.0) -> tuple[int, ...]:
        """Tokens that may come next, by prompt lookup; as many as pay and there is room for, and often none.

        `rate` is what has to be surpassed, in tokens by the duration of a step of one token.
        """
        return self._lookup.draft(self.token_ids, self._max_tokens - self.num_output - 1, costs, rate)

    def advance_drafted(self, logits: NDArray[np.float32], draft: tuple[int, ...]) -> int:
        """Samples the next tokens by the logits `[1 + draft, vocab]` of the newest token and a draft.

        Each is chosen as `advance` chooses it, one draw a token, so that the answer is what it would be without
        drafts. It ends with the first token that differs from the draft's. Returns how many were right.

        Raises:
            NumericalError: the logits are unusable.
        """
        self.num_drafts += 1
        right = 0
        for row, guess in zip(logits, (*draft, None), strict=True):
            self.advance(row)
            if self.is_finished or self.token_ids[-1] != guess:
                break
            right += 1
        return right

    def finish(self, reason: FinishReason) -> None:
        """Ends the request as it should; does nothing to one that has ended."""
        usage = Usage(self.num_prompt, self.num_output, self.num_cached)
        self._end(Finished(reason, usage, self._timings()))

    def fail(self, error: QwenonnxError) -> None:
        """Ends the request with an error; does nothing to one that has ended."""
        self._end(Failed(error))

    def _last_text(self) -> str:
        """What detokenizer and stop matcher still hold."""
        return self._before_stop(self._detokenizer.flush()) + self._stops.flush()

    def _before_stop(self, text: str) -> str:
        """What is certain of more text; with the stop string itself where that was asked for."""
        if self._stops.stopped:
            return ""
        text = self._stops.push(text)
        return text + self._stops.matched if self.request.include_stop else text

    def _emit(self, text: str, token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        if text or token_ids:
            self._send(Delta(text, token_ids, logprobs))

    def _end(self, event: Finished | Failed) -> None:
        if not self.is_finished:
            self.is_finished = True
            self._send(event)
            self._sink = None

    def _send(self, event: Event) -> None:
        if self._sink is None:
            return
        try:
            self._sink(event)
        except Exception as error:  # whatever a receiver does wrong is its own affair
            self._sink = None
            self.cancel_requested = True
            logger.warning("request %s is cancelled: its receiver failed (%r)", self.request.request_id, error)

    def _timings(self) -> Timings:
        now = time.perf_counter()
        admitted = now if self._admitted is None else self._admitted
        first_token = now if self._first_token is None else self._first_token
        return Timings(queue=admitted - self._submitted, prefill=first_token - admitted, decode=now - first_token)
