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

from qwenonnx.checkpoint.weight_files import RE_DOWNLOAD, require_regular
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
        value = json.loads(_read_text(path))
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
    for name in (_MODERN, *_SLOW):
        require_regular(folder / name)
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


def check_end_token_ids(config: dict[str, Any], vocab_size: int, where: str) -> None:
    """Checks `eos_token_id` of a config.json or generation_config.json: absent, one id, or a list of ids.

    Raises:
        CheckpointError: it is something else, or there is no such id.
    """
    given = config.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise CheckpointError(
                f"{where}: eos_token_id has {token_id!r}, which is no id in the model's vocabulary of {vocab_size} "
                "rows; correct it there."
            )


def _read_text(path: Path) -> str:
    require_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: this is not UTF-8 ({error}); {RE_DOWNLOAD}.") from error


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
        config["chat_template"] = _read_text(template)
    elif isinstance(named := config.get("chat_template"), list):
        # Several named templates: the one for plain chats is called "default".
        by_name = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
        config["chat_template"] = by_name.get("default")
    # The file goes over as it is: one byte-level vocabulary is large, and nothing in it has to change.
    write_text(target / _MODERN, _read_text(path))
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
