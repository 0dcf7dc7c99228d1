"""A checked request: what the engine gets, and how it is answered."""

from __future__ import annotations

from dataclasses import dataclass

from qwenonnx.engine.request import GenerationRequest
from qwenonnx.server.answers import Answer
from qwenonnx.server.choices import Choice, ChoiceRules
from qwenonnx.server.totals import Totals


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request to the engine and one set of rules for each choice, in the order of their indexes."""

    requests: tuple[GenerationRequest, ...]
    rules: tuple[ChoiceRules, ...]
    answer: Answer
    choices_per_prompt: int
    stream: bool
    include_usage: bool
    timings: bool

    def choices(self) -> list[Choice]:
        """The choices, with nothing said yet."""
        return [Choice(rules) for rules in self.rules]

    def totals(self) -> Totals:
        """Counts and times, all zero yet."""
        return Totals(self.choices_per_prompt, mute=self.rules[0].mute)
