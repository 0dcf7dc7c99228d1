"""How the next token is chosen: the parameters of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Below this the softmax is a one-hot vector for all practical purposes, and 1/temperature overflows.
GREEDY_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Choices of one request; the defaults are greedy decoding without penalties.

    `top_k = 0`, `top_p = 1` and `min_p = 0` switch those filters off. Values are checked by who builds this object.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1
