"""The calibration texts: what comes with the program, and what users bring."""

from __future__ import annotations

import json
import re
from pathlib import Path

import prose
import pytest

import qwenonnx.quantize
from qwenonnx.errors import UsageError
from qwenonnx.evaluate.texts import EvaluationText, bundled_texts
from qwenonnx.quantize.calibration_texts import bundled_calibration, read_calibration
from qwenonnx.text.tokenizer import Tokenizer

FILES = sorted((Path(qwenonnx.quantize.__file__).parent / "calibration").iterdir())
LANGUAGES = {**prose.LANGUAGES, "portuguese": ("LATIN", "ãõç")}
# By file name: what this language has and the others do not.
CODE = {
    "cpp_code": "std::",
    "go_code": "func (",
    "java_code": "public final class ",
    "python_code": "async def ",
    "shell_script": "#!/usr/bin/env bash",
    "typescript_code": "export function ",
}
CHATS = ("chat_code", "chat_english", "chat_spanish")
OTHERS = ("chat_tools", "document", "tables_and_lists")
SHARED_LENGTH = 40


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {file.stem: text for file, text in zip(FILES, bundled_calibration(), strict=True)}


def test_all_files_are_bundled_and_sorted_by_name(texts: dict[str, str]) -> None:
    assert [*texts.values()] == [file.read_text(encoding="utf-8") for file in FILES]
    assert {file.suffix for file in FILES} == {".txt"}


def test_there_are_languages_code_chats_and_documents(texts: dict[str, str]) -> None:
    assert set(texts) == {*LANGUAGES, *CODE, *CHATS, *OTHERS}


@pytest.mark.parametrize("language", LANGUAGES)
def test_prose_is_in_the_script_and_letters_of_its_language(language: str, texts: dict[str, str]) -> None:
    script, letters = LANGUAGES[language]

    assert prose.main_script(texts[language]) == script
    assert set(letters) <= set(texts[language])


@pytest.mark.parametrize("name", CODE)
def test_code_is_in_its_language(name: str, texts: dict[str, str]) -> None:
    assert [other for other in CODE if CODE[name] in texts[other]] == [name]


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_in_the_form_of_the_template(name: str, texts: dict[str, str]) -> None:
    assert prose.is_conversation(texts[name])
    assert prose.has_default_system_prompt(texts[name])


def test_the_tool_call_is_in_the_form_of_the_template(texts: dict[str, str]) -> None:
    text = texts["chat_tools"]
    between = {
        tag: re.findall(rf"\n<{tag}>\n([^<]+)\n</{tag}>", text) for tag in ("tools", "tool_call", "tool_response")
    }

    tools = [json.loads(line)["function"]["name"] for line in between["tools"][0].splitlines()]
    call = json.loads(between["tool_call"][-1])
    assert prose.is_conversation(text)
    assert not prose.has_default_system_prompt(text)
    assert call["name"] in tools
    assert set(call) == {"name", "arguments"}
    assert json.loads(between["tool_response"][0])


def test_the_document_is_markdown_around_valid_json(texts: dict[str, str]) -> None:
    (block,) = re.findall(r"```json\n(.+?)```", texts["document"], re.DOTALL)

    assert {"name", "sensors", "upload"} <= set(json.loads(block))
    assert "\n|---|" in texts["document"]


def test_tables_and_lists_are_full_of_figures(texts: dict[str, str]) -> None:
    text = texts["tables_and_lists"]

    assert sum(letter.isdigit() for letter in text) > len(text) / 8
    assert re.search(r"^- ", text, re.MULTILINE)
    assert re.search(r"^1\. ", text, re.MULTILINE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_are_clean_text(file: Path) -> None:
    prose.check_file(file)


def test_no_text_is_much_shorter_or_longer_than_the_others(texts: dict[str, str]) -> None:
    assert {name: len(text) for name, text in texts.items() if not 500 <= len(text) <= 2200} == {}


@pytest.mark.parametrize("evaluation", bundled_texts(), ids=lambda text: text.name)
def test_nothing_is_shared_with_an_evaluation_text(evaluation: EvaluationText, texts: dict[str, str]) -> None:
    windows = prose.windows(evaluation.text, SHARED_LENGTH)
    sentences = prose.sentences(evaluation.text)

    assert windows
    for name, text in texts.items():
        assert windows & prose.windows(text, SHARED_LENGTH) == set(), name
        assert sentences & prose.sentences(text) == set(), name


def test_a_shared_line_would_be_found() -> None:
    turn = "<|im_start|>user\nHow long is the coast\nof an island that nobody has ever measured?<|im_end|>\n"
    text = "He asked: how long is the coast of an island that nobody has ever measured? Nobody knew."

    assert len(prose.windows(turn, SHARED_LENGTH) & prose.windows(text, SHARED_LENGTH)) > 10
    assert prose.sentences("One is short. This one is long enough!") == {"One is short", "This one is long enough"}


@pytest.mark.model
def test_texts_have_400_to_520_tokens(texts: dict[str, str], model_tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_tokenizer_folder)

    counts = {name: len(tokenizer.encode(text)) for name, text in texts.items()}

    assert {name: count for name, count in counts.items() if not 400 <= count <= 520} == {}


def test_own_texts_come_in_the_order_given(tmp_path: Path) -> None:
    paths = [tmp_path / "b.txt", tmp_path / "a.txt"]
    for path in paths:
        path.write_text(f"text of {path.name}", encoding="utf-8")

    assert read_calibration(paths) == ["text of b.txt", "text of a.txt"]


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe", "cannot be read as UTF-8"), (b"\n", "is empty"), (None, "cannot be read")]
)
def test_a_text_that_cannot_be_used_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(UsageError, match=rf"mine\.txt: .*{message}"):
        read_calibration([path])
