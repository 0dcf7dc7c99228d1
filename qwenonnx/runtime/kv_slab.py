"""The memory of the KV cache: reserved at once, touched only as it is used."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig


class KvSlab:
    """Keys and values of all layers, as arrays `[slots, kv_heads, capacity, head_dim]` in one mapping.

    The mapping is private, anonymous and without huge pages: a token then costs its 24 KiB or so, not a huge page in
    each of the 2 * layers * kv_heads places that it is written to. (Pages of a shared one would outlive `release`.)
    """

    def __init__(
        self, config: ModelConfig, slots: int, capacity: int, dtype: type[np.float32] | type[np.float16] = np.float32
    ) -> None:
        shape = (config.num_layers * 2, slots, config.num_kv_heads, capacity, config.head_dim)
        self._map = mmap.mmap(
            -1, int(np.prod(shape)) * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._arrays: NDArray[Any] = np.frombuffer(self._map, dtype=dtype).reshape(shape)
        self.slots = slots
        self.capacity = capacity

    def rows(self, start: int, count: int) -> list[NDArray[Any]]:
        """The rows `[start, start + count)` of each cache tensor, in the graph's order; views, not copies."""
        return [array[start : start + count] for array in self._arrays]

    def release(self) -> None:
        """Gives the memory back to the system; all contents become zero."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
