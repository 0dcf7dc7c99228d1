"""The vocabulary of generation: what is asked for, and the events that answer it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.errors import QwenonnxError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and the rules for continuing it.

    `max_tokens = None` means up to the end of the context; larger values are clamped to it.
    `ignore_eos` keeps going past end-of-text tokens; `min_tokens` bans them until that many tokens are out.
    `stop_token_ids` end the answer as end-of-text tokens do, whatever `ignore_eos` says. `include_stop` keeps the
    stop string that was met in the text.

    `logprobs` asks for the log-probabilities of the tokens of the answer, with so many alternatives (0 to 20);
    `prompt_logprobs` for those of the prompt, whose tokens then all run.

    Requests of a higher `priority` leave the queue first, and lose their memory last. `timeout` is how many seconds
    the request may take in all; it fails with DeadlineError if it has not ended by then.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    request_id: str = ""
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at a position, and the most probable ones there, the most probable first.

    Probabilities are the model's own, before temperature, penalties, bias and bans, over the tokens that exist.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `completion_tokens` counts every sampled token, the end-of-text token excluded."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent waiting, on the prompt (until the first token is sampled), and on the tokens after it."""

    queue: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Delta:
    """New output: the tokens just sampled and the text that became certain with them (possibly empty).

    Text lags behind tokens while a character or a possible stop string is incomplete. `logprobs`, where they were
    asked for, has one entry for each token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Comes before the first `Delta` where asked for: one entry for each token of the prompt, None for the first."""

    tokens: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ended as it should; all text has been delivered before it."""

    reason: FinishReason
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be completed."""

    error: QwenonnxError


Event = PromptLogprobs | Delta | Finished | Failed
