"""Parameters that would change the answer but are not built: refused, unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from qwenonnx.errors import InvalidRequestError

# Name -> values besides null that mean "without it".
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "json_schema": (),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def neutral_values(known: Container[str]) -> Mapping[str, tuple[Any, ...]]:
    """Fields that are refused, and values besides null with which they are not; `known` ones are left out."""
    return {name: values for name, values in _NEUTRAL.items() if name not in known}


def refuse_unsupported(body: Mapping[str, Any], known: Container[str]) -> None:
    """Checks a request for parameters that this server cannot honour; `known` ones it can.

    Raises:
        InvalidRequestError: there is one; `param` names it.
    """
    for name, neutral in neutral_values(known).items():
        value = body.get(name)
        # The type counts: true is not 1.
        if value is None or any(type(value) is type(other) and value == other for other in neutral):
            continue
        raise InvalidRequestError(
            f"{name} is not supported by this server with the value sent; leave it out.",
            param=name,
            code="unsupported_parameter",
        )
