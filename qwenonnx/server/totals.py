"""Counts and times of a whole answer, over all its choices."""

from __future__ import annotations

from typing import Any

from qwenonnx.engine.request import Finished, Timings, Usage


class Totals:
    """Sums over the choices that have finished.

    A prompt counts once, however many choices it has (`choices_per_prompt`); `mute` counts no completion tokens,
    because the client does not get them.
    """

    def __init__(self, choices_per_prompt: int = 1, *, mute: bool = False) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._mute = mute
        self._usage = Usage(0, 0, 0)
        self._timings = Timings(0.0, 0.0, 0.0)
        self._after_first = 0

    @property
    def usage(self) -> Usage:
        """Tokens of all prompts and choices."""
        return self._usage

    def add(self, index: int, event: Finished) -> None:
        """Takes the end of one choice."""
        usage, timings, more = self._usage, self._timings, event.usage
        is_first = index % self._choices_per_prompt == 0
        self._usage = Usage(
            usage.prompt_tokens + (more.prompt_tokens if is_first else 0),
            usage.completion_tokens + (0 if self._mute else more.completion_tokens),
            usage.cached_tokens + (more.cached_tokens if is_first else 0),
        )
        self._timings = Timings(
            timings.queue + event.timings.queue,
            timings.prefill + event.timings.prefill,
            timings.decode + event.timings.decode,
        )
        self._after_first += max(more.completion_tokens - 1, 0)

    def timings_object(self) -> dict[str, Any]:
        """What `timings: true` adds to an answer, under the names of llama.cpp's server."""
        usage, timings = self._usage, self._timings
        computed = usage.prompt_tokens - usage.cached_tokens
        return {
            "queue_ms": _milliseconds(timings.queue),
            "cache_n": usage.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": _milliseconds(timings.prefill),
            "prompt_per_second": _rate(computed, timings.prefill),
            "predicted_n": usage.completion_tokens,
            "predicted_ms": _milliseconds(timings.decode),
            "predicted_per_second": _rate(self._after_first, timings.decode),
        }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if seconds > 0 else None
