"""Prompt lookup: guessing the next tokens from what was said before (Saxena, "Prompt Lookup Decoding", 2023).

Text that is quoted, edited or continued repeats long pieces of its prompt. Where the newest tokens occurred before,
what followed them then is a draft for what follows now. The model reads the whole draft in one step, and each
position's token is chosen as ever, one draw from the request's generator for each token of the answer. So the answer
is the one without drafts, greedy or not, and no token is accepted or refused by chance; only the tokens up to the
first wrong guess are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenonnx.engine.ngrams import NgramIndex
from qwenonnx.engine.step_costs import StepCosts

# How often guesses are right after 0, 1, 2-3, 4-7, 8-15, and 16 or more agreeing tokens, before any was checked.
_FIRST_RATES = (0.1, 0.2, 0.3, 0.5, 0.75, 0.9)
# How much a guess counts in these rates.
_RATE_WEIGHT = 0.08

_LONGEST = 15

# A draft has to promise so much more than a step without; estimates err.
_MARGIN = 1.05


class PromptLookup:
    """Drafts for one sequence of tokens.

    For every token of the answer there is a guess, drafted or not, so that it is known without cost how often guesses
    are right, by how many tokens agreed before them. Drafts are as long as pays by these rates and by the costs of
    steps; where none pays there is none.
    """

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._seen: int | None = None
        # The place of the guess for the next token, and how many tokens before it agree.
        self._source: int | None = None
        self._agreeing = 0
        # Where text that was being copied would go on after one other token.
        self._aligned: int | None = None
        self._rates = list(_FIRST_RATES)

    def draft(self, token_ids: Sequence[int], limit: int, costs: StepCosts, rate: float = 1.0) -> tuple[int, ...]:
        """At most `limit` tokens that may follow; none where that is not expected to pay.

        `token_ids` is all of the sequence so far; it only ever grows from call to call. `rate` is what has to be
        surpassed, in tokens by the duration of a step of one token.
        """
        self._follow(token_ids)
        if self._source is None:
            return ()
        count = self._length(min(limit, _LONGEST), costs, rate * _MARGIN)
        guesses = list(token_ids[self._source : self._source + count])
        while len(guesses) < count:  # the end repeats itself
            guesses.append(guesses[len(guesses) - (len(token_ids) - self._source)])
        return tuple(guesses)

    def _length(self, limit: int, costs: StepCosts, rate: float) -> int:
        """How many tokens promise most tokens by time; 0 where none surpasses `rate`."""
        best, expected, chance = 0, 1.0, 1.0
        for count in range(1, limit + 1):
            chance *= self._rates[_bucket(self._agreeing + count - 1)]
            expected += chance
            if expected / costs.draft(count) > rate:
                best, rate = count, expected / costs.draft(count)
        return best

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Compares the guesses for all new tokens with them, and makes one for the next."""
        if self._seen is None:
            self._seen = len(token_ids)
            self._index.extend(token_ids, self._seen)
            self._search(token_ids, self._seen)
        for place in range(self._seen, len(token_ids)):
            self._index.extend(token_ids, place + 1)
            if self._source is None or not self._check(token_ids[self._source] == token_ids[place]):
                self._search(token_ids, place + 1)
        self._seen = len(token_ids)

    def _check(self, right: bool) -> bool:
        """Notes whether the guess was right, and goes on behind it if so."""
        bucket = _bucket(self._agreeing)
        self._rates[bucket] += _RATE_WEIGHT * (right - self._rates[bucket])
        if self._source is not None:
            self._aligned = self._source + 1
        if right:
            self._source, self._agreeing = self._aligned, self._agreeing + 1
        return right

    def _search(self, token_ids: Sequence[int], length: int) -> None:
        """Makes a guess for what comes after the first `length` tokens."""
        found = self._index.find(token_ids, length, self._aligned)
        if found is None and self._source is not None and self._agreeing:
            found = self._source + 1, 0  # one token was replaced by another, and the rest may be as it was
        self._source, self._agreeing = found or (None, 0)


def _bucket(agreeing: int) -> int:
    return min(agreeing.bit_length(), len(_FIRST_RATES) - 1)
