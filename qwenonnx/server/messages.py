"""Chat messages as clients send them, and as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from qwenonnx.server.jsonbody import json_type

Role = Literal["system", "developer", "user", "assistant", "tool"]


def _content(value: Any) -> Any:
    """Text: a string, null, or an array of text parts, which are put together with nothing in between."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        kind = "an empty array" if value == [] else json_type(value)
        raise PydanticCustomError("content", "must be a string or an array of text parts, not {kind}", {"kind": kind})
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise PydanticCustomError("content", "must hold objects, but part {index} is none", {"index": index})
        if part.get("type") != "text":
            raise PydanticCustomError(
                "content", "must hold parts of type text only, but part {index} is another", {"index": index}
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError(
                "content", "must hold a text in each part, but part {index} has none", {"index": index}
            )
        texts.append(part["text"])
    return "".join(texts)


def _arguments(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise PydanticCustomError("arguments", "must be JSON in a string, not {kind}", {"kind": json_type(value)})
    return value


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str | None,
    BeforeValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}, {"type": "null"}]}),
]
Arguments = Annotated[
    Any,
    BeforeValidator(_arguments),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
]


class FunctionCall(BaseModel):
    """What an assistant called; `arguments` is JSON in a string, or an object."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    name: str
    arguments: Arguments = None


class ToolCall(BaseModel):
    """One call in an assistant's message."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(BaseModel):
    """One message of a conversation, of any role."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    role: Role
    content: Content = None
    tool_calls: list[ToolCall] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "must not have tool_calls unless it is an assistant's")
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "must have a content")
        return self

    @property
    def is_instruction(self) -> bool:
        """Whether it is said by whoever set the model up."""
        return self.role in ("system", "developer")

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates read; a developer speaks as the system."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        return message
