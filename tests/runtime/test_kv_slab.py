"""Memory of the KV cache."""

from __future__ import annotations

import numpy as np
import pytest
from packages import small_model

from qwenonnx.runtime.kv_slab import KvSlab
from qwenonnx.runtime.memory import STATUS, process_memory

MIB = 1 << 20
needs_accounting = pytest.mark.skipif(not STATUS.exists(), reason="this system has no /proc/self/status")


def test_rows_are_views_in_the_order_of_the_graph() -> None:
    config, _ = small_model()
    slab = KvSlab(config, slots=3, capacity=10)

    arrays = slab.rows(0, 3)
    middle = slab.rows(1, 1)
    for index, array in enumerate(middle):
        array[:] = index + 1

    assert len(arrays) == 4
    for index, array in enumerate(arrays):
        assert array.shape == (3, 2, 10, 16)
        assert array.dtype == np.float32
        assert not array[0].any()
        assert (array[1] == index + 1).all()
        assert not array[2].any()
    assert all(array.flags.c_contiguous for array in middle)


@needs_accounting
def test_memory_is_taken_as_it_is_written_and_given_back() -> None:
    config, _ = small_model()
    before = process_memory().anonymous
    slab = KvSlab(config, slots=64, capacity=2048)  # 64 MiB
    reserved = process_memory().anonymous

    for array in slab.rows(0, 16):
        array[:] = 1
    used = process_memory().anonymous
    slab.release()
    released = process_memory().anonymous

    assert reserved - before < MIB
    assert 15 * MIB < used - reserved < 18 * MIB
    assert released - reserved < MIB


@needs_accounting
def test_a_short_text_costs_pages_not_huge_ones() -> None:
    config, _ = small_model()
    slab = KvSlab(config, slots=8, capacity=32_768)
    before = process_memory().anonymous

    for array in slab.rows(0, 8):
        array[:, :, :16] = 1

    # 4 tensors of 8 slots and 2 heads, 1 KiB each: a page of 4 KiB apiece where they lie, and not 2 MiB.
    assert process_memory().anonymous - before < MIB


def test_released_memory_reads_as_zeros() -> None:
    config, _ = small_model()
    slab = KvSlab(config, slots=1, capacity=64)
    for array in slab.rows(0, 1):
        array[:] = 7

    slab.release()

    assert not any(array.any() for array in slab.rows(0, 1))


def test_exchanged_rows_keep_their_tokens_and_give_back_the_rest() -> None:
    config, _ = small_model()
    slab = KvSlab(config, slots=3, capacity=4096)
    long, short = slab.rows(0, 1), slab.rows(2, 1)
    for index, (first, second) in enumerate(zip(long, short, strict=True)):
        first[:, :, :2048], second[:, :, :64] = index + 1, -index - 1

    slab.swap(0, 2, 2048, 64)

    for index, (first, second) in enumerate(zip(long, short, strict=True)):
        assert (first[:, :, :64] == -index - 1).all()
        assert (second[:, :, :2048] == index + 1).all()
        assert not first[:, :, 64:].any()  # of 2,048 tokens, only the pages of 64 are left
