"""Telling control tokens that a template writes from text of users that looks like them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# The private use areas: characters that no standard gives a meaning, so they rarely occur in text.
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlText:
    """Marks users' text before rendering, so that added tokens can be told apart afterwards.

    A mark, a character that occurs nowhere else, is put inside every added-token text that users typed. In
    the rendered prompt, an unmarked added token can then only come from the template.
    """

    def __init__(self, added_tokens: Iterable[str]) -> None:
        tokens = sorted((token for token in added_tokens if token), key=len, reverse=True)
        self._tokens = tokens
        alternatives = "|".join(map(re.escape, tokens)) or r"(?!)"
        self._whole = re.compile(f"({alternatives})")
        self._first = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)

    def unused_characters(self, value: Any) -> Iterator[str]:
        """Private characters that occur in no string of `value` and in no added token."""
        used = set().union(*self._tokens, *map(set, _strings(value)))
        return (chr(code) for area in _PRIVATE_USE for code in area if chr(code) not in used)

    def break_tokens(self, value: Any, mark: str) -> Any:
        """A copy of nested mappings, lists and strings with `mark` put into every token in them."""
        if isinstance(value, str):
            return self._first.sub(rf"\1{mark}", value)
        if isinstance(value, Mapping):
            return {self.break_tokens(k, mark): self.break_tokens(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_tokens(item, mark) for item in value]
        return value

    def split(self, text: str) -> list[str]:
        """Cuts text at the added tokens in it: ordinary text at even places, tokens at odd ones."""
        return self._whole.split(text)


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
