"""What is wrong with a request, before anything is queued."""

from __future__ import annotations

from qwenonnx.engine.request import GenerationRequest
from qwenonnx.errors import ContextLengthError, InvalidRequestError

# All stop strings of a request together; more than any client needs, and it bounds the matcher's memory.
MAX_STOP_CHARACTERS = 16_384


def check_request(request: GenerationRequest, vocab_size: int, context_length: int) -> None:
    """Checks prompt and values.

    Raises:
        InvalidRequestError: the prompt is empty, or a value is out of its range.
        ContextLengthError: the prompt leaves no room for a token.
    """
    if not request.prompt_ids:
        raise InvalidRequestError("The prompt is empty; send at least one token.", param="prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        raise InvalidRequestError(f"The prompt holds a token id outside of 0..{vocab_size - 1}.", param="prompt")
    if len(request.prompt_ids) >= context_length:
        raise ContextLengthError(len(request.prompt_ids), context_length)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, but it is {request.max_tokens}.", param="max_tokens")
    if request.timeout is not None and not request.timeout > 0:
        raise InvalidRequestError(f"timeout must be more than 0, but it is {request.timeout}.", param="timeout")
    if sum(map(len, request.stop)) > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"The stop strings have more than {MAX_STOP_CHARACTERS} characters together.", param="stop"
        )
