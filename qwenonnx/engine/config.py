"""How the engine shares a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine shares the model.

    `prefill_chunk` tokens of a prompt run at once, fewer while answers are being written, which a chunk may delay by
    `max_step_delay` seconds. `max_running` requests run at once where the graph can batch, `max_queue` may wait.
    `kv_tokens` bounds the tokens whose keys and values are kept, over all requests and ended ones, of which there are
    `cached_rows` at least; None sets no bound but the runner's. `speculate` lets an answer that is written alone run
    ahead by prompt lookup.
    """

    prefill_chunk: int = 256
    max_queue: int = 64
    max_running: int = 16
    max_step_delay: float = 0.1
    cached_rows: int = 8
    kv_tokens: int | None = None
    speculate: bool = False

    @classmethod
    def for_one(cls, prefill_chunk: int = 256) -> EngineConfig:
        """For one request at a time, of which only the last is kept."""
        return cls(prefill_chunk=prefill_chunk, max_running=1, cached_rows=0)

    @property
    def num_rows(self) -> int:
        """Rows of the KV cache."""
        return self.max_running + self.cached_rows
