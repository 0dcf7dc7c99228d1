"""The choices of one answer as they grow: text, and the log-probabilities that belong to it."""

from __future__ import annotations

from dataclasses import dataclass

from qwenonnx.engine.request import Delta, Finished, FinishReason, PromptLogprobs
from qwenonnx.server.logprobs import PlacedToken, TokenPlacer
from qwenonnx.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """More of a choice: text, and the tokens that spell it where log-probabilities are wanted."""

    text: str
    tokens: tuple[PlacedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A finished choice."""

    text: str
    tokens: tuple[PlacedToken, ...]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What a choice is made of, besides what the engine says.

    `echo` is the prompt's text where it comes first (None: it does not), and `prompt_ids` its tokens where their
    log-probabilities come with it. `mute` leaves the continuation out. `tokenizer` is set where log-probabilities
    are wanted.
    """

    echo: str | None = None
    prompt_ids: tuple[int, ...] = ()
    mute: bool = False
    tokenizer: Tokenizer | None = None


class Choice:
    """Turns the engine's events on one choice into pieces of it."""

    def __init__(self, rules: ChoiceRules) -> None:
        self._rules = rules
        self._echoed = rules.echo is None
        self._prompt: tuple[PlacedToken, ...] = ()
        self._placer = None if rules.tokenizer is None else TokenPlacer(rules.tokenizer)
        self._texts: list[str] = []
        self._tokens: list[PlacedToken] = []

    def feed(self, event: PromptLogprobs | Delta | Finished) -> Piece | None:
        """Takes the next event; returns what became certain with it, if anything did."""
        if isinstance(event, PromptLogprobs):
            self._prompt = self._place_prompt(event)
            return None
        text, tokens = self._echo()
        if isinstance(event, Delta):
            if not self._rules.mute:
                text += event.text
                tokens += self._place(event)
        elif self._placer is not None and event.reason == "length":
            # No stop string has cut anything off, so what is left belongs to the text.
            tokens += self._shifted(self._placer.rest())
        if not text and not tokens:
            return None
        self._texts.append(text)
        self._tokens += tokens
        return Piece(text, tokens)

    def whole(self, reason: FinishReason) -> FinishedChoice:
        """All that was said."""
        return FinishedChoice("".join(self._texts), tuple(self._tokens), reason)

    def _echo(self) -> tuple[str, tuple[PlacedToken, ...]]:
        if self._echoed:
            return "", ()
        self._echoed = True
        return self._rules.echo or "", self._prompt

    def _place(self, event: Delta) -> tuple[PlacedToken, ...]:
        if self._placer is None:
            return ()
        self._placer.place(event.token_ids, event.logprobs)
        return self._shifted(self._placer.take(event.text))

    def _shifted(self, tokens: tuple[PlacedToken, ...]) -> tuple[PlacedToken, ...]:
        """The tokens with offsets that count from the start of the echoed prompt."""
        if not self._rules.echo:
            return tokens
        shift = len(self._rules.echo)
        return tuple(PlacedToken(token.token_id, token.start + shift, token.logprobs) for token in tokens)

    def _place_prompt(self, event: PromptLogprobs) -> tuple[PlacedToken, ...]:
        if self._rules.tokenizer is None:
            return ()
        placer = TokenPlacer(self._rules.tokenizer, skip_special=False)
        placer.place(self._rules.prompt_ids, event.tokens)
        return placer.rest()
