"""Running the fused graph: prefill and decode over a KV slab, without copies of the cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.errors import EngineError
from qwenonnx.graph.names import past_names, present_names
from qwenonnx.runtime.attention_inputs import attention_inputs
from qwenonnx.runtime.kv_slab import KvSlab
from qwenonnx.runtime.ort import load_onnxruntime
from qwenonnx.runtime.session import SessionConfig, open_session

# Room behind the context: attention gets rows beside the tokens, and chunks of a step are padded to the longest.
# It is reserved, not touched.
SPARE_TOKENS = 2048


class FusedRunner:
    """A fused package in memory with a KV cache of `num_slots` rows; see `engine.runner.ModelRunner`.

    Past and present are bound to the same memory, so attention appends in place. A token's logits have the same bits
    however its step is made up (see `graph.attention`), as far as the package's linears allow it.
    """

    def __init__(
        self,
        model_path: Path,
        config: ModelConfig,
        session: SessionConfig,
        *,
        num_slots: int = 1,
        context_length: int | None = None,
    ) -> None:
        self._config = config
        self._session = open_session(model_path, session)
        self._context_length = min(context_length or config.context_length, config.context_length)
        self._slab = KvSlab(config, num_slots, self._context_length + SPARE_TOKENS)
        self._bindings: dict[tuple[int, int], Any] = {}
        self._logits = np.empty((num_slots, config.vocab_size), dtype=np.float32)
        self._lock = threading.Lock()
        self._current: Any = None

    @property
    def num_slots(self) -> int:
        """Rows of the KV cache."""
        return self._slab.slots

    @property
    def max_batch(self) -> int:
        """Rows that can run in one step."""
        return self._slab.slots

    @property
    def context_length(self) -> int:
        """Tokens that one row can hold."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._config.vocab_size

    def prefill(self, slot: int, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Runs a prompt chunk in one row; returns the logits `[vocab]` of its last token."""
        logits = self._run(slot, [token_ids], [start], np.array([len(token_ids) - 1], dtype=np.int64), self._logits[:1])
        return np.asarray(logits[0])

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        """Runs one token for each of the first rows; returns logits `[n, vocab]`."""
        count = len(token_ids)
        chunks = [[token_id] for token_id in token_ids]
        return self._run(0, chunks, starts, np.arange(count, dtype=np.int64), self._logits[:count])

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        """Runs a chunk in one row and returns the logits of all its tokens `[n, vocab]`, in a new array."""
        out = np.empty((len(token_ids), self.vocab_size), dtype=np.float32)
        return self._run(slot, [token_ids], [start], np.arange(len(token_ids), dtype=np.int64), out)

    def step(
        self, chunks: Sequence[Sequence[int]], starts: Sequence[int], logits_rows: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Runs a chunk of any length for each of the first rows; returns logits `[n, vocab]`, in a new array.

        Chunks may be prompts, single tokens, drafts to verify, or empty for a row that holds a token or more, which
        then stays as it is. `logits_rows` are the tokens, counted through all chunks, that get logits; by default the
        last of each chunk that has one. Every chunk but the longest must be followed by as much free room as that one
        takes, of which SPARE_TOKENS are behind the context.
        """
        counts = np.array([len(chunk) for chunk in chunks])
        rows = np.cumsum(counts)[counts > 0] - 1 if logits_rows is None else np.asarray(logits_rows, dtype=np.int64)
        out = np.empty((len(rows), self.vocab_size), dtype=np.float32)
        return self._run(0, chunks, starts, rows, out)

    def cancel(self) -> None:
        """Ends a run that is under way in another thread; it raises EngineError there."""
        with self._lock:
            if self._current is not None:
                self._current.terminate = True

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Makes the first tokens of a row those of another one."""
        self._slab.copy(source, target, length)

    def swap_rows(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchanges two rows."""
        self._slab.swap(first, second, first_length, second_length)

    def release_row(self, slot: int, keep: int) -> None:
        """Gives back a row's memory behind its first tokens."""
        self._slab.release_row(slot, keep)

    def row_views(self, slot: int, length: int) -> list[NDArray[Any]]:
        """Keys and values `[kv_heads, length, head_dim]` of a row's first tokens, all layers in order; no copies."""
        return self._slab.row(slot, length)

    def release_memory(self) -> None:
        """Gives the cache's memory back; every row is empty after it."""
        self._slab.release()

    def end_profiling(self) -> Path:
        """Writes the profile asked for by `SessionConfig.profile_prefix` and returns its path."""
        return Path(self._session.end_profiling())

    def _run(
        self,
        slot: int,
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int],
        rows: NDArray[np.int64],
        out: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        ort = load_onnxruntime()

        self._check_room([len(chunk) for chunk in chunks], starts)
        binding = self._binding(slot, len(chunks))
        values = {
            "input_ids": np.concatenate([np.asarray(chunk, dtype=np.int64) for chunk in chunks])[None],
            "logits_rows": rows,
            **attention_inputs(self._config, [len(chunk) for chunk in chunks], starts),
        }
        # OrtValues share the arrays' memory and keep them alive; `bind_cpu_input` would not.
        for name, array in values.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(out))
        options = ort.RunOptions()
        with self._lock:
            self._current = options
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:  # onnxruntime's exceptions share no base class
            reason = "cancelled" if options.terminate else " ".join(str(error).split())
            raise EngineError(f"the model run failed: {reason}") from error
        finally:
            with self._lock:
                self._current = None
        return out

    def _check_room(self, counts: Sequence[int], starts: Sequence[int]) -> None:
        """The cache has spare room behind the context, so the graph itself would not notice."""
        longest = max(counts)
        for count, start in zip(counts, starts, strict=True):
            if start + count > self._context_length or start + longest >= self._slab.capacity:
                raise EngineError(
                    f"the model run failed: {count} tokens after {start}, beside a chunk of {longest}, do not fit in "
                    f"a context of {self._context_length}"
                )

    def _binding(self, slot: int, count: int) -> Any:
        """The binding of the cache rows `[slot, slot + count)`, made once for each such range."""
        ort = load_onnxruntime()

        if (slot, count) not in self._bindings:
            binding = self._session.io_binding()
            rows = self._slab.rows(slot, count)
            for past, present, array in zip(past_names(self._config), present_names(self._config), rows, strict=True):
                value = ort.OrtValue.ortvalue_from_numpy(array)
                binding.bind_ortvalue_input(past, value)
                binding.bind_ortvalue_output(present, value)
            self._bindings[slot, count] = binding
        return self._bindings[slot, count]
