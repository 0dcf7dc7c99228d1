"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs

from qwenonnx.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one answer's tokens into text as soon as characters are whole.

    Tokens are bytes, so a character may be spread over several of them. Bytes wait only while they can still
    become a character: what can no longer be one is replaced by U+FFFD at once. The joined texts, `flush` at
    the end included, equal `Tokenizer.decode` of all tokens. Special and undefined tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that became certain, possibly none."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Ends the answer: a character that is still incomplete becomes one U+FFFD."""
        return self._decoder.decode(b"", final=True)
