"""The memory of the KV cache: reserved at once, touched only as it is used."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig

# Nearly all of it is never touched, so none is set aside (Linux's MAP_NORESERVE, which Python 3.11 does not name).
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)


class KvSlab:
    """Keys and values of all layers, as arrays `[slots, kv_heads, capacity, head_dim]` in one mapping.

    The mapping is private, anonymous and without huge pages: a token then costs its 24 KiB or so, not a huge page in
    each of the 2 * layers * kv_heads places that it is written to. (Pages of a shared one would outlive `release`.)
    """

    def __init__(
        self, config: ModelConfig, slots: int, capacity: int, dtype: type[np.float32] | type[np.float16] = np.float32
    ) -> None:
        shape = (config.num_layers * 2, slots, config.num_kv_heads, capacity, config.head_dim)
        self._map = mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize, flags=_FLAGS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._arrays: NDArray[Any] = np.frombuffer(self._map, dtype=dtype).reshape(shape)
        self._base = self._arrays.__array_interface__["data"][0]
        self.slots = slots
        self.capacity = capacity

    def rows(self, start: int, count: int) -> list[NDArray[Any]]:
        """The rows `[start, start + count)` of each cache tensor, in the graph's order; views, not copies."""
        return [array[start : start + count] for array in self._arrays]

    def row(self, slot: int, length: int) -> list[NDArray[Any]]:
        """The first tokens of a row, `[kv_heads, length, head_dim]` of each cache tensor; views, not copies."""
        return [array[slot, :, :length] for array in self._arrays]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of a row to another one."""
        for array in self._arrays:
            array[target, :, :length] = array[source, :, :length]

    def swap(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchanges the first tokens of two rows.

        What a shorter row leaves free is given back tensor by tensor, so that a long row never takes memory twice.
        """
        for array in self._arrays:
            kept = array[first, :, :first_length].copy()
            array[first, :, :second_length] = array[second, :, :second_length]
            array[second, :, :first_length] = kept
            if first_length > second_length:
                self._give_back(array[first], second_length)
            else:
                self._give_back(array[second], first_length)

    def release_row(self, slot: int, keep: int) -> None:
        """Gives the memory of one row behind its first `keep` tokens back to the system, as far as whole pages go."""
        for array in self._arrays:
            self._give_back(array[slot], keep)

    def _give_back(self, row: NDArray[Any], keep: int) -> None:
        """The same for a row `[kv_heads, capacity, head_dim]` of one tensor."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for head in row:
            start = head[keep:].__array_interface__["data"][0] - self._base
            end = start + head[keep:].nbytes
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if (end := end // mmap.PAGESIZE * mmap.PAGESIZE) > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def release(self) -> None:
        """Gives the memory back to the system; all contents become zero."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
