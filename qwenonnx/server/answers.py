"""The JSON of answers, whole and in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qwenonnx.engine.request import FinishReason, Usage
from qwenonnx.server.choices import FinishedChoice, Piece
from qwenonnx.server.logprobs import PlacedToken, chat_logprobs, completion_logprobs
from qwenonnx.text.tokenizer import Tokenizer

Json = dict[str, Any]


class Answer(Protocol):
    """How one request is answered; `None` for an opening means that there is no such piece."""

    @property
    def id(self) -> str:
        """The id in all pieces of the answer."""

    @property
    def prompt_param(self) -> str:
        """The name of the field that holds the prompt."""

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """The answer in one piece."""

    def opening(self, index: int) -> Json | None:
        """The first piece of a choice in a stream."""

    def piece(self, index: int, piece: Piece) -> Json:
        """More of a choice."""

    def closing(self, index: int, reason: FinishReason) -> Json:
        """The last piece of a choice."""

    def usage(self, usage: Usage) -> Json:
        """The extra last piece, with token counts and without a choice."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """`chat.completion` and `chat.completion.chunk`.

    `extra` are further fields of the whole answer and of each choice's opening; `tokenizer` is set where
    log-probabilities are wanted.
    """

    id: str
    model: str
    created: int
    tokenizer: Tokenizer | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompt_param: str = "messages"

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """See Answer."""
        items = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head("chat.completion"), "choices": items, "usage": usage_object(usage), **self.extra}

    def opening(self, index: int) -> Json | None:
        """See Answer."""
        return {**self._chunk(index, {"role": "assistant", "content": ""}, None), **self.extra}

    def piece(self, index: int, piece: Piece) -> Json:
        """See Answer."""
        return self._chunk(index, {"content": piece.text}, None, self._logprobs(piece.tokens))

    def closing(self, index: int, reason: FinishReason) -> Json:
        """See Answer."""
        return self._chunk(index, {}, reason)

    def usage(self, usage: Usage) -> Json:
        """See Answer."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_object(usage)}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        return None if self.tokenizer is None else chat_logprobs(tokens, self.tokenizer)

    def _chunk(self, index: int, delta: Json, reason: FinishReason | None, logprobs: Json | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """`text_completion`, which has the same form in a stream; `tokenizer` as in ChatAnswer."""

    id: str
    model: str
    created: int
    tokenizer: Tokenizer | None = None
    prompt_param: str = "prompt"

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """See Answer."""
        items = [
            self._choice(index, choice.text, choice.reason, self._logprobs(choice.tokens))
            for index, choice in enumerate(choices)
        ]
        return {**self._head(), "choices": items, "usage": usage_object(usage)}

    def opening(self, index: int) -> Json | None:
        """See Answer."""
        return None

    def piece(self, index: int, piece: Piece) -> Json:
        """See Answer."""
        return {**self._head(), "choices": [self._choice(index, piece.text, None, self._logprobs(piece.tokens))]}

    def closing(self, index: int, reason: FinishReason) -> Json:
        """See Answer."""
        return {**self._head(), "choices": [self._choice(index, "", reason, None)]}

    def usage(self, usage: Usage) -> Json:
        """See Answer."""
        return {**self._head(), "choices": [], "usage": usage_object(usage)}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        return None if self.tokenizer is None else completion_logprobs(tokens, self.tokenizer)

    def _choice(self, index: int, text: str, reason: FinishReason | None, logprobs: Json | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _head(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


def usage_object(usage: Usage) -> Json:
    """Token counts in OpenAI's form; tokens found in the prefix cache are part of the prompt's."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
