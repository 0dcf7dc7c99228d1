from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenonnx.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.stopped


def oracle(stops: list[str], text: str) -> tuple[str, bool]:
    """The first stop string to be complete; of those that end there, the one that starts first."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s and s in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stopped"),
    [
        (["own fox"], "The quick brown fox jumps", "The quick br", True),
        (["own fox"], "abc own f", "abc own f", False),
        (["aab"], "aaab", "a", True),
        (["ENDING", "ND"], "END", "E", True),
        (["ENDING", "ND"], "ENDING", "E", True),
        (["abcd", "bcd", "cd"], "xabcd", "x", True),
        (["", "X"], "aXb", "a", True),
        ([""], "abc", "abc", False),
        ([], "abc", "abc", False),
        (["a\0b"], "xa\0by", "x", True),
    ],
)
def test_known_cases_however_the_text_is_cut(stops: list[str], text: str, expected: str, stopped: bool) -> None:
    assert run(stops, [text]) == (expected, stopped)
    assert run(stops, list(text)) == (expected, stopped)


@given(
    st.lists(st.text("ab", max_size=5), max_size=9),
    st.lists(st.text("abc", max_size=6), max_size=12),
)
def test_equals_a_search_in_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == oracle(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), st.text("abc", max_size=20))
def test_holds_back_exactly_what_may_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    sent = "".join(map(matcher.push, text))
    if matcher.stopped:
        return
    held = text[len(sent) :]
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    assert held == max((s for s in beginnings if text.endswith(s)), key=len, default="")


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["X"])
    assert matcher.push("aXb") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_stop_strings_match_as_given_and_composed() -> None:
    decomposed = unicodedata.normalize("NFD", "yếu")
    composed = unicodedata.normalize("NFC", "yếu")
    assert decomposed != composed
    assert run([decomposed], [f"a {composed} b"]) == ("a ", True)
    assert run([decomposed], [f"a {decomposed} b"]) == ("a ", True)
    assert run([composed], [f"a {composed} b"]) == ("a ", True)
    assert run([composed], [f"a {decomposed} b"]) == (f"a {decomposed} b", False)
