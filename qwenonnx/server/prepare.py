"""From a request's body to what the engine gets; for worker threads, since long texts take long."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qwenonnx.engine.request import GenerationRequest
from qwenonnx.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from qwenonnx.server.answers import Answer, ChatAnswer, CompletionAnswer
from qwenonnx.server.choices import ChoiceRules
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.jsonbody import parse_object
from qwenonnx.server.prepared import Prepared
from qwenonnx.server.prompts import chat_prompt, last_turns, text_prompts
from qwenonnx.server.sampling import sampling_params
from qwenonnx.server.schema import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationFields, parse_fields
from qwenonnx.server.served import Served
from qwenonnx.text.fill_in import fill_in_ends

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is the same for all choices of a request."""

    limit: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()


def prepare_chat(body: bytes, served: Served, config: ServeConfig) -> Prepared:
    """Prepares POST /v1/chat/completions.

    Raises:
        InvalidRequestError: the request is at fault.
    """
    raw = parse_object(body)
    check_number_of_messages(raw.get("messages"), config)
    fields = parse_fields(ChatRequest, raw)
    check_model(fields.model, served)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs", code="invalid_value")
    if last_turns(fields, config) is None:
        _check_messages_fit(fields, served)
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    limit = config.max_tokens_default if limit is None else limit
    prompt = chat_prompt(fields, limit, served, config)
    tokenizer = served.tokenizer if fields.logprobs else None
    answer = ChatAnswer(
        f"chatcmpl-{uuid.uuid4().hex}", served.model_name, int(time.time()), tokenizer, extra=prompt.report
    )
    plan = _Plan(limit, (fields.top_logprobs or 0) if fields.logprobs else None, stop_token_ids=fields.stop_token_ids)
    rules = ChoiceRules(tokenizer=tokenizer)
    return _prepared(fields, [(tuple(prompt.ids), rules)], plan, answer, served, config)


def prepare_completion(body: bytes, served: Served, config: ServeConfig) -> Prepared:
    """Prepares POST /v1/completions.

    Raises:
        InvalidRequestError: the request is at fault.
    """
    fields = parse_fields(CompletionRequest, parse_object(body))
    check_model(fields.model, served)
    if fields.echo and fields.suffix:
        raise InvalidRequestError("echo and suffix exclude each other; send one of them.", param="echo")
    limit = fields.max_tokens
    if limit is None:
        limit = DEFAULT_COMPLETION_TOKENS if config.max_tokens_default is None else config.max_tokens_default
    # Without new tokens there is only the prompt to tell about, and the engine must run to tell its probabilities.
    mute = limit == 0
    if mute and not fields.echo:
        raise InvalidRequestError("max_tokens must be at least 1, or echo be true.", param="max_tokens")
    tokenizer = served.tokenizer if fields.logprobs is not None else None
    prompts = []
    for prompt in text_prompts(fields, served):
        told = prompt.ids if fields.echo and tokenizer is not None else ()
        rules = ChoiceRules(prompt.text if fields.echo else None, told, mute, tokenizer)
        prompts.append((prompt.ids, rules))
    plan = _Plan(
        max(limit, 1),
        fields.logprobs,
        fields.logprobs if fields.echo else None,
        fields.stop_token_ids | (fill_in_ends(served.tokenizer) if fields.suffix else frozenset()),
    )
    answer = CompletionAnswer(f"cmpl-{uuid.uuid4().hex}", served.model_name, int(time.time()), tokenizer)
    return _prepared(fields, prompts, plan, answer, served, config)


def check_model(model: str | None, served: Served) -> None:
    """Refuses names of other models.

    Raises:
        ModelNotFoundError: it is one.
    """
    if model is not None and model not in (served.model_name, *served.aliases):
        raise ModelNotFoundError(f"The model {model[:200]!r} is not served here; {served.model_name!r} is.")


