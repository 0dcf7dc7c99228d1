from __future__ import annotations

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import special_ids, tokenizer_config, tokenizer_json

from qwenonnx.errors import InvalidRequestError, PackageError
from qwenonnx.text.tokenizer import Tokenizer, end_token_ids

END = special_ids()["<|im_end|>"]
TEXT_END = special_ids()["<|endoftext|>"]


def write_tokenizer(folder: Path, **config: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()), encoding="utf-8")
    settings = {**tokenizer_config(), **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Tokenizer.load(folder)


def test_encode_recognises_added_tokens_and_encode_ordinary_does_not(tiny_tokenizer: Tokenizer) -> None:
    for token, token_id in special_ids().items():
        assert tiny_tokenizer.encode(f"a{token}b")[1:-1] == [token_id]
        ordinary = tiny_tokenizer.encode_ordinary(token)
        assert len(ordinary) > 1
        assert not set(ordinary) & set(special_ids().values())
        assert tiny_tokenizer.decode(ordinary) == token


@given(st.text())
def test_ordinary_text_survives_the_round_trip_in_nfc(tiny_tokenizer: Tokenizer, text: str) -> None:
    assert tiny_tokenizer.decode(tiny_tokenizer.encode_ordinary(text)) == unicodedata.normalize("NFC", text)


@given(st.data())
def test_decode_equals_that_of_the_tokenizers_library(
    tiny_checkpoint: Path, tiny_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    import tokenizers

    ids = data.draw(st.lists(st.integers(0, tiny_tokenizer.num_tokens - 1)))
    reference = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    for skip_special in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip_special)
        assert tiny_tokenizer.decode(ids, skip_special=skip_special) == expected


@pytest.mark.parametrize(
    "text", [" leading", "a  b", "    .", "it 's", "x \n\n  y", "don't", "\t\tif x :", "NUL\0 stays"]
)
def test_decode_does_not_clean_up(tiny_tokenizer: Tokenizer, text: str) -> None:
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


def test_decode_skips_special_tokens_but_not_plain_added_ones(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("<|im_start|><tool_call>x</tool_call><|im_end|>")
    assert tiny_tokenizer.decode(ids) == "<tool_call>x</tool_call>"
    assert tiny_tokenizer.decode(ids, skip_special=False) == "<|im_start|><tool_call>x</tool_call><|im_end|>"
    assert tiny_tokenizer.is_special(END)
    assert not tiny_tokenizer.is_special(special_ids()["<tool_call>"])


def test_ids_without_a_token_have_no_bytes(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.num_tokens == max(special_ids().values()) + 1
    for token_id in (-1, tiny_tokenizer.num_tokens, 511, 2**40):
        assert tiny_tokenizer.token_bytes(token_id) == b""
    assert tiny_tokenizer.decode([511]) == ""


def test_every_byte_has_its_token(tiny_tokenizer: Tokenizer) -> None:
    single = {tiny_tokenizer.token_bytes(token_id) for token_id in range(256)}
    assert single == {bytes([byte]) for byte in range(256)}


def test_half_a_surrogate_pair_is_refused_with_its_place(tiny_tokenizer: Tokenizer) -> None:
    for encode in (tiny_tokenizer.encode, tiny_tokenizer.encode_ordinary):
        with pytest.raises(InvalidRequestError, match="character 2"):
            encode("a \ud83d b")


def test_threads_share_one_tokenizer(tiny_tokenizer: Tokenizer) -> None:
    def work(seed: int) -> int:
        faults = 0
        for index in range(500):
            text = f"<|im_start|>user {seed}\nThe quick 😀 {'brown fox ' * (index % 17)}" + "é" * (index % 5)
            encode = tiny_tokenizer.encode if index % 2 else tiny_tokenizer.encode_ordinary
            faults += tiny_tokenizer.decode(encode(text), skip_special=False) != text
        return faults

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8


def test_truncation_in_the_file_is_switched_off(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("The quick brown fox jumps")) == "The quick brown fox jumps"


def test_loads_from_a_folder_of_any_name(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "mod el é 模型 🤖 50%")
    assert tokenizer.special_tokens == {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(PackageError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("nonsense", encoding="utf-8")
    with pytest.raises(PackageError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(PackageError, match="not a JSON object"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "generation_config",
    [
        {},
        {"eos_token_id": None},
        {"eos_token_id": END},
        {"eos_token_id": TEXT_END},
        {"eos_token_id": [END]},
        {"eos_token_id": [END, TEXT_END]},
        {"eos_token_id": [True, "x", -1, 10**6]},
    ],
)
def test_both_end_tokens_end_whatever_the_config_lists(
    tiny_tokenizer: Tokenizer, generation_config: dict[str, Any]
) -> None:
    assert end_token_ids(tiny_tokenizer, generation_config) == {END, TEXT_END}


def test_configs_may_name_further_end_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, eos_token={"content": "<|im_start|>", "special": True})
    start = special_ids()["<|im_start|>"]
    assert end_token_ids(tokenizer, {"eos_token_id": 7}) == {END, TEXT_END, start, 7}


@pytest.mark.model
def test_real_vocabulary(model_tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_tokenizer_folder)
    assert tokenizer.num_tokens == 151_665
    assert tokenizer.encode_ordinary("<|im_end|>") == [27, 91, 318, 6213, 91, 29]
    assert tokenizer.encode("<|im_end|>") == [151_645]
    assert tokenizer.encode("<tool_call>") == [151_657]
    assert 151_657 not in tokenizer.encode_ordinary("<tool_call>")
    assert end_token_ids(tokenizer, {}) == {151_643, 151_645}
    assert tokenizer.token_bytes(151_700) == b""
