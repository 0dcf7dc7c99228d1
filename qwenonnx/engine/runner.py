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

    def cancel(self) -> None:
        """Makes a `prefill` running in another thread end early with EngineError; without one it does nothing."""
