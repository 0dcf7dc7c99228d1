from __future__ import annotations

import pytest

from qwenonnx.engine.kv_row import KVRow


@pytest.mark.parametrize(
    ("prompt", "reused"),
    [
        ([1, 2, 3], 1),  # an exact repeat still runs its last two tokens
        ([1, 2, 3, 9], 2),
        ([1, 2], 0),
        ([9, 2, 3], 0),
        ([1, 9, 3], 1),
        ([1], 0),
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], 5),
    ],
)
def test_reuses_the_common_beginning(prompt: list[int], reused: int) -> None:
    row = KVRow()
    row.extend([1, 2, 3])
    row.extend([4, 5])
    assert row.reuse(prompt) == reused
    assert len(row) == reused


def test_truncated_tokens_are_not_trusted() -> None:
    row = KVRow()
    row.extend([1, 2, 3])
    row.truncate(1)
    assert row.reuse([1, 2, 3, 4]) == 1
