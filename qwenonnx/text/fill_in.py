"""Fill-in-the-middle prompts: what stands before and after a gap, in the control tokens of Qwen2.5-Coder."""

from __future__ import annotations

from collections.abc import Sequence

from qwenonnx.text.tokenizer import Tokenizer

PREFIX, SUFFIX, MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
# After these the gap is filled, or another file begins.
_ENDS = (PREFIX, SUFFIX, MIDDLE, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def can_fill_in(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has the three tokens that such a prompt is made of."""
    return {PREFIX, SUFFIX, MIDDLE} <= tokenizer.added_tokens.keys()


def fill_in_prompt(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The prompt whose continuation belongs between two texts (the form of the Qwen2.5-Coder report, section 3).

    The vocabulary must have the tokens; see `can_fill_in`.
    """
    ids = tokenizer.added_tokens
    return [ids[PREFIX], *before, ids[SUFFIX], *after, ids[MIDDLE]]


def fill_in_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end the filling."""
    return frozenset(tokenizer.added_tokens[token] for token in _ENDS if token in tokenizer.added_tokens)
