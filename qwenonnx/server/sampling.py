"""How a request's tokens are chosen: its own parameters, and defaults for what it does not say."""

from __future__ import annotations

from typing import TypeVar

from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.schema import GenerationFields
from qwenonnx.server.served import Served

_T = TypeVar("_T")


def sampling_params(fields: GenerationFields, served: Served, config: ServeConfig, choice: int) -> SamplingParams:
    """What the request says, else what the server was started with, else what the package says.

    Each `choice` of a prompt has a seed of its own: the request's plus its number.
    """
    defaults = served.defaults
    top_p = _first(fields.top_p, config.top_p, defaults.top_p)
    top_k = max(_first(fields.top_k, config.top_k, defaults.top_k), 0)
    if top_p == 0:
        # No probability mass at all still leaves the most probable token.
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=_first(fields.temperature, config.temperature, defaults.temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=fields.min_p or 0.0,
        repetition_penalty=_first(fields.repetition_penalty, config.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=dict(fields.logit_bias),
        seed=None if fields.seed is None else (fields.seed + choice) % 2**64,
    )


def _first(given: _T | None, option: _T | None, default: _T) -> _T:
    if given is not None:
        return given
    return default if option is None else option
