"""Penalties on tokens that occurred before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.sampling import SamplingParams


class Penalties:
    """Repetition, presence and frequency penalties of one request, counted as tokens arrive.

    The repetition penalty (Keskar et al., CTRL, 2019) divides positive logits and multiplies negative ones,
    for tokens of prompt and output, as in transformers and vLLM. Presence and frequency penalties are
    subtracted, for tokens of the output alone, as in OpenAI's API.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int], num_tokens: int) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        prompt = sorted({token_id for token_id in prompt_ids if token_id < num_tokens})
        if self._repetition == 1.0:
            prompt = []
        self._size = len(prompt)
        self._index = {token_id: index for index, token_id in enumerate(prompt)}
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = prompt
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether a request has any penalty at all."""
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    def add(self, token_id: int) -> None:
        """Counts a token of the output."""
        index = self._index.setdefault(token_id, self._size)
        if index == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Penalizes logits `[vocab]` in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        if self._repetition != 1.0:
            factor = np.float32(self._repetition)
            values = np.where(values > 0, values / factor, values * factor)
        values -= np.float32(self._frequency) * counts
        values -= np.float32(self._presence) * (counts > 0)
        logits[ids] = values
