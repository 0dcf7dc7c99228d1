"""What the engine needs of a model: a KV cache with rows, prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ModelRunner(Protocol):
    """A model with a KV cache of `num_slots` rows of `context_length` tokens each. Not thread-safe.

    Lengths are implied by `start`: keys and values of positions `[0, start)` of a row must have been written
    before. Writing at a position makes everything behind it undefined, so rewinding needs no call.
    """

    @property
    def num_slots(self) -> int:
        """Rows of the KV cache."""

    @property
    def max_batch(self) -> int:
        """Rows that `decode` runs together; more of them run in turn."""

    @property
    def context_length(self) -> int:
        """Tokens that one row can hold, prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def prefill(self, slot: int, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Runs a chunk of a prompt at positions `[start, start + len)`; returns its last row's logits `[vocab]`.

        The array may be overwritten by the next call.
        """

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        """Runs one token for each of the slots 0..n-1 at position `starts[i]`; returns logits `[n, vocab]`.

        The array may be overwritten by the next call.
        """

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        """As `prefill`, but returns the logits of all tokens of the chunk `[n, vocab]`, in a new array."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` tokens of the row `target` those of `source`."""

    def swap_rows(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchanges two rows that hold so many tokens."""

    def release_row(self, slot: int, keep: int) -> None:
        """Gives back the memory of a row behind its first `keep` tokens."""

    def cancel(self) -> None:
        """Makes a `prefill` running in another thread end early with EngineError; without one it does nothing."""
