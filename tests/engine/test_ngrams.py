from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from qwenonnx.engine.ngrams import NgramIndex


def find(ids: list[int], near: int | None = None) -> tuple[int, int] | None:
    index = NgramIndex()
    index.extend(ids, len(ids))
    return index.find(ids, len(ids), near)


def test_the_longest_match_wins_over_a_newer_one() -> None:
    assert find([7, 1, 2, 3, 50, 9, 2, 3, 60, 7, 1, 2, 3]) == (4, 4)


def test_of_equal_matches_the_newest_wins() -> None:
    assert find([1, 2, 50, 1, 2, 60, 1, 2]) == (5, 2)


def test_of_equal_matches_one_where_the_copy_goes_on_is_preferred() -> None:
    ids = [9, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    assert find(ids) == (7, 2)
    assert find(ids, near=1) == (3, 2)
    assert find(ids, near=4) == (7, 2)


def test_a_longer_match_wins_over_a_near_one() -> None:
    assert find([9, 1, 2, 50, 7, 1, 2, 60, 7, 1, 2], near=1) == (7, 3)


def test_two_tokens_have_to_agree() -> None:
    assert find([1, 2, 3, 9, 3]) is None
    assert find([]) is None
    assert find([1]) is None
    assert find([1, 1]) is None
    assert find([1, 1, 1]) == (2, 2)


@given(st.lists(st.integers(0, 3), max_size=60), st.one_of(st.none(), st.integers(0, 70)), st.data())
def test_what_is_found_agrees_as_far_as_it_says(ids: list[int], near: int | None, data: st.DataObject) -> None:
    whole = find(ids, near)
    if whole is not None:
        place, count = whole
        assert 2 <= count <= place < len(ids)
        assert ids[place - count : place] == ids[len(ids) - count :]
        if count < 16 and place > count:
            assert ids[place - count - 1] != ids[len(ids) - count - 1]
    else:
        assert (*ids[-2:],) not in list(itertools.pairwise(ids))[:-1]
    in_pieces = NgramIndex()
    for length in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4))):
        in_pieces.extend(ids, length)
    in_pieces.extend(ids, len(ids))
    assert in_pieces.find(ids, len(ids), near) == whole
