"""Beginnings of prompts that are there before anybody asks, and that stay when the process ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from qwenonnx.engine.prefix_files import DamagedError, PrefixFiles
from qwenonnx.engine.rows import Rows, chunk_end, pages
from qwenonnx.engine.steps import StepRunner
from qwenonnx.errors import UsageError

logger = logging.getLogger(__name__)

# Shorter rows are read again as quickly as they are loaded.
_LEAST_SAVED = 32


@runtime_checkable
class RowMemory(Protocol):
    """A runner whose rows lie in memory that can be read and written."""

    def row_views(self, slot: int, length: int) -> Sequence[NDArray[Any]]:
        """Keys and values `[kv_heads, length, head_dim]` of a row's first tokens, all layers in order; no copies."""


class PrefixCache:
    """Fills the rows of the cache from files and from known prompts, and writes them to files.

    For the engine's thread, or before that is started.
    """

    def __init__(self, rows: Rows, steps: StepRunner, memory: object, files: PrefixFiles | None = None) -> None:
        """`memory` is the runner; where it is no RowMemory, nothing is kept in files."""
        self._rows = rows
        self._steps = steps
        self._memory = memory if isinstance(memory, RowMemory) else None
        self._files = files
        # What is known to be whole, with the tokens of each.
        self._saved: dict[str, tuple[int, ...]] = {}
        if files is not None and self._memory is None:
            logger.warning("prefixes are not kept in %s: this graph's cache cannot be saved", files.folder)

    def restore(self, longest: int) -> int:
        """Loads files into empty rows, the ones used last first, as many as fit; returns how many.

        Files that are damaged, or have more than `longest` tokens, are left where they are.
        """
        if self._files is None or self._memory is None:
            return 0
        empty = [slot for slot in range(len(self._rows)) if not self._rows[slot].touched]
        found: list[tuple[int, list[int]]] = []
        for path in self._files.newest_first():
            try:
                token_ids = self._files.read_tokens(path)
                if not empty or len(token_ids) > longest or not self._rows.has_room(len(token_ids)):
                    continue
                self._files.read_into(path, self._memory.row_views(empty[-1], len(token_ids)))
            except (DamagedError, OSError) as error:
                logger.warning("%s is not used: %s", path, error)
                continue
            self._saved[path.name] = tuple(token_ids)
            self._rows[empty[-1]].touch(len(token_ids))
            found.append((empty.pop(), token_ids))
        for slot in empty:  # one of them may have been written to in vain
            self._steps.release(slot)
        for slot, token_ids in reversed(found):
            self._rows.fill(slot, token_ids)
        return len(found)

    def preload(self, prompts: Iterable[tuple[int, ...]], chunk: int) -> None:
        """Reads prompts, of which the rows then stay for good.

        Raises:
            UsageError: there is no room for them.
            EngineError: the model failed.
        """
        for prompt in prompts:
            ids = list(prompt)
            place = self._rows.place(ids, reserve=len(ids), busy=(), fresh=False)
            if place is None:
                raise UsageError(f"there is no room for a prompt of {len(ids):,} tokens to be loaded beforehand.")
            slot, start = place
            self.move()
            row = self._rows[slot]
            row.pinned = True
            while start < len(ids):
                end = chunk_end(start, chunk, len(ids))
                self._steps.run(slot, ids[start:end], start)
                row.token_ids += ids[start:end]
                start = end

    def save(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Writes the rows that are not in a file yet, the one used last first, until `stop` says so.

        What cannot be written is said in the log.
        """
        if self._files is None or self._memory is None:
            return
        order = sorted(range(len(self._rows)), key=lambda slot: -self._rows[slot].last_used)
        try:
            for age, slot in enumerate(slot for slot in order if len(self._rows[slot]) >= _LEAST_SAVED):
                token_ids = self._rows[slot].token_ids
                if self._files.path(token_ids).name not in self._saved:
                    arrays = self._memory.row_views(slot, len(token_ids))
                    if not self._files.write(token_ids, arrays, stop):
                        return
                    self._replace(tuple(token_ids))
                self._files.touch(token_ids, float(age))
            self._files.prune()
        except OSError as error:
            logger.warning("prefixes cannot be saved in %s: %s", self._files.folder, error)

    def release(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Saves what can be saved and empties all rows but those that stay for good; nobody may be using one."""
        self.save(stop)
        if stop():
            return
        for slot in range(len(self._rows)):
            if not self._rows[slot].pinned:
                self._rows.release(slot)
        self.move()

    def move(self) -> None:
        """Does what the rows want to have done with their memory."""
        for move in self._rows.take_moves():
            self._steps.move(move)

    def _replace(self, token_ids: tuple[int, ...]) -> None:
        """Notes a new file, and removes those that hold only a beginning of it."""
        if self._files is None:
            return
        for name, known in list(self._saved.items()):
            if known == token_ids[: len(known)]:
                (self._files.folder / name).unlink(missing_ok=True)
                del self._saved[name]
        self._saved[self._files.path(token_ids).name] = token_ids


def pinned_tokens(rows: Rows) -> int:
    """Tokens of memory that the rows take which stay for good."""
    return sum(pages(len(rows[slot])) for slot in range(len(rows)) if rows[slot].pinned)
