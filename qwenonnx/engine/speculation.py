"""Prompt lookup: guessing the next tokens from what was said before (Saxena, "Prompt Lookup Decoding", 2023).

Text that is quoted, edited or continued repeats long pieces of its prompt. Where the newest tokens occurred before,
what followed them then is a draft for what follows now. The model reads the whole draft in one step and each
position's token is chosen as ever, so the answer is the same as without; only the tokens up to the first wrong one are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence

# The newest tokens that have to have occurred before.
_MATCH = 3
_SHORTEST, _LONGEST = 3, 15
# After a draft that was wrong from the start, so many tokens are written without one; twice as many each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64


class PromptLookup:
    """Drafts for one sequence of tokens; the more of them are right, the longer they get."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self._length = _SHORTEST
        self._pause = _FIRST_PAUSE
        self._resume_at = 0

    def draft(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow; none where nothing is known or drafts have not paid lately.

        `token_ids` is all of the sequence so far; it only ever grows from call to call.
        """
        limit = min(limit, self._length)
        # The newest occurrence that is not the end itself.
        for end in range(max(self._indexed, _MATCH), len(token_ids)):
            self._ends[tuple(token_ids[end - _MATCH : end])] = end
        self._indexed = max(self._indexed, len(token_ids))
        if limit < 1 or len(token_ids) < max(_MATCH, self._resume_at):
            return ()
        found = self._ends.get(tuple(token_ids[-_MATCH:]))
        return () if found is None else tuple(token_ids[found : found + limit])

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """Notes how many tokens of a draft were right; the sequence has `length` tokens now."""
        if accepted == drafted:
            self._length = min(2 * self._length + 1, _LONGEST)
        elif 2 * accepted < drafted:
            self._length = max(self._length // 2, _SHORTEST)
        if accepted:
            self._pause = _FIRST_PAUSE
        else:
            self._resume_at = length + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
