"""From a request's body to what the engine gets; for worker threads, since long texts take long."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qwenonnx.engine.request import GenerationRequest
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from qwenonnx.server.answers import Answer, ChatAnswer, CompletionAnswer
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.jsonbody import parse_object
from qwenonnx.server.schema import ChatRequest, CompletionRequest, GenerationFields, parse_fields
from qwenonnx.server.served import Served

DEFAULT_COMPLETION_TOKENS = 16

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: what the engine gets, and how it is answered."""

    request: GenerationRequest
    answer: Answer
    stream: bool
    include_usage: bool


def prepare_chat(body: bytes, served: Served, config: ServeConfig) -> Prepared:
    """Prepares POST /v1/chat/completions.

    Raises:
        InvalidRequestError: the request is at fault.
    """
    raw = parse_object(body)
    _check_number_of_messages(raw.get("messages"), served)
    fields = parse_fields(ChatRequest, raw)
    _check_model(fields, served)
    continued = bool(fields.continue_final_message)
    if continued:
        last = fields.messages[-1]
        if fields.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; send one of them.",
                param="continue_final_message",
            )
        if last.role != "assistant" or last.tool_calls:
            raise InvalidRequestError(
                "continue_final_message needs a last message of the assistant, without tool_calls.",
                param="messages",
            )
    opened = not continued and fields.add_generation_prompt is not False
    try:
        prompt = served.chat_template.encode(
            [message.for_template() for message in fields.messages],
            add_generation_prompt=opened,
            continue_final_message=continued,
        )
    except InvalidRequestError as error:
        error.param = error.param or "messages"
        raise
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    answer = ChatAnswer(f"chatcmpl-{uuid.uuid4().hex}", served.model_name, int(time.time()))
    return _prepared(fields, prompt, limit, answer, served, config)


def prepare_completion(body: bytes, served: Served, config: ServeConfig) -> Prepared:
    """Prepares POST /v1/completions.

    Raises:
        InvalidRequestError: the request is at fault.
    """
    fields = parse_fields(CompletionRequest, parse_object(body))
    _check_model(fields, served)
    prompt = fields.prompt if isinstance(fields.prompt, list) else served.tokenizer.encode(fields.prompt)
    limit = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    answer = CompletionAnswer(f"cmpl-{uuid.uuid4().hex}", served.model_name, int(time.time()))
    return _prepared(fields, prompt, limit, answer, served, config)


def _prepared(
    fields: GenerationFields,
    prompt: Sequence[int],
    limit: int | None,
    answer: Answer,
    served: Served,
    config: ServeConfig,
) -> Prepared:
    param = answer.prompt_param
    if not prompt:
        raise InvalidRequestError("The prompt is empty; it needs at least one token.", param=param)
    if any(not 0 <= token_id < served.tokenizer.num_tokens for token_id in prompt):
        raise InvalidRequestError(
            f"The prompt has a token id outside of the vocabulary (0 to {served.tokenizer.num_tokens - 1}).",
            param=param,
        )
    # The engine checks this again, but does not know the name of the field.
    if len(prompt) >= served.context_length:
        raise ContextLengthError(len(prompt), served.context_length, param=param)
    if any(token_id >= served.tokenizer.num_tokens for token_id in fields.logit_bias):
        raise InvalidRequestError("logit_bias has a token id outside of the vocabulary.", param="logit_bias")
    minimum = fields.min_tokens or 0
    if limit is not None and minimum > limit:
        raise InvalidRequestError(f"min_tokens is {minimum}, but max_tokens is {limit}.", param="min_tokens")
    request = GenerationRequest(
        prompt_ids=tuple(prompt),
        sampling=_sampling(fields, served, config),
        max_tokens=limit,
        min_tokens=minimum,
        stop=fields.stop,
        ignore_eos=bool(fields.ignore_eos),
        request_id=answer.id,
    )
    options = fields.stream_options
    return Prepared(request, answer, bool(fields.stream), options is not None and bool(options.include_usage))


def _sampling(fields: GenerationFields, served: Served, config: ServeConfig) -> SamplingParams:
    """What the request says, else what the server was started with, else what the package says."""
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
        seed=None if fields.seed is None else fields.seed % 2**64,
    )


def _first(given: _T | None, option: _T | None, default: _T) -> _T:
    if given is not None:
        return given
    return default if option is None else option


def _check_model(fields: GenerationFields, served: Served) -> None:
    if fields.model is not None and fields.model not in (served.model_name, *served.aliases):
        raise ModelNotFoundError(f"The model {fields.model[:200]!r} is not served here; {served.model_name!r} is.")


def _check_number_of_messages(messages: Any, served: Served) -> None:
    # Each message is at least one token. Checked first, because checking a million messages takes seconds.
    if isinstance(messages, list) and len(messages) >= served.context_length:
        raise InvalidRequestError(
            f"This model's context is {served.context_length} tokens, too few for {len(messages)} messages.",
            param="messages",
            code="context_length_exceeded",
        )
