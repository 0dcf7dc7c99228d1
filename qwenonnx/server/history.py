"""Conversations that have grown too long: which of their messages the model still gets to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qwenonnx.server.messages import ChatMessage

Encode = Callable[[Sequence[ChatMessage]], list[int]]


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """The prompt of what was kept, and how much was dropped."""

    prompt: list[int]
    dropped_turns: int
    dropped_messages: int


def keep_last_turns(messages: Sequence[ChatMessage], turns: int, longest: int, encode: Encode) -> KeptHistory:
    """Drops old turns until at most `turns` are left and their prompt has at most `longest` tokens.

    A turn is a message of the user with all that follows it, up to the user's next one. System and developer
    messages are always kept, and so is the last turn, even where it is too long.
    """
    turn_of = _turns(messages)
    total = turn_of[-1] + 1

    def kept(count: int) -> list[ChatMessage]:
        return [
            message
            for message, turn in zip(messages, turn_of, strict=True)
            if turn >= total - count or message.is_instruction
        ]

    def history(count: int, prompt: list[int]) -> KeptHistory:
        return KeptHistory(prompt, total - count, len(messages) - len(kept(count)))

    most = min(turns, total)
    prompt = encode(kept(most))
    if len(prompt) <= longest or most == 1:
        return history(most, prompt)
    # Longer histories have longer prompts, so that the longest one that fits is found by halving.
    low, high, best = 1, most, encode(kept(1))
    while high - low > 1:
        middle = (low + high) // 2
        prompt = encode(kept(middle))
        if len(prompt) <= longest:
            low, best = middle, prompt
        else:
            high = middle
    return history(low, best)


def _turns(messages: Sequence[ChatMessage]) -> list[int]:
    """The turn that each message belongs to, counted from 0; what comes before the first user is part of a turn too."""
    result, turn, is_open = [], 0, False
    for message in messages:
        if message.role == "user" and is_open:
            turn += 1
        is_open = is_open or not message.is_instruction
        result.append(turn)
    return result
