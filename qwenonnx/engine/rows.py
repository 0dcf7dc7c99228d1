"""What the rows of the KV cache hold, and which of them a prompt should have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Prompts run in chunks of at least two tokens. The fused graph gives the same bits either way, but in other programs'
# graphs a single one takes another attention kernel, which sums in another order (onnxruntime 1.32).
SMALLEST_CHUNK = 2

# Tokens whose keys lie in one page of memory; a row grows and shrinks by so many.
PAGE_TOKENS = 16

# A shorter common beginning is not worth copying.
_LEAST_COPY = 16

# What a row has behind a common beginning is given up for a new prompt if it is not longer than this.
_LEAST_KEPT = 64


@dataclass(frozen=True, slots=True)
class RowMove:
    """Something to do with the cache's memory before the next step.

    `swap` exchanges the first `lengths` tokens of two rows, `copy` copies so many from `source` to `target`, and
    `release` gives back what `source` has behind the first of `lengths`.
    """

    kind: Literal["swap", "copy", "release"]
    source: int
    target: int
    lengths: tuple[int, int]


@dataclass(slots=True)
class Row:
    """The token ids whose keys and values lie in a row from position 0 on, and how much of its memory is in use.

    They stay when a request ends, so that one that begins alike runs only what differs (a conversation's next turn
    repeats all that came before). Only what was really computed is listed. `touched` tokens count against the budget,
    and `last_used` orders the rows by age. A `pinned` row stays as it is; others only copy from it.
    """

    token_ids: list[int] = field(default_factory=list)
    touched: int = 0
    last_used: int = 0
    pinned: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def common(self, prompt_ids: Sequence[int]) -> int:
        """Length of the longest common beginning with a prompt (a list), found by halving."""
        low, high = 0, min(len(self.token_ids), len(prompt_ids))
        while low < high:
            middle = (low + high + 1) // 2
            if self.token_ids[low:middle] == prompt_ids[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def touch(self, length: int) -> None:
        """Counts the memory of so many tokens."""
        self.touched = max(self.touched, pages(length))


class Rows:
    """All rows, within a budget of tokens over all of them. Work on the memory itself is left in `take_moves`."""

    def __init__(self, count: int, budget: int) -> None:
        self._rows = [Row() for _ in range(count)]
        self._budget = budget // PAGE_TOKENS * PAGE_TOKENS
        self._moves: list[RowMove] = []
        self._tick = 0

    def __getitem__(self, slot: int) -> Row:
        return self._rows[slot]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def touched(self) -> int:
        """Tokens whose memory is in use, over all rows."""
        return sum(row.touched for row in self._rows)

    def has_room(self, length: int) -> bool:
        """Whether the memory of so many tokens is there without anything being emptied."""
        return self.touched + pages(length) <= self._budget

    def fill(self, slot: int, token_ids: list[int]) -> None:
        """Notes what was put into a row."""
        self._rows[slot].token_ids = token_ids
        self._rows[slot].touch(len(token_ids))
        self.use(slot)

    def take_moves(self) -> list[RowMove]:
        """What has to be done with the memory before the next step, in this order; the list is handed over."""
        moves, self._moves = self._moves, []
        return moves

    def place(
        self, prompt_ids: list[int], *, reserve: int, busy: Collection[int], fresh: bool
    ) -> tuple[int, int] | None:
        """Finds an idle row for a prompt and makes room for `reserve` tokens in it.

        Returns the row and how many tokens of the prompt it holds already; None where there is no row or no room.
        The prompt's last tokens are never counted: one must run again to yield logits, and with a second one it runs
        as it did before (see SMALLEST_CHUNK). `fresh` lets nothing be reused.
        """
        idle = [slot for slot, row in enumerate(self._rows) if slot not in busy and not row.pinned]
        if not idle:
            return None
        usable = [] if fresh else prompt_ids[: max(0, len(prompt_ids) - SMALLEST_CHUNK)]
        common = [row.common(usable) for row in self._rows]
        best = max(range(len(common)), key=lambda slot: (common[slot], slot in idle, -slot))
        oldest = min(idle, key=lambda slot: (self._rows[slot].last_used, slot))
        slot, source = oldest, None
        if best in idle and common[best] and (len(self._rows[best]) - common[best] <= _LEAST_KEPT or len(idle) == 1):
            slot = best
        elif common[best] >= _LEAST_COPY:
            # The row with that beginning is being written, or has much else that is worth keeping.
            source = best
            slot = min((s for s in idle if s != best), key=lambda s: (self._rows[s].last_used, s), default=oldest)
        row = self._rows[slot]
        extra = max(0, pages(reserve) - row.touched)
        if not self.make_room(extra, busy={*busy, slot, *([source] if source is not None else [])}):
            if source is None or not self.make_room(extra, busy={*busy, slot}):
                return None
            source = None
        length = common[best] if source is not None else common[slot]
        if source is not None:
            row.token_ids = self._rows[source].token_ids[:length]
            self._moves.append(RowMove("copy", source, slot, (length, length)))
        else:
            del row.token_ids[length:]
        row.touch(reserve)
        self.use(slot)
        return slot, length

    def make_room(self, extra: int, *, busy: Collection[int]) -> bool:
        """Empties idle rows, the longest unused first, until `extra` more tokens fit; False where they cannot."""
        while self.touched + extra > self._budget:
            idle = [slot for slot, row in enumerate(self._rows) if slot not in busy and row.touched and not row.pinned]
            if not idle:
                return False
            self.release(min(idle, key=lambda slot: self._rows[slot].last_used))
        return True

    def grow(self, slots: Sequence[int], count: int = 1, *, busy: Collection[int]) -> bool:
        """Makes room for `count` more tokens in each of some rows; False where there is none."""
        lengths = {slot: len(self._rows[slot]) + count for slot in slots}
        extra = sum(max(0, pages(length) - self._rows[slot].touched) for slot, length in lengths.items())
        if extra and not self.make_room(extra, busy=busy):
            return False
        for slot, length in lengths.items():
            self._rows[slot].touch(length)
        return True

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        a, b = self._rows[first], self._rows[second]
        self._moves.append(RowMove("swap", first, second, (len(a), len(b))))
        self._rows[first], self._rows[second] = b, a
        # The smaller one gives back what the larger one had taken where it now lies.
        if a.touched != b.touched:
            slot, keep = (first, b.touched) if a.touched > b.touched else (second, a.touched)
            self._moves.append(RowMove("release", slot, slot, (keep, 0)))

    def trim(self, slot: int) -> None:
        """Gives back the memory of a row that its tokens do not need."""
        row = self._rows[slot]
        if row.touched > pages(len(row)):
            self._moves.append(RowMove("release", slot, slot, (len(row), 0)))
            row.touched = pages(len(row))

    def release(self, slot: int) -> None:
        """Empties a row and gives its memory back."""
        self._rows[slot].token_ids = []
        self._rows[slot].last_used = 0
        self.trim(slot)

    def use(self, slot: int) -> None:
        """Makes a row the one that was used last."""
        self._tick += 1
        self._rows[slot].last_used = self._tick


def chunk_end(start: int, size: int, total: int) -> int:
    """Where a chunk of about `size` tokens ends, so that no lone last token is left for one of its own."""
    end = min(start + size, total)
    return total if total - end < SMALLEST_CHUNK else end


def pages(length: int) -> int:
    """A number of tokens, rounded up to whole pages."""
    return -(-length // PAGE_TOKENS) * PAGE_TOKENS
