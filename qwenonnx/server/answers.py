"""The JSON of answers, whole and in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from qwenonnx.engine.request import FinishReason, Usage

Json = dict[str, Any]


class Answer(Protocol):
    """How one request is answered; `None` for an opening means that there is no such piece."""

    @property
    def id(self) -> str:
        """The id in all pieces of the answer."""

    @property
    def prompt_param(self) -> str:
        """The name of the field that holds the prompt."""

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> Json:
        """The answer in one piece."""

    def opening(self) -> Json | None:
        """The first piece of a stream."""

    def piece(self, text: str) -> Json:
        """More text."""

    def closing(self, reason: FinishReason) -> Json:
        """The last piece of a choice."""

    def usage(self, usage: Usage) -> Json:
        """The extra last piece, with token counts and without a choice."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """`chat.completion` and `chat.completion.chunk`."""

    id: str
    model: str
    created: int
    prompt_param: str = "messages"

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> Json:
        """See Answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage_object(usage)}

    def opening(self) -> Json | None:
        """See Answer."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> Json:
        """See Answer."""
        return self._chunk({"content": text}, None)

    def closing(self, reason: FinishReason) -> Json:
        """See Answer."""
        return self._chunk({}, reason)

    def usage(self, usage: Usage) -> Json:
        """See Answer."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_object(usage)}

    def _chunk(self, delta: Json, reason: FinishReason | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """`text_completion`, which has the same form in a stream."""

    id: str
    model: str
    created: int
    prompt_param: str = "prompt"

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> Json:
        """See Answer."""
        return {**self._with_choice(text, reason), "usage": usage_object(usage)}

    def opening(self) -> Json | None:
        """See Answer."""
        return None

    def piece(self, text: str) -> Json:
        """See Answer."""
        return self._with_choice(text, None)

    def closing(self, reason: FinishReason) -> Json:
        """See Answer."""
        return self._with_choice("", reason)

    def usage(self, usage: Usage) -> Json:
        """See Answer."""
        return {**self._head(), "choices": [], "usage": usage_object(usage)}

    def _with_choice(self, text: str, reason: FinishReason | None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head(), "choices": [choice]}

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
