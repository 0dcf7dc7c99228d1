from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import special_ids

from qwenonnx.text.detokenizer import Detokenizer
from qwenonnx.text.tokenizer import Tokenizer

TEXTS = [
    "😀",
    "👨‍👩‍👧‍👦",
    "🇫🇷",
    "赋",
    "สวัสดี",
    "مرحبا",
    "नमस्ते",
    " leading",
    "a  b",
    "    .",
    "it 's",
    "x \n\n  y",
    "don't",
    "\t\tif x :",
]


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    return [id_of[bytes([byte])] for byte in data]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_join_to_the_text_without_replacement_characters(tiny_tokenizer: Tokenizer, text: str) -> None:
    for ids in (tiny_tokenizer.encode(text), byte_ids(tiny_tokenizer, text.encode())):
        parts = deltas(tiny_tokenizer, ids)
        assert "".join(parts) == text
        assert parts[-1] == ""


def test_decomposed_characters_come_out_as_their_tokens_spell_them(tiny_tokenizer: Tokenizer) -> None:
    decomposed = "e\u0301"
    assert "".join(deltas(tiny_tokenizer, byte_ids(tiny_tokenizer, decomposed.encode()))) == decomposed


@given(st.lists(st.integers(0, 511)))
def test_deltas_join_to_decode_of_all(tiny_tokenizer: Tokenizer, ids: list[int]) -> None:
    parts = deltas(tiny_tokenizer, ids)
    assert "".join(parts) == tiny_tokenizer.decode(ids)
    for part in parts:
        part.encode()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_broken_character_gives_one_replacement_at_once(tiny_tokenizer: Tokenizer, length: int) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    for token_id in byte_ids(tiny_tokenizer, "😀".encode()[:length]):
        assert detokenizer.push(token_id) == ""
    assert detokenizer.push(byte_ids(tiny_tokenizer, b" ")[0]) == "\ufffd "
    assert detokenizer.flush() == ""


def test_an_impossible_byte_does_not_wait(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    assert [detokenizer.push(i) for i in byte_ids(tiny_tokenizer, b"\xffx")] == ["\ufffd", "x"]


def test_flush_ends_an_incomplete_character_with_one_replacement(tiny_tokenizer: Tokenizer) -> None:
    ids = byte_ids(tiny_tokenizer, "😀".encode()[:3])
    assert deltas(tiny_tokenizer, ids) == ["", "", "", "\ufffd"]
    assert tiny_tokenizer.decode(ids) == "\ufffd"


def test_special_tokens_and_ids_without_a_token_give_no_text(tiny_tokenizer: Tokenizer) -> None:
    ids = [special_ids()["<|im_start|>"], 511, special_ids()["<|im_end|>"], special_ids()["<tool_call>"]]
    assert deltas(tiny_tokenizer, ids) == ["", "", "", "<tool_call>", ""]
