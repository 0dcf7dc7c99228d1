"""The tokenizer of a GGUF file, rebuilt as the tokenizer.json and tokenizer_config.json of Qwen2.

GGUF keeps tokens, their types and the merges; the normalizer, the pre-tokenizer and the exact flags of the
added tokens are implied by `tokenizer.ggml.pre` = "qwen2" and are put back here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwenonnx.checkpoint.weight_files import RE_DOWNLOAD
from qwenonnx.config import ModelConfig
from qwenonnx.errors import CheckpointError
from qwenonnx.files import write_text

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END_OF_TEXT, _END_OF_TURN = "<|endoftext|>", "<|im_end|>"

# Added tokens that decode to visible text in the published tokenizer, though GGUF files flag most as control
# tokens.
_VISIBLE = frozenset(
    {
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    }
)


class GgufTokenizer:
    """Reads the `tokenizer.*` keys of a GGUF file's metadata; `where` names the file in messages.

    Raises:
        CheckpointError: keys are missing or do not fit each other, or the tokenizer is not of Qwen2's kind.
    """

    def __init__(self, metadata: Mapping[str, Any], config: ModelConfig, where: str) -> None:
        self._where = where
        self._context_length = config.context_length
        self._chat_template = metadata.get("tokenizer.chat_template")
        if not isinstance(self._chat_template, str | None):
            raise CheckpointError(f"{where}: tokenizer.chat_template is not a string; {RE_DOWNLOAD}.")
        kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "qwen2")
        if kind != "gpt2" or pre not in ("qwen2", "default"):
            raise CheckpointError(
                f"{where}: the tokenizer is {kind!r} with pre-tokenizer {pre!r}, but Qwen2 has 'gpt2' with "
                "'qwen2'; use a file made by a current converter."
            )
        self._tokens = self._strings(metadata, "tokenizer.ggml.tokens")
        self._merges = [tuple(merge.split(" ")) for merge in self._strings(metadata, "tokenizer.ggml.merges")]
        types = metadata.get("tokenizer.ggml.token_type")
        if not isinstance(types, list) or len(types) != len(self._tokens):
            raise CheckpointError(f"{where}: tokens and token types differ in number; {RE_DOWNLOAD}.")
        if len(self._tokens) > config.vocab_size:
            raise CheckpointError(
                f"{where}: there are {len(self._tokens)} tokens but only {config.vocab_size} embedding "
                f"rows; {RE_DOWNLOAD}."
            )
        self._vocab = {
            token: i for i, (token, type_) in enumerate(zip(self._tokens, types, strict=True)) if type_ == _NORMAL
        }
        self._added = {
            token: i
            for i, (token, type_) in enumerate(zip(self._tokens, types, strict=True))
            if type_ not in (_NORMAL, _UNUSED)
        }
        used = Counter(token for token, type_ in zip(self._tokens, types, strict=True) if type_ != _UNUSED)
        if len(used) < used.total():
            raise CheckpointError(f"{where}: the token {used.most_common(1)[0][0]!r} is listed twice; {RE_DOWNLOAD}.")
        self._special = {
            token for token, i in self._added.items() if types[i] != _USER_DEFINED and token not in _VISIBLE
        }
        self._eos = self._token_id(metadata, "tokenizer.ggml.eos_token_id")
        self._bos = self._token_id(metadata, "tokenizer.ggml.bos_token_id")
        self._pad = self._token_id(metadata, "tokenizer.ggml.padding_token_id")
        if self._eos is None:
            raise CheckpointError(f"{where}: the metadata has no tokenizer.ggml.eos_token_id; {RE_DOWNLOAD}.")
        if self._eos not in self._added.values():
            raise CheckpointError(
                f"{where}: tokenizer.ggml.eos_token_id is {self._eos}, which is {self._tokens[self._eos]!r}, an "
                f"ordinary token, so that texts would end in their midst; {RE_DOWNLOAD}."
            )

    @property
    def token_ids(self) -> dict[str, int]:
        """The ids that config.json names: beginning and end of text."""
        ids = {"bos_token_id": self._bos, "eos_token_id": self._eos}
        return {key: value for key, value in ids.items() if value is not None}

    def generation_config(self) -> dict[str, Any]:
        """The ids that end a text: the file's, and Qwen's end of turn and end of text where they exist."""
        ends = [self._eos, self._added.get(_END_OF_TURN), self._added.get(_END_OF_TEXT)]
        ids = {"bos_token_id": self._bos, "pad_token_id": self._pad}
        return {
            **{key: value for key, value in ids.items() if value is not None},
            "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        }

    def write(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` into `folder`.

        Raises:
            CheckpointError: the merges do not fit the tokens.
        """
        from tokenizers import Tokenizer

        text = json.dumps(self.tokenizer_json(), ensure_ascii=False)
        try:
            pretty = Tokenizer.from_str(text).to_str(pretty=True)
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(
                f"{self._where}: the tokenizer is not consistent ({error}); {RE_DOWNLOAD}."
            ) from error
        write_text(folder / "tokenizer.json", pretty)
        write_text(
            folder / "tokenizer_config.json",
            json.dumps(self.tokenizer_config(), ensure_ascii=False, indent=2) + "\n",
        )

    def tokenizer_json(self) -> dict[str, Any]:
        """The tokenizer in the form of the `tokenizers` library, laid out as the published one."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        split = {"type": "Split", "pattern": {"Regex": _PATTERN}, "behavior": "Isolated", "invert": False}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, **self._flags(token)} for token, i in self._added.items()],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": self._vocab,
                "merges": self._merges,
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """What transformers' AutoTokenizer wants beside it; the chat template only if the file has one."""
        config: dict[str, Any] = {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {str(i): self._flags(token) for token, i in self._added.items()},
            "additional_special_tokens": [
                token for token, i in self._added.items() if token in self._special and i != self._pad
            ],
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": self._tokens[self._eos] if self._eos is not None else None,
            "errors": "replace",
            "model_max_length": self._context_length,
            "pad_token": self._tokens[self._pad] if self._pad is not None else None,
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        }
        if self._chat_template is not None:
            config["chat_template"] = self._chat_template
        return config

    def _flags(self, token: str) -> dict[str, Any]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"content": token, **flags, "special": token in self._special}

    def _strings(self, metadata: Mapping[str, Any], key: str) -> list[str]:
        value = metadata.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise CheckpointError(f"{self._where}: the metadata has no list of strings {key}; {RE_DOWNLOAD}.")
        return value

    def _token_id(self, metadata: Mapping[str, Any], key: str) -> int | None:
        value = metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < len(self._tokens)):
            raise CheckpointError(f"{self._where}: {key} is {value!r}, which is no token's id; {RE_DOWNLOAD}.")
        return value
