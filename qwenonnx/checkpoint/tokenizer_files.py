"""The tokenizer of a Hugging Face folder: finding it, checking it, and writing it in one form.

The one form is `tokenizer.json` (the tokenizer itself) plus `tokenizer_config.json` (which names the special
tokens and holds the chat template); slower or older spellings are turned into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwenonnx.checkpoint.weight_files import RE_DOWNLOAD
from qwenonnx.errors import CheckpointError
from qwenonnx.files import write_text

_MODERN = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SLOW = ("vocab.json", "merges.txt")


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        CheckpointError: the file is missing, or is something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: this is not JSON ({error}); {RE_DOWNLOAD}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, but it holds a {type(value).__name__}.")
    return value


def find_tokenizer(folder: Path) -> Path:
    """The main tokenizer file of a folder: tokenizer.json, or else vocab.json (with merges.txt).

    Raises:
        CheckpointError: there is neither.
    """
    if (folder / _MODERN).exists():
        return folder / _MODERN
    if all((folder / name).exists() for name in _SLOW):
        return folder / _SLOW[0]
    raise CheckpointError(
        f"{folder}: there is no tokenizer ({_MODERN}, or {' and '.join(_SLOW)}); download these files as well."
    )


def write_folder_tokenizer(source: Path, target: Path, vocab_size: int) -> None:
    """Writes the tokenizer of `source` into `target`, with the chat template inside tokenizer_config.json.

    Raises:
        CheckpointError: there is no tokenizer, it is damaged, or it has ids beyond `vocab_size`.
    """
    if find_tokenizer(source).name == _MODERN:
        _write(source, target, vocab_size)
        return
    with tempfile.TemporaryDirectory() as converted:
        _convert_slow(source, Path(converted))
        _write(Path(converted), target, vocab_size)


def check_token_ids(tokenizer: dict[str, Any], vocab_size: int, where: str) -> None:
    """Checks that every id of a tokenizer.json has a row in the embedding.

    Raises:
        CheckpointError: the file has another form, or an id is too large.
    """
    try:
        largest = max(
            [
                *tokenizer["model"]["vocab"].values(),
                *(token["id"] for token in tokenizer.get("added_tokens") or []),
            ]
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{where}: this is not a tokenizer file; {RE_DOWNLOAD}.") from error
    if largest >= vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has ids up to {largest}, but the model's vocabulary has {vocab_size} "
            "rows; the tokenizer and the weights are not of the same model."
        )


def _write(source: Path, target: Path, vocab_size: int) -> None:
    path = source / _MODERN
    tokenizer = read_json_object(path)
    check_token_ids(tokenizer, vocab_size, str(path))
    if (source / _CONFIG).exists():
        config = read_json_object(source / _CONFIG)
    else:
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    template = source / "chat_template.jinja"
    if template.exists():
        config["chat_template"] = template.read_text(encoding="utf-8")
    elif isinstance(named := config.get("chat_template"), list):
        # Several named templates: the one for plain chats is called "default".
        config["chat_template"] = {entry["name"]: entry["template"] for entry in named}.get("default")
    # The file goes over as it is: one byte-level vocabulary is large, and nothing in it has to change.
    write_text(target / _MODERN, path.read_text(encoding="utf-8"))
    write_text(target / _CONFIG, json.dumps(config, ensure_ascii=False, indent=2) + "\n")


def _convert_slow(source: Path, target: Path) -> None:
    with _quiet_transformers():
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(str(source), local_files_only=True, use_fast=True).save_pretrained(
                str(target)
            )
        except Exception as error:
            raise CheckpointError(
                f"{source}: {' and '.join(_SLOW)} cannot be converted to {_MODERN} ({error}); "
                "download the original files again."
            ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keeps transformers' advice (no PyTorch found, regex warnings) from the user's terminal."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(before)
