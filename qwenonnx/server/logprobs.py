"""Log-probabilities of tokens: which belong to which text, and how the two endpoints write them."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qwenonnx.engine.request import TokenLogprob, TokenLogprobs
from qwenonnx.text.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI's API sends for a token that cannot come.
LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token, the character of the text at which it starts, and its probabilities (None for a prompt's first)."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None


class TokenPlacer:
    """Gives out tokens together with the text they spell.

    Text lags behind tokens while a character or a possible stop string is incomplete, and what a stop string cuts off
    never comes. A token is given out with the first of its characters, so those of a piece spell the piece, but for a
    last one that may reach into a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._position = 0
        self._given = 0
        self._pending: deque[PlacedToken] = deque()

    def place(self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None]) -> None:
        """Takes tokens with their probabilities."""
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            self._pending.append(PlacedToken(token_id, self._position, entry))
            if not (self._skip_special and self._tokenizer.is_special(token_id)):
                self._position += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def take(self, text: str) -> tuple[PlacedToken, ...]:
        """The tokens that start within the next piece of text, or before it."""
        self._given += len(text)
        taken = []
        while self._pending and self._pending[0].start < self._given:
            taken.append(self._pending.popleft())
        return tuple(taken)

    def rest(self) -> tuple[PlacedToken, ...]:
        """All others: tokens without text, and the bytes of a last character that was never complete."""
        taken = tuple(self._pending)
        self._pending.clear()
        return taken


def chat_logprobs(tokens: Iterable[PlacedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        spelled = b"" if tokenizer.is_special(token.token_id) else tokenizer.token_bytes(token.token_id)
        text = tokenizer.token_bytes(token.token_id).decode("utf-8", errors="replace")
        return {"token": text, "logprob": _finite(token.logprob), "bytes": list(spelled)}

    content = [
        {**entry(token.logprobs.chosen), "top_logprobs": [entry(other) for other in token.logprobs.top]}
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Iterable[PlacedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a completion choice: parallel lists, null where nothing precedes a token."""

    def text(token_id: int) -> str:
        spelled = tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        entry = token.logprobs
        result["tokens"].append(text(token.token_id))
        result["text_offset"].append(token.start)
        result["token_logprobs"].append(None if entry is None else _finite(entry.chosen.logprob))
        # The chosen token is always among them, as in OpenAI's API.
        best = {} if entry is None else {text(other.token_id): _finite(other.logprob) for other in entry.top}
        if entry is not None:
            best.setdefault(text(entry.chosen.token_id), _finite(entry.chosen.logprob))
        result["top_logprobs"].append(None if entry is None else best)
    return result


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST)
