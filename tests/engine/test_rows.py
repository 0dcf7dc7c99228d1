"""Which row a prompt gets, what is reused of it, and how the budget of memory is kept."""

from __future__ import annotations

import pytest

from qwenonnx.engine.rows import PAGE_TOKENS, Row, RowMove, Rows, pages

LONG = list(range(100, 200))


def rows_with(*contents: list[int], budget: int = 10_000) -> Rows:
    rows = Rows(len(contents), budget)
    for slot, token_ids in enumerate(contents):
        rows[slot].token_ids = list(token_ids)
        rows[slot].touch(len(token_ids))
        if token_ids:
            rows.use(slot)
    return rows


def place(
    rows: Rows, prompt: list[int], busy: set[int] | None = None, *, fresh: bool = False
) -> tuple[int, int] | None:
    return rows.place(prompt, reserve=len(prompt) + 1, busy=busy or set(), fresh=fresh)


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
def test_the_only_row_keeps_the_common_beginning(prompt: list[int], reused: int) -> None:
    rows = rows_with([1, 2, 3, 4, 5])
    assert place(rows, prompt) == (0, reused)
    assert rows[0].token_ids == prompt[:reused]
    assert rows.take_moves() == []


@pytest.mark.parametrize("length", [0, 1, 2, 7, 99, 100])
def test_common_beginnings_of_all_lengths_are_found(length: int) -> None:
    assert Row(LONG).common(LONG[:length] + [5] * 50) == length
    assert Row(LONG[:length]).common(LONG) == length


def test_a_conversation_goes_on_in_its_own_row() -> None:
    rows = rows_with([1] * 40, LONG, [2] * 40)
    assert place(rows, [*LONG, 7, 7, 7]) == (1, 100)
    assert rows.take_moves() == []


def test_a_beginning_that_another_one_is_using_is_copied() -> None:
    rows = rows_with(LONG, [])
    assert place(rows, LONG[:50] + [7] * 5, busy={0}) == (1, 50)
    assert rows.take_moves() == [RowMove("copy", 0, 1, (50, 50))]
    assert rows[0].token_ids == LONG


def test_a_short_beginning_of_a_long_row_is_copied_so_that_the_row_stays() -> None:
    rows = rows_with(LONG, [])
    assert place(rows, LONG[:30] + [7] * 5) == (1, 30)
    assert rows[0].token_ids == LONG


def test_nothing_in_common_takes_the_row_unused_longest() -> None:
    rows = rows_with([1] * 5, [2] * 5, [3] * 5)
    rows.use(0)
    assert place(rows, [9] * 5) == (1, 0)


def test_a_fresh_prompt_reuses_nothing() -> None:
    assert place(rows_with(LONG), LONG, fresh=True) == (0, 0)


def test_there_may_be_no_row() -> None:
    assert place(rows_with([], []), [1, 2], busy={0, 1}) is None


def test_idle_rows_make_room_oldest_first() -> None:
    rows = rows_with([1] * 32, [2] * 32, [], budget=80)
    assert place(rows, [9] * 30) == (2, 0)
    assert (rows[0].touched, rows[1].touched, rows[2].touched) == (0, 32, 32)
    assert RowMove("release", 0, 0, (0, 0)) in rows.take_moves()


def test_busy_rows_never_make_room() -> None:
    rows = rows_with([1] * 32, [], budget=48)
    assert place(rows, [9] * 30, busy={0}) is None
    assert rows[0].token_ids == [1] * 32


def test_a_row_to_copy_from_makes_room_if_nothing_else_can() -> None:
    rows = rows_with(LONG, [], budget=128)
    assert place(rows, LONG[:20] + [7] * 20) == (1, 0)
    assert rows.touched <= 128


def test_growing_counts_whole_pages_and_stops_at_the_budget() -> None:
    rows = rows_with([1] * 15, [], budget=2 * PAGE_TOKENS)
    for length in range(15, 32):
        assert rows.grow([0], busy={0})
        rows[0].token_ids.append(1)
        assert rows.touched == pages(length + 1)
    assert not rows.grow([0], busy={0})


def test_swapped_rows_take_their_memory_along() -> None:
    rows = rows_with(LONG, [1, 2])
    rows.swap(0, 1)
    assert (rows[0].token_ids, rows[1].token_ids) == ([1, 2], LONG)
    assert (rows[0].touched, rows[1].touched) == (16, 112)
    assert rows.take_moves() == [RowMove("swap", 0, 1, (100, 2)), RowMove("release", 0, 0, (16, 0))]
