"""From the text of a request to the tokens of its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwenonnx.errors import InvalidRequestError
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.history import keep_last_turns
from qwenonnx.server.messages import ChatMessage
from qwenonnx.server.schema import ChatRequest, CompletionRequest, TemplateFields, TokenizeRequest
from qwenonnx.server.served import Served
from qwenonnx.text.fill_in import can_fill_in, fill_in_prompt

# Variables of a template that a request sets in other ways.
_SET_ELSEWHERE = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")

# Of the context, what truncation leaves free for the answer where the request sets no smaller limit.
_ANSWER_SHARE = 4


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokens of a conversation; `report` says what was left out of it, in fields of the answer."""

    ids: list[int]
    report: Mapping[str, Any] = field(default_factory=dict)


def chat_prompt(fields: ChatRequest, limit: int | None, served: Served, config: ServeConfig) -> ChatPrompt:
    """The prompt of a chat request, without old turns where the request or the server wants it so.

    Raises:
        InvalidRequestError: the messages cannot be rendered, or flags contradict each other.
    """

    def encode(messages: Sequence[ChatMessage]) -> list[int]:
        return encode_messages(fields, messages, served)

    turns = last_turns(fields, config)
    if turns is None:
        return ChatPrompt(encode(fields.messages))
    room = served.context_length // _ANSWER_SHARE
    room = max(room if limit is None else min(limit, room), 1)
    kept = keep_last_turns(fields.messages, turns, served.context_length - room, encode)
    report = {
        "type": "last_turns",
        "n": turns,
        "dropped_turns": kept.dropped_turns,
        "dropped_messages": kept.dropped_messages,
    }
    return ChatPrompt(kept.prompt, {"truncation": report})


def last_turns(fields: ChatRequest, config: ServeConfig) -> int | None:
    """How many turns may be kept; None stands for all of them."""
    if fields.truncation is None:
        return config.last_turns
    return None if fields.truncation == "disabled" else fields.truncation.n


def encode_messages(
    fields: TemplateFields | TokenizeRequest, messages: Sequence[ChatMessage], served: Served
) -> list[int]:
    """Messages through the chat template, by the flags of a request.

    Raises:
        InvalidRequestError: the messages cannot be rendered, or flags contradict each other.
    """
    continued = bool(fields.continue_final_message)
    if continued:
        if fields.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; send one of them.",
                param="continue_final_message",
            )
        if messages[-1].role != "assistant" or messages[-1].tool_calls:
            raise InvalidRequestError(
                "continue_final_message needs a last message of the assistant, without tool_calls.",
                param="messages",
            )
    variables = fields.chat_template_kwargs or {}
    for name in variables:
        if name in _SET_ELSEWHERE:
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {name}, which has a field of its own or is not supported.",
                param="chat_template_kwargs",
            )
    try:
        return served.chat_template.encode(
            [message.for_template() for message in messages],
            add_generation_prompt=not continued and fields.add_generation_prompt is not False,
            continue_final_message=continued,
            variables=variables,
        )
    except InvalidRequestError as error:
        error.param = error.param or "messages"
        raise


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The tokens of a prompt, and the text that `echo` gives back."""

    ids: tuple[int, ...]
    text: str


def text_prompts(fields: CompletionRequest, served: Served) -> list[TextPrompt]:
    """The prompts of a completion request, with the gap's other side where there is a `suffix`.

    Raises:
        InvalidRequestError: the model has no tokens for filling gaps.
    """
    tokenizer = served.tokenizer
    if fields.suffix and not can_fill_in(tokenizer):
        raise InvalidRequestError(
            "suffix is not supported by this model, whose vocabulary has no fill-in-the-middle tokens; leave it out.",
            param="suffix",
            code="unsupported_parameter",
        )
    suffix = tokenizer.encode(fields.suffix) if fields.suffix else None
    prompts = []
    for prompt in fields.prompt:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        text = ""
        if fields.echo:
            known = [token_id for token_id in ids if token_id < tokenizer.num_tokens]
            text = prompt if isinstance(prompt, str) else tokenizer.decode(known, skip_special=False)
        prompts.append(TextPrompt(tuple(ids if suffix is None else fill_in_prompt(tokenizer, ids, suffix)), text))
    return prompts
