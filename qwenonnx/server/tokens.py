"""Counting tokens, and turning text into them and back, without generating anything."""

from __future__ import annotations

from typing import Any

from qwenonnx.errors import InvalidRequestError
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.jsonbody import parse_object
from qwenonnx.server.prepare import check_model, check_number_of_messages, check_token_ids
from qwenonnx.server.prompts import chat_prompt, encode_messages
from qwenonnx.server.schema import ChatRequest, DetokenizeRequest, TokenizeRequest, parse_fields
from qwenonnx.server.served import Served


def tokenize(body: bytes, served: Served, config: ServeConfig) -> dict[str, Any]:
    """Answers POST /tokenize in vLLM's form (`prompt` or `messages`) or llama.cpp's (`content`).

    Raises:
        InvalidRequestError: the request is at fault.
    """
    raw = parse_object(body)
    check_number_of_messages(raw.get("messages"), config)
    fields = parse_fields(TokenizeRequest, raw)
    check_model(fields.model, served)
    given = [name for name in ("prompt", "content", "messages") if getattr(fields, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            "Exactly one of prompt, content and messages is needed.", param=(given or ["prompt"])[-1]
        )
    tokenizer = served.tokenizer
    if fields.messages is not None:
        if not fields.messages:
            raise InvalidRequestError("messages must not be empty.", param="messages", code="invalid_value")
        ids = encode_messages(fields, fields.messages, served)
    else:
        text = fields.prompt if fields.prompt is not None else fields.content or ""
        ids = tokenizer.encode_ordinary(text) if fields.parse_special is False else tokenizer.encode(text)
    pieces = [tokenizer.decode([token_id], skip_special=False) for token_id in ids]
    result: dict[str, Any] = {"count": len(ids), "max_model_len": served.context_length, "tokens": ids}
    if fields.with_pieces:
        result["tokens"] = [{"id": token_id, "piece": piece} for token_id, piece in zip(ids, pieces, strict=True)]
    if fields.return_token_strs:
        result["token_strs"] = pieces
    return result


def detokenize(body: bytes, served: Served, config: ServeConfig) -> dict[str, Any]:
    """Answers POST /detokenize; the text is there under vLLM's name and llama.cpp's.

    Raises:
        InvalidRequestError: the request is at fault.
    """
    fields = parse_fields(DetokenizeRequest, parse_object(body))
    check_model(fields.model, served)
    check_token_ids(fields.tokens, served, "tokens")
    text = served.tokenizer.decode(fields.tokens, skip_special=False)
    return {"prompt": text, "content": text}


def count_input(body: bytes, served: Served, config: ServeConfig) -> dict[str, Any]:
    """Answers POST /v1/chat/completions/input_tokens: how long a chat request's prompt would be, were it sent.

    Raises:
        InvalidRequestError: the request is at fault.
    """
    raw = parse_object(body)
    check_number_of_messages(raw.get("messages"), config)
    fields = parse_fields(ChatRequest, raw)
    check_model(fields.model, served)
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    prompt = chat_prompt(fields, limit, served, config)
    return {
        "object": "response.input_tokens",
        "input_tokens": len(prompt.ids),
        "max_model_len": served.context_length,
        **prompt.report,
    }
