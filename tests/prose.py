"""What a text that comes with the program must be like, whatever it is for."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import Path

# By file name: the script that most letters are of, and letters that tell the language from its neighbours.
LANGUAGES = {
    "arabic": ("ARABIC", "ةىض"),
    "chinese": ("CJK", "的这们"),
    "english": ("LATIN", "wky"),
    "french": ("LATIN", "éèà"),
    "german": ("LATIN", "äüß"),
    "hebrew": ("HEBREW", "שםת"),
    "hindi": ("DEVANAGARI", "कैं"),
    "japanese": ("HIRAGANA", "のをは"),
    "korean": ("HANGUL", "을는다"),
    "russian": ("CYRILLIC", "ыэё"),
    "spanish": ("LATIN", "ñóí"),
    "thai": ("THAI", "กที่"),
    "turkish": ("LATIN", "ığş"),
    "vietnamese": ("LATIN", "ơưđế"),
}
_TURN = re.compile(r"<\|im_start\|>(?:system|user|assistant)\n|<\|im_end\|>\n")
_CONVERSATION = re.compile(
    r"<\|im_start\|>system\n.+?<\|im_end\|>\n"
    r"(?:<\|im_start\|>user\n.+?<\|im_end\|>\n<\|im_start\|>assistant\n.+?<\|im_end\|>\n)+",
    re.DOTALL,
)
_SYSTEM_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def main_script(text: str) -> str:
    """The script of most letters and marks, by the first word of their Unicode names."""
    names = Counter(
        unicodedata.name(letter).split()[0] for letter in text if unicodedata.category(letter)[0] in ("L", "M")
    )
    return names.most_common(1)[0][0]


def has_default_system_prompt(text: str) -> bool:
    return text.startswith(f"<|im_start|>system\n{_SYSTEM_PROMPT}<|im_end|>\n")


def is_conversation(text: str) -> bool:
    """Whether the text is a system prompt and then turns of user and assistant, as the template writes them."""
    return _CONVERSATION.fullmatch(text) is not None and text.count("<|im_start|>") == text.count("<|im_end|>")


def windows(text: str, length: int) -> set[str]:
    """All substrings of this length, white space made one blank, without what the chat template wrote."""
    found: set[str] = set()
    for part in _own_parts(text):
        line = " ".join(part.split())
        found.update(line[start : start + length] for start in range(len(line) - length + 1))
    return found


def sentences(text: str) -> set[str]:
    """Sentences, or lines of code, that are long enough to be told apart."""
    pieces = (piece.strip() for part in _own_parts(text) for piece in re.split(r"[.!?。！？।؟\n]+", part))
    return {piece for piece in pieces if len(piece) >= 12}


def check_file(path: Path) -> None:
    """Fails where the bytes are not plain composed UTF-8 text of whole lines."""
    content = path.read_bytes()
    text = content.decode("utf-8")
    assert not content.startswith(b"\xef\xbb\xbf")
    assert "\r" not in text
    assert "\ufffd" not in text
    assert unicodedata.is_normalized("NFC", text)
    assert text == text.strip() + "\n"
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert not [letter for letter in text if unicodedata.category(letter)[0] == "C" and letter not in "\n\t"]


def _own_parts(text: str) -> list[str]:
    return [part for part in _TURN.split(text) if part.strip() and part != _SYSTEM_PROMPT]
