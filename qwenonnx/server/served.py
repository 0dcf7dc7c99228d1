"""What the server serves: a loaded model with all that belongs to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwenonnx.engine.engine import Engine
    from qwenonnx.text.chat_template import ChatTemplate
    from qwenonnx.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters of requests that do not give their own; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Reads the Hugging Face form: temperature, top_p and top_k count only where `do_sample` is true.

        Values that are missing or of the wrong kind are taken as not given.
        """

        def number(name: str, default: float) -> float:
            value = config.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                return default
            return value

        penalty = number("repetition_penalty", 1.0) or 1.0
        if config.get("do_sample") is not True:
            return cls(repetition_penalty=penalty)
        return cls(
            temperature=number("temperature", 1.0),
            top_p=min(number("top_p", 1.0), 1.0),
            top_k=int(number("top_k", 50)),
            repetition_penalty=penalty,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model. The server starts the engine when it takes over, and closes it in the end.

    `aliases` are further names under which requests may ask for the model, such as its hub id; `created` is a
    Unix time; `info` is shown by /health as it is, so it must be plain JSON (threads, recipe, ...). `summary` and
    `warnings` are lines about the model that are logged when it is ready.
    """

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model_name: str
    created: int
    context_length: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    aliases: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    summary: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
