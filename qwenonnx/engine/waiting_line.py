"""The requests that have no row of the cache yet."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from qwenonnx.engine.sequence import Sequence
from qwenonnx.errors import QueueFullError

# Bounds of the estimate of when to try again, in seconds.
_RETRY_LIMITS = (1.0, 60.0)


class WaitingLine:
    """Higher priorities first; first come, first served among equals. At most `limit` may wait, cancelled ones aside.

    Who was given a row and has to wait again keeps the place of its arrival, so that nobody gets before it who came
    later.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sequences: list[Sequence] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(not sequence.cancel_requested for sequence in self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __bool__(self) -> bool:
        return bool(self._sequences)

    @property
    def first(self) -> Sequence:
        """Whose turn it is; there must be one."""
        return self._sequences[0]

    def add(self, sequence: Sequence, *, free: int, seconds: float) -> None:
        """Takes a new request; `free` more than the limit may come, as they have a row at once.

        `seconds` is how long it takes until somebody leaves, as far as is known.

        Raises:
            QueueFullError: too many wait already.
        """
        waiting = len(self)
        if waiting >= self._limit + free:
            low, high = _RETRY_LIMITS
            raise QueueFullError(
                f"{waiting} requests are waiting already; try again later.",
                retry_after=min(max(seconds, low), high),
                position=waiting + 1,
                limit=self._limit,
            )
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Takes a request that has waited before, at its old place and whatever the limit."""
        insort(self._sequences, sequence, key=lambda other: (-other.request.priority, other.arrival))

    def remove(self, sequence: Sequence) -> bool:
        """Takes a request out; False if it does not wait."""
        if sequence not in self._sequences:
            return False
        self._sequences.remove(sequence)
        return True

    def clear(self) -> list[Sequence]:
        """Takes out all, in order."""
        sequences, self._sequences = self._sequences, []
        return sequences
