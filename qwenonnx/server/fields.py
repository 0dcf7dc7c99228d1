"""Types of request fields: what JSON may say, how it is checked, and what the OpenAPI document says about it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from qwenonnx.server.jsonbody import json_type

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_STOP_TOKENS = 64
MAX_PROMPTS = 128
MAX_HUGE = 2**53


def _whole(value: Any) -> Any:
    """JSON has one kind of number, so 16.0 and 1e3 are whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stops(value: Any) -> Any:
    """A string, a list of strings or null, as a tuple without empty strings (they would match everywhere)."""
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise PydanticCustomError(
            "stop", "must be a string or an array of strings, not {kind}", {"kind": json_type(value)}
        )
    for item in items:
        if not isinstance(item, str):
            raise PydanticCustomError("stop", "must hold strings only, not {kind}", {"kind": json_type(item)})
        if len(item) > MAX_STOP_LENGTH:
            raise PydanticCustomError(
                "stop", "must hold strings of at most {limit} characters", {"limit": MAX_STOP_LENGTH}
            )
    stops = tuple(item for item in items if item)
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", "must hold at most {limit} strings", {"limit": MAX_STOPS})
    return stops


def _token_bias(value: Any) -> Any:
    """`{"token id": bias}` with the ids, which JSON spells as strings, as integers."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("bias", "must be an object, not {kind}", {"kind": json_type(value)})
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise PydanticCustomError("bias", "must have token ids as keys")
    return {int(key): bias for key, bias in value.items()}


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _token_ids(value: Any) -> Any:
    """A list of token ids or null, as a set."""
    if value is None:
        return frozenset()
    if not _is_token_list(value):
        raise PydanticCustomError("token_ids", "must be an array of token ids")
    if len(value) > MAX_STOP_TOKENS:
        raise PydanticCustomError("token_ids", "must hold at most {limit} token ids", {"limit": MAX_STOP_TOKENS})
    return frozenset(value)


def _prompts(value: Any) -> Any:
    """A string or token ids, or several of them, as a tuple of strings and tuples."""
    if isinstance(value, str) or (_is_token_list(value) and value):
        value = [value]
    if not isinstance(value, list) or not value:
        kind = "an empty array" if value == [] else json_type(value)
        raise PydanticCustomError(
            "prompt", "must be a string, an array of token ids, or an array of these, not {kind}", {"kind": kind}
        )
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "must hold at most {limit} prompts", {"limit": MAX_PROMPTS})
    if not all(isinstance(item, str) for item in value) and not all(_is_token_list(item) for item in value):
        raise PydanticCustomError("prompt", "must hold either strings only or arrays of token ids only")
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


def _legacy_logprobs(value: Any) -> Any:
    # Clients of other servers send false for "none".
    return None if value is False else _whole(value)


_TOKEN_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}}

WHOLE = BeforeValidator(_whole)
"""Stands behind the bounds of an integer, so that the JSON schema has them."""
# A bound keeps absurd numbers away from arithmetic; every real value is far below it.
Limit = Annotated[int, Field(ge=1, le=MAX_HUGE), WHOLE]
LimitOrZero = Annotated[int, Field(ge=0, le=MAX_HUGE), WHOLE]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "maxLength": MAX_STOP_LENGTH},
                {
                    "type": "array",
                    "items": {"type": "string", "maxLength": MAX_STOP_LENGTH},
                    "maxItems": MAX_STOPS,
                },
                {"type": "null"},
            ]
        }
    ),
]
TokenBias = Annotated[
    dict[int, Bias],
    BeforeValidator(_token_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        }
    ),
]
TokenIds = Annotated[
    frozenset[int],
    BeforeValidator(_token_ids),
    WithJsonSchema({"anyOf": [{**_TOKEN_LIST, "maxItems": MAX_STOP_TOKENS}, {"type": "null"}]}),
]
Prompts = Annotated[
    tuple[str, ...] | tuple[tuple[int, ...], ...],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {**_TOKEN_LIST, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
                {
                    "type": "array",
                    "items": {**_TOKEN_LIST, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        }
    ),
]
LegacyLogprobs = Annotated[
    Annotated[int, Field(ge=0, le=20)] | None,
    BeforeValidator(_legacy_logprobs),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"const": False}, {"type": "null"}]}),
]
