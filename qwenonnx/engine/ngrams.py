"""Where the newest tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens that have to agree at least, and tokens that are compared at most.
_LEAST, _MOST = 2, 16

# Earlier occurrences that are compared, the newest first.
_CANDIDATES = 8

# How far behind a wanted place an occurrence is looked for.
_NEAR = 16


class NgramIndex:
    """Finds the longest earlier match of a sequence's end. A token costs O(1) time, and memory until the end."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], int] = {}
        # For each place the one before it that follows the same two tokens, or 0.
        self._previous: list[int] = []

    def extend(self, token_ids: Sequence[int], length: int) -> None:
        """Takes in the first `length` tokens of a sequence that only grows from call to call."""
        for place in range(len(self._previous), length):
            if place < _LEAST:
                self._previous.append(0)
                continue
            key = (token_ids[place - 2], token_ids[place - 1])
            self._previous.append(self._newest.get(key, 0))
            self._newest[key] = place

    def find(self, token_ids: Sequence[int], length: int, near: int | None = None) -> tuple[int, int] | None:
        """The place of a token that came after what the first `length` tokens end with, and how many agree.

        Only places that were taken in are found. Of several that agree in the same number of tokens, one shortly
        behind `near` is preferred (text that is being copied goes on where it was), then the newest. None where not
        even two tokens occurred before.
        """
        if length < _LEAST:
            return None
        place = self._newest.get((token_ids[length - 2], token_ids[length - 1]), 0)
        best: tuple[int, int] | None = None
        if near is not None and place:
            for candidate in range(max(near, _LEAST), min(near + _NEAR, len(self._previous))):
                agreeing = _agreeing(token_ids, candidate, length)
                if agreeing >= _LEAST and (best is None or agreeing > best[1]):
                    best = (candidate, agreeing)
        for _ in range(_CANDIDATES):
            if not place:
                break
            agreeing = _agreeing(token_ids, place, length)
            if best is None or agreeing > best[1]:
                best = (place, agreeing)
            place = self._previous[place]
        return best


def _agreeing(token_ids: Sequence[int], place: int, length: int) -> int:
    """How many tokens before `place` are those at the end."""
    most = min(place, _MOST)
    for count in range(most):
        if token_ids[place - 1 - count] != token_ids[length - 1 - count]:
            return count
    return most