def check_number_of_messages(messages: Any, config: ServeConfig) -> None:
    """Refuses absurdly many messages before they are looked at, since looking at a million takes seconds.

    Raises:
        InvalidRequestError: there are more than the server takes.
    """
    if isinstance(messages, list) and len(messages) > config.max_messages:
        raise InvalidRequestError(
            f"messages must hold at most {config.max_messages} messages, but it holds {len(messages)}.",
            param="messages",
            code="array_above_max_length",
        )


def check_prompt(prompt: Sequence[int], served: Served, param: str) -> None:
    """Refuses prompts that the model cannot be given.

    Raises:
        InvalidRequestError: it is empty, or has ids without a token.
        ContextLengthError: it leaves no room for an answer.
    """
    if not prompt:
        raise InvalidRequestError("The prompt is empty; it needs at least one token.", param=param)
    check_token_ids(prompt, served, param)
    # The engine checks this again, but does not know the name of the field.
    if len(prompt) >= served.context_length:
        raise ContextLengthError(len(prompt), served.context_length, param=param)


def check_token_ids(ids: Sequence[int] | frozenset[int], served: Served, param: str) -> None:
    """Refuses ids that stand for no token.

    Raises:
        InvalidRequestError: there is one.
    """
    if any(not 0 <= token_id < served.tokenizer.num_tokens for token_id in ids):
        raise InvalidRequestError(
            f"{param} has a token id outside of the vocabulary (0 to {served.tokenizer.num_tokens - 1}).", param=param
        )


def _prepared(
    fields: GenerationFields,
    prompts: Sequence[tuple[tuple[int, ...], ChoiceRules]],
    plan: _Plan,
    answer: Answer,
    served: Served,
    config: ServeConfig,
) -> Prepared:
    count = fields.n or 1
    if fields.best_of is not None and fields.best_of != count:
        raise InvalidRequestError(
            f"best_of must be n, which is {count}: choices are not ranked by this server.",
            param="best_of",
            code="unsupported_parameter",
        )
    if count * len(prompts) > MAX_CHOICES:
        raise InvalidRequestError(f"prompt times n must be at most {MAX_CHOICES} choices.", param="n")
    for prompt, _ in prompts:
        check_prompt(prompt, served, answer.prompt_param)
    check_token_ids(frozenset(fields.logit_bias), served, "logit_bias")
    check_token_ids(fields.stop_token_ids, served, "stop_token_ids")
    minimum = fields.min_tokens or 0
    if plan.limit is not None and minimum > plan.limit:
        raise InvalidRequestError(f"min_tokens is {minimum}, but max_tokens is {plan.limit}.", param="min_tokens")
    requests = tuple(
        GenerationRequest(
            prompt_ids=prompt,
            sampling=sampling_params(fields, served, config, choice),
            max_tokens=plan.limit,
            min_tokens=minimum,
            stop=fields.stop,
            ignore_eos=bool(fields.ignore_eos),
            request_id=answer.id,
            logprobs=plan.logprobs,
            stop_token_ids=plan.stop_token_ids,
            include_stop=bool(fields.include_stop_str_in_output),
            prompt_logprobs=plan.prompt_logprobs,
        )
        for prompt, _ in prompts
        for choice in range(count)
    )
    options = fields.stream_options
    return Prepared(
        requests=requests,
        rules=tuple(rules for _, rules in prompts for _ in range(count)),
        answer=answer,
        choices_per_prompt=count,
        stream=bool(fields.stream),
        include_usage=options is not None and bool(options.include_usage),
        timings=bool(fields.timings),
    )


def _check_messages_fit(fields: ChatRequest, served: Served) -> None:
    # Each message is at least one token, so that rendering this many could only end in the same refusal.
    if len(fields.messages) >= served.context_length:
        raise InvalidRequestError(
            f"This model's maximum context length is {served.context_length} tokens, but there are "
            f"{len(fields.messages)} messages.",
            param="messages",
            code="context_length_exceeded",
        )
