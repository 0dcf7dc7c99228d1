"""The JSON bodies of requests, with strict types: no string is taken for a number, nor true for 1."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from qwenonnx.errors import InvalidRequestError
from qwenonnx.server.fields import WHOLE, LegacyLogprobs, Limit, LimitOrZero, Prompts, Stops, TokenBias, TokenIds
from qwenonnx.server.messages import ChatMessage
from qwenonnx.server.unsupported import neutral_values, refuse_unsupported

MAX_CHOICES = 128


class Body(BaseModel):
    """Any body: unknown fields are ignored, and types are those of JSON."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class LastTurns(Body):
    """Keeps the system prompt and the last `n` turns of a conversation."""

    type: Literal["last_turns"]
    n: Annotated[int, Field(ge=1, le=1_000_000), WHOLE]


def _truncation(value: Any) -> Any:
    if value is not None and value != "disabled" and not isinstance(value, dict):
        raise PydanticCustomError("truncation", 'must be {{"type": "last_turns", "n": N}} or "disabled"')
    return value


Truncation = Annotated[
    LastTurns | Literal["disabled"] | None,
    BeforeValidator(_truncation),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"type": {"const": "last_turns"}, "n": {"type": "integer", "minimum": 1}},
                    "required": ["type", "n"],
                },
                {"const": "disabled"},
                {"type": "null"},
            ]
        }
    ),
]


class GenerationFields(Body):
    """What chat and completion requests share. None stands for "not given", which null means as well."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    max_tokens: Limit | None = None
    min_tokens: LimitOrZero | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**53), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE] | None = None
    stop: Stops = ()
    stop_token_ids: TokenIds = frozenset()
    include_stop_str_in_output: bool | None = None
    logit_bias: TokenBias = Field(default_factory=dict)
    ignore_eos: bool | None = None
    timings: bool | None = None


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: LimitOrZero | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: LegacyLogprobs = None


class TemplateFields(Body):
    """What decides how a conversation becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(TemplateFields, GenerationFields):
    """The body of POST /v1/chat/completions."""

    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    truncation: Truncation = None


class TokenizeRequest(Body):
    """The body of POST /tokenize: one of `prompt`, `content` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


Fields = TypeVar("Fields", bound=Body)


def parse_fields(kind: type[Fields], body: dict[str, Any]) -> Fields:
    """Checks a body against one of the classes above.

    Raises:
        InvalidRequestError: with the name of the top-level field in `param` and the whole path in the text.
    """
    if issubclass(kind, GenerationFields):
        refuse_unsupported(body, kind.model_fields.keys())
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _readable(error) from None


def unsupported_schema(kind: type[Body]) -> dict[str, Any]:
    """The fields that a body may have only with values that ask for nothing, as properties of its JSON schema."""
    if not issubclass(kind, GenerationFields):
        return {}
    names = neutral_values(kind.model_fields.keys())
    return {name: {"enum": [None, *values], "description": "Not supported."} for name, values in names.items()}


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
