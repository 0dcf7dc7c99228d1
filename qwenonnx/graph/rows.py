"""Which tokens a value of the graph has rows for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """Which tokens a value has rows for: `name` is an input with one entry for each, `dims` how many axes it has.

    Hidden states of all tokens are `[batch, sequence, features]`, those of the rows that get logits `[rows, features]`;
    below, `[..., features]` stands for either.
    """

    name: str
    dims: int


ALL_TOKENS = Rows("input_ids", 2)
LOGITS_ROWS = Rows("logits_rows", 1)
