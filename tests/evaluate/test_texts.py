"""The evaluation texts: what comes with the program, and what users bring."""

from __future__ import annotations

from pathlib import Path

import prose
import pytest

import qwenonnx.evaluate
from qwenonnx.errors import UsageError
from qwenonnx.evaluate.texts import EvaluationText, bundled_texts, packaged_texts, read_texts
from qwenonnx.text.tokenizer import Tokenizer

FILES = sorted((Path(qwenonnx.evaluate.__file__).parent / "texts").iterdir())
# By file name: what this language has and the others do not.
CODE = {
    "c_code": "#include <",
    "javascript_code": "export function ",
    "python_code": "def ",
    "rust_code": "pub fn ",
    "sql_code": "CREATE TABLE ",
}
CHATS = ("chat", "chat_chinese")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {text.name: text.text for text in bundled_texts()}


def test_all_files_are_bundled_and_sorted_by_name(texts: dict[str, str]) -> None:
    assert [f"{name}.txt" for name in texts] == [file.name for file in FILES]


def test_there_are_languages_code_and_chats_and_nothing_else(texts: dict[str, str]) -> None:
    assert set(texts) == {*prose.LANGUAGES, *CODE, *CHATS}


@pytest.mark.parametrize("language", prose.LANGUAGES)
def test_prose_is_in_the_script_and_letters_of_its_language(language: str, texts: dict[str, str]) -> None:
    script, letters = prose.LANGUAGES[language]

    assert prose.main_script(texts[language]) == script
    assert set(letters) <= set(texts[language])


@pytest.mark.parametrize("name", CODE)
def test_code_is_in_its_language(name: str, texts: dict[str, str]) -> None:
    assert [other for other in texts if other.endswith("_code") and CODE[name] in texts[other]] == [name]


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_in_the_form_of_the_template(name: str, texts: dict[str, str]) -> None:
    assert prose.is_conversation(texts[name])
    assert prose.has_default_system_prompt(texts[name])


def test_the_second_chat_is_in_chinese(texts: dict[str, str]) -> None:
    assert sum("\u4e00" <= letter <= "\u9fff" for letter in texts["chat_chinese"]) > 150


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_are_clean_text(file: Path) -> None:
    prose.check_file(file)


def test_no_text_is_much_shorter_or_longer_than_the_others(texts: dict[str, str]) -> None:
    assert {name: len(text) for name, text in texts.items() if not 350 <= len(text) <= 1400} == {}


def test_no_sentence_comes_twice(texts: dict[str, str]) -> None:
    seen: set[str] = set()
    for name in (*prose.LANGUAGES, *CHATS):
        sentences = prose.sentences(texts[name])
        assert seen.isdisjoint(sentences), name
        seen |= sentences


@pytest.mark.model
def test_texts_have_some_300_tokens(texts: dict[str, str], model_tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_tokenizer_folder)

    counts = {name: len(tokenizer.encode(text)) for name, text in texts.items()}

    assert {name: count for name, count in counts.items() if not 240 <= count <= 370} == {}


def test_only_text_files_of_a_folder_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_texts_package" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    for name in ("b.txt", "a.txt", "b.md", "a.b.txt"):
        (folder / name).write_text(f"text of {name}", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert packaged_texts("some_texts_package", "inner") == [
        ("a", "text of a.txt"),
        ("a.b", "text of a.b.txt"),
        ("b", "text of b.txt"),
    ]


def test_own_texts_are_named_by_their_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("é 模型", encoding="utf-8")

    assert read_texts([tmp_path / "mine.txt"]) == [EvaluationText("mine.txt", "é 模型")]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "cannot be read as UTF-8"), (b"", "is empty"), (b" \n\t", "is empty"), (None, "cannot be read")],
)
def test_a_text_that_cannot_be_used_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(UsageError, match=rf"mine\.txt: .*{message}"):
        read_texts([path])
