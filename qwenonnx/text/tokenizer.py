"""Text to token ids and back, with the `tokenizers` library alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from qwenonnx.errors import InvalidRequestError, PackageError

# The two tokens that end a turn or a text in Qwen2's vocabulary, whatever the generation config lists.
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Byte-level BPE with added tokens. Safe to use from several threads: nothing changes after loading.

    *Added* tokens stand beside the learned vocabulary and match as whole strings (`<|im_end|>`,
    `<tool_call>`); those of them that are *special* carry control and are left out of decoded text.
    """

    def __init__(self, full: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        self._full = full
        # The same model object without added tokens: costs no second vocabulary.
        self._plain = tokenizers.Tokenizer(full.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(full, part)) is not None:
                setattr(self._plain, part, value)
        added = full.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._added_ids = {content: token_id for token_id, content in self._added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_of = _byte_alphabet()
        self._num_tokens: int = max(full.get_vocab_size(), max(self._added, default=-1) + 1)
        self._config = dict(config)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json` and, where there is one, `tokenizer_config.json`.

        Raises:
            PackageError: tokenizer.json is missing, or one of the files is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise PackageError(f"{folder} has no tokenizer.json; export the checkpoint again.")
        try:
            full = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises bare Exception
            raise PackageError(f"{path} is damaged ({error}); export the checkpoint again.") from error
        # Some files carry their trainer's truncation; switched off here, before any thread shares the object.
        full.no_truncation()
        full.no_padding()
        return cls(full, read_tokenizer_config(folder))

    @property
    def num_tokens(self) -> int:
        """One more than the highest id that stands for a token; rows of the head behind it are padding."""
        return self._num_tokens

    @property
    def special_tokens(self) -> dict[str, str | list[str]]:
        """The named special tokens of tokenizer_config.json, as chat templates see them."""
        result: dict[str, str | list[str]] = {}
        for name in _SPECIAL_TOKEN_NAMES:
            if (text := _token_text(self._config.get(name))) is not None:
                result[name] = text
        extra = [_token_text(token) for token in self._config.get("additional_special_tokens") or ()]
        if extra:
            result["additional_special_tokens"] = [text for text in extra if text is not None]
        return result

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Text and id of every added token, special or not."""
        return self._added_ids

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its text in the vocabulary; None when there is none."""
        token_id: int | None = self._full.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether a token carries control and is left out of decoded text."""
        return token_id in self._special_ids

    def encode(self, text: str) -> list[int]:
        """Encodes text in which added tokens are recognised; nothing is put before or after it.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair.
        """
        return self._encode(self._full, text)

    def encode_ordinary(self, text: str) -> list[int]:
        """Encodes text in which nothing is a control token: `<|im_end|>` becomes ordinary pieces.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair.
        """
        return self._encode(self._plain, text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for ids without a token. Special tokens give their text."""
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        token: str | None = self._full.id_to_token(token_id) if 0 <= token_id < self._num_tokens else None
        if token is None:
            return b""
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:  # not written in the byte alphabet
            return token.encode()

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of the tokens, exactly as they spell it (no clean-up of spaces).

        Bytes that are no UTF-8 become U+FFFD, one for each maximal broken part.
        """
        special = self._special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in special)
        return data.decode("utf-8", errors="replace")

    @staticmethod
    def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            text.encode()  # the library would call it a wrong type
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text holds half of a surrogate pair at character {error.start}; send valid Unicode."
            ) from error
        # Of the library's ways to encode, this one skips offsets and lets other threads run meanwhile.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def end_token_ids(tokenizer: Tokenizer, generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Ids after which generation stops.

    These are `eos_token_id` of the generation config (an integer or a list), the tokenizer's own end token,
    and `<|im_end|>` and `<|endoftext|>` where the vocabulary has them, since either can end a Qwen2 answer.
    """
    listed = generation_config.get("eos_token_id")
    candidates = list(listed) if isinstance(listed, list | tuple) else [listed]
    names = [*END_TOKENS, tokenizer.special_tokens.get("eos_token")]
    candidates += [tokenizer.token_id(name) for name in names if isinstance(name, str)]
    return frozenset(
        token_id
        for token_id in candidates
        if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < tokenizer.num_tokens
    )


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The tokenizer_config.json of a folder; empty when there is none.

    Raises:
        PackageError: the file is no JSON object.
    """
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise PackageError(f"{path} is damaged ({error}); export the checkpoint again.") from error
    if not isinstance(config, dict):
        raise PackageError(f"{path} is not a JSON object; export the checkpoint again.")
    return config


def _token_text(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
