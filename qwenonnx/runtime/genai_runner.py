"""Running graphs of onnxruntime-genai's builder: GroupQueryAttention, whose lengths come from an attention mask."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.errors import EngineError
from qwenonnx.runtime.graph_io import GraphIo
from qwenonnx.runtime.kv_slab import KvSlab
from qwenonnx.runtime.ort import load_onnxruntime
from qwenonnx.runtime.session import SessionConfig, open_session


class GenaiRunner:
    """A genai-style graph in memory; see `engine.runner.ModelRunner`.

    Past and present are bound to the same memory of full length, as with the fused graph. The mask of a row is as
    long as the longest row of the step, with ones for its own tokens.
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
        """Loads the graph.

        Raises:
            PackageError: onnxruntime cannot load it, or it is not a decoder with a KV cache of this configuration.
        """
        self._config = config
        self._session = open_session(model_path, session)
        self._io = GraphIo.of(self._session, config, model_path)
        capacity = min(context_length or config.context_length, config.context_length)
        dtype = np.float16 if self._io.cache_type is np.float16 else np.float32
        # Some exporters repeat keys and values for every query head.
        self._slab = KvSlab(replace(config, num_kv_heads=self._io.cache_shape[0]), num_slots, capacity, dtype)
        self._caches: dict[tuple[int, int], list[Any]] = {}
        self._only_last = False
        self._lock = threading.Lock()
        self._current: Any = None

    @property
    def num_slots(self) -> int:
        """Rows of the KV cache."""
        return self._slab.slots

    @property
    def max_batch(self) -> int:
        """Rows that can run in one step."""
        return 1 if self._io.single_row else self._slab.slots

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
        logits: NDArray[np.float32] = self._run(slot, np.asarray([token_ids]), [start])[0, -1]
        return logits

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        """Runs one token for each of the first rows; returns logits `[n, vocab]`."""
        if self._io.single_row:
            turns = enumerate(zip(token_ids, starts, strict=True))
            return np.stack([self._run(slot, np.asarray([[token]]), [start])[0, -1] for slot, (token, start) in turns])
        logits: NDArray[np.float32] = self._run(0, np.asarray(token_ids)[:, None], starts)[:, -1]
        return logits

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        """Runs a chunk in one row and returns the logits of all its tokens `[n, vocab]`, in a new array."""
        if not self._only_last:
            logits: NDArray[np.float32] = self._run(slot, np.asarray([token_ids]), [start])[0]
            if len(logits) == len(token_ids):
                return logits
            self._only_last = True
        rows = [self._run(slot, np.asarray([[token]]), [start + at])[0, -1] for at, token in enumerate(token_ids)]
        return np.stack(rows)

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

    def _run(self, slot: int, ids: NDArray[np.int64], starts: Sequence[int]) -> NDArray[np.float32]:
        """Runs tokens `[batch, n]` of the rows from `slot` on; returns logits `[batch, n or 1, vocab]`."""
        ort = load_onnxruntime()
        binding = self._session.io_binding()
        for name, array in self._step_inputs(ids, np.asarray(starts)[:, None]).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        cache = self._cache(slot, len(ids))
        for past, present, value in zip(self._io.past, self._io.present, cache, strict=True):
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        binding.bind_output("logits")
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
        logits = binding.get_outputs()[-1].numpy()  # bound last
        return self._io.rows(logits, self.vocab_size).reshape(len(ids), -1, self.vocab_size)

    def _step_inputs(self, ids: NDArray[np.int64], starts: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        positions = starts + np.arange(ids.shape[1])
        values: dict[str, NDArray[Any]] = {
            "attention_mask": np.arange(positions.max() + 1) <= positions[:, -1:],
            "position_ids": positions,
            "use_cache_branch": np.array([True]),
            "num_logits_to_keep": np.full(self._io.keep_shape, ids.shape[1]),
        }
        helpers = {name: values[name].astype(kind) for name, kind in self._io.helpers.items()}
        return {"input_ids": ids.astype(self._io.ids_type), **helpers}

    def _cache(self, slot: int, count: int) -> list[Any]:
        ort = load_onnxruntime()
        if (slot, count) not in self._caches:
            rows = self._slab.rows(slot, count)
            self._caches[slot, count] = [ort.OrtValue.ortvalue_from_numpy(array) for array in rows]
        return self._caches[slot, count]
