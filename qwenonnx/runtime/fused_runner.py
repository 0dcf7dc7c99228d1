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
from qwenonnx.runtime.kv_slab import KvSlab
from qwenonnx.runtime.ort import load_onnxruntime
from qwenonnx.runtime.session import SessionConfig, open_session


class FusedRunner:
    """A fused package in memory with a KV cache of `num_slots` rows; see `engine.runner.ModelRunner`.

    Past and present are bound to the same memory, so attention appends in place. A prompt chunk on top of earlier
    tokens is only possible for one row at a time (a limit of GroupQueryAttention).
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
        self._slab = KvSlab(config, num_slots, min(context_length or config.context_length, config.context_length))
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
        return self._slab.capacity

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._config.vocab_size

    def prefill(self, slot: int, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Runs a prompt chunk in one row; returns the logits `[vocab]` of its last token."""
        ids = np.asarray(token_ids, dtype=np.int64)[None]
        rows = np.array([ids.size - 1], dtype=np.int64)
        logits = self._run(slot, ids, [start + ids.size], rows, self._logits[:1])
        return np.asarray(logits[0])

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        """Runs one token for each of the first rows; returns logits `[n, vocab]`."""
        count = len(token_ids)
        ids = np.asarray(token_ids, dtype=np.int64)[:, None]
        rows = np.arange(count, dtype=np.int64)
        return self._run(0, ids, [start + 1 for start in starts], rows, self._logits[:count])

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        """Runs a chunk in one row and returns the logits of all its tokens `[n, vocab]`, in a new array."""
        ids = np.asarray(token_ids, dtype=np.int64)[None]
        out = np.empty((ids.size, self.vocab_size), dtype=np.float32)
        return self._run(slot, ids, [start + ids.size], np.arange(ids.size, dtype=np.int64), out)

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

    def release_memory(self) -> None:
        """Gives the cache's memory back; every row is empty after it."""
        self._slab.release()

    def end_profiling(self) -> Path:
        """Writes the profile asked for by `SessionConfig.profile_prefix` and returns its path."""
        return Path(self._session.end_profiling())

    def _run(
        self,
        slot: int,
        ids: NDArray[np.int64],
        lengths: Sequence[int],
        rows: NDArray[np.int64],
        out: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        ort = load_onnxruntime()

        binding = self._binding(slot, len(ids))
        values = {
            "input_ids": ids,
            "seqlens_k": np.asarray(lengths, dtype=np.int32) - np.int32(1),
            "total_sequence_length": np.array([max(lengths)], dtype=np.int32),
            "logits_rows": rows,
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
