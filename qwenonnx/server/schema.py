"""The JSON bodies of requests, with strict types: no string is taken for a number, nor true for 1."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from qwenonnx.errors import InvalidRequestError
from qwenonnx.server.jsonbody import json_type
from qwenonnx.server.messages import ChatMessage
from qwenonnx.server.unsupported import refuse_unsupported

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000


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


def _prompt(value: Any) -> Any:
    """A string or token ids, bare or as the only element of a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        raise PydanticCustomError("prompt", "must be a single prompt; send several prompts as several requests")
    raise PydanticCustomError("prompt", "must be a string or an array of token ids")


Whole = Annotated[int, BeforeValidator(_whole)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class GenerationFields(_Strict):
    """What chat and completion requests share. None stands for "not given", which null means as well."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Whole | None, Field(ge=1)] = None
    min_tokens: Annotated[Whole | None, Field(ge=0)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[Whole | None, Field(ge=-1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=10)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    seed: Annotated[Whole | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_token_bias)] = Field(default_factory=dict)
    ignore_eos: bool | None = None


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]


class ChatRequest(GenerationFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole | None, Field(ge=1)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Fields = TypeVar("Fields", bound=GenerationFields)


def parse_fields(kind: type[Fields], body: dict[str, Any]) -> Fields:
    """Checks a body against one of the classes above.

    Raises:
        InvalidRequestError: with the name of the top-level field in `param` and the whole path in the text.
    """
    refuse_unsupported(body)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _readable(error) from None


def _readable(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "too_short":
        return InvalidRequestError(f"{path} must not be empty.", param=param, code="invalid_value")
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is missing.", param=param, code="missing_required_parameter")
    text = first["msg"].removeprefix("Input should be ")
    text = {"model_type": "an object", "dict_type": "an object", "list_type": "an array"}.get(first["type"], text)
    if first["type"].endswith("_type"):
        return InvalidRequestError(f"{path} must be {text}.", param=param, code="invalid_type")
    return InvalidRequestError(f"{path} {_with_verb(text)}.", param=param, code="invalid_value")


def _with_verb(text: str) -> str:
    if text.startswith("must "):
        return text
    return f"must {text.removeprefix('Input should ')}" if text.startswith("Input should ") else f"must be {text}"
