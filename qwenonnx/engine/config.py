"""How the engine shares a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from qwenonnx.engine.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine shares the model.

    `prefill_chunk` tokens of a prompt run at once, fewer while answers are being written, which a chunk may delay by
    `max_step_delay` seconds. `max_running` requests run at once where the graph can batch, `max_queue` may wait.
    `kv_tokens` bounds the tokens whose keys and values are kept, over all requests and ended ones, of which there are
    `cached_rows` at least; None sets no bound but the runner's. `speculate` lets answers run ahead by prompt lookup,
    where that pays by `costs`.

    `timeout` seconds are what a request may take in all if it does not say so itself. When nobody has asked for
    anything for `save_after` seconds, rows are written to files where there is a folder for them, and after
    `release_after` seconds their memory is given back, or never with None.
    """

    prefill_chunk: int = 256
    max_queue: int = 64
    max_running: int = 16
    max_step_delay: float = 0.1
    cached_rows: int = 8
    kv_tokens: int | None = None
    speculate: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    timeout: float | None = None
    save_after: float = 10.0
    release_after: float | None = 900.0

    @classmethod
    def for_one(cls, prefill_chunk: int = 256) -> EngineConfig:
        """For one request at a time, of which only the last is kept."""
        return cls(prefill_chunk=prefill_chunk, max_running=1, cached_rows=0)

    @property
    def num_rows(self) -> int:
        """Rows of the KV cache."""
        return self.max_running + self.cached_rows


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of the schedule.

    Prompts run in chunks of at most `prefill_chunk` tokens, and of as many as `max_step_delay` seconds allow while
    answers are being written. At most `max_running` requests have a row at once, the others wait, `max_queue` of them.
    There are `num_rows` rows, with room for `kv_tokens` tokens over all of them. `speculate` lets answers run
    ahead by prompt lookup, where that pays by `costs`.
    """

    prefill_chunk: int
    max_queue: int
    max_running: int = 1
    num_rows: int = 1
    kv_tokens: int = 1 << 40
    max_step_delay: float = 0.1
    speculate: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
