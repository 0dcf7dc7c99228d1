"""Checking a checkpoint's chat template when it is exported, because a server could only refuse every chat."""

from __future__ import annotations

from pathlib import Path

from qwenonnx.errors import CheckpointError, PackageError
from qwenonnx.text.chat_template import ChatTemplate
from qwenonnx.text.tokenizer import Tokenizer, read_tokenizer_config

# Qwen2's own. Other models' templates have marks that look the same and are meant as ordinary text.
_CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def check_chat_template(folder: Path, tokenizer: Tokenizer) -> None:
    """Checks the chat template of the tokenizer files in `folder`, if they have one.

    Raises:
        CheckpointError: it is no valid Jinja (the message has the line), or writes control tokens that the
            tokenizer does not have, so that the model would not see them.
    """
    source = read_tokenizer_config(folder).get("chat_template")
    if source is None:
        return
    if not isinstance(source, str):
        raise CheckpointError("The checkpoint's chat template is not text; correct it in tokenizer_config.json.")
    try:
        ChatTemplate(source, tokenizer)
    except PackageError as error:
        reason, line = error.__cause__, getattr(error.__cause__, "lineno", None)
        what = getattr(reason, "message", None) or str(reason)
        raise CheckpointError(
            f"The checkpoint's chat template is not valid Jinja{f' in line {line}' if line else ''} ({what}); correct "
            "it in chat_template.jinja or tokenizer_config.json."
        ) from error
    missing = [token for token in _CONTROL_TOKENS if token in source and token not in tokenizer.added_tokens]
    if missing:
        raise CheckpointError(
            f"The checkpoint's chat template uses {', '.join(missing)}, which its tokenizer does not have as control "
            "tokens; the tokenizer is damaged or another model's, so download the checkpoint again."
        )
