"""What one row of the KV cache holds."""

from __future__ import annotations

from collections.abc import Sequence

# Prompts run in chunks of at least two tokens. A single one takes the attention kernel of decoding, which sums in
# another order; the int8 recipe's rounding turns such last bits into visible differences, so that a repeated prompt
# could get another answer. Chunks of two and more give the same bits however a prompt is cut (onnxruntime 1.32).
SMALLEST_CHUNK = 2


class KVRow:
    """The token ids whose keys and values lie in a row, from position 0 on.

    They stay when a request ends, so that the next one runs only what differs (a conversation's next turn
    repeats all that came before). Only what was really computed is listed.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def reuse(self, prompt_ids: Sequence[int]) -> int:
        """Keeps the longest common beginning with a prompt and returns its length.

        The prompt's last tokens are left out: one must run again to yield logits, and with a second one it runs as it
        did before (see SMALLEST_CHUNK).
        """
        limit = max(0, min(len(self._token_ids), len(prompt_ids) - SMALLEST_CHUNK))
        length = next((i for i in range(limit) if self._token_ids[i] != prompt_ids[i]), limit)
        self.truncate(length)
        return length

    def truncate(self, length: int) -> None:
        """Forgets everything from a position on, as before it is overwritten."""
        del self._token_ids[length:]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Lists tokens that were computed behind the others."""
        self._token_ids += token_ids
