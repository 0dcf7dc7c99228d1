"""Running a graph whose KV cache grows with every step, as Optimum and transformers.js have them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.errors import EngineError
from qwenonnx.runtime.graph_io import GraphIo
from qwenonnx.runtime.ort import load_onnxruntime
from qwenonnx.runtime.session import SessionConfig, open_session


class PortableRunner:
    """A portable graph in memory; see `engine.runner.ModelRunner`. Each slot has a cache of its own.

    The caches are onnxruntime's own values: what a step gives, the next one takes, without a copy on our side (the
    graph itself copies them all, which is why a growing cache gets slower with the context). Rows run in turn.
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
        self._capacity = min(context_length or config.context_length, config.context_length)
        self._caches: list[list[Any]] = [[] for _ in range(num_slots)]
        self._lengths = [0] * num_slots
        self._only_last = False
        self._lock = threading.Lock()
        self._current: Any = None

    @property
    def num_slots(self) -> int:
        """Rows of the KV cache."""
        return len(self._caches)

    @property
    def max_batch(self) -> int:
        """Rows that can run in one step."""
        return 1

    @property
    def context_length(self) -> int:
        """Tokens that one row can hold."""
        return self._capacity

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._config.vocab_size

    def prefill(self, slot: int, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Runs a prompt chunk in one row; returns the logits `[vocab]` of its last token."""
        logits: NDArray[np.float32] = self._run(slot, token_ids, start, wanted=1)[-1]
        return logits

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        """Runs one token for each of the first rows, one row after the other; returns logits `[n, vocab]`."""
        rows = [
            self._run(slot, [token_id], start, wanted=1)[-1]
            for slot, (token_id, start) in enumerate(zip(token_ids, starts, strict=True))
        ]
        return np.stack(rows)

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        """Runs a chunk in one row and returns the logits of all its tokens `[n, vocab]`, in a new array."""
        if not self._only_last:
            logits = self._run(slot, token_ids, start, wanted=len(token_ids))
            if len(logits) == len(token_ids):
                return logits.copy()
            self._only_last = True
        rows = [self._run(slot, [token], start + at, wanted=1)[-1] for at, token in enumerate(token_ids)]
        return np.stack(rows)

    def cancel(self) -> None:
        """Ends a run that is under way in another thread; it raises EngineError there."""
        with self._lock:
            if self._current is not None:
                self._current.terminate = True

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Makes the first tokens of a row those of another one; the values are shared until one of them grows."""
        self._caches[target] = self._cut(source, length)
        self._lengths[target] = length

    def swap_rows(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchanges two rows."""
        self._caches[first], self._caches[second] = self._caches[second], self._caches[first]
        self._lengths[first], self._lengths[second] = self._lengths[second], self._lengths[first]

    def release_row(self, slot: int, keep: int) -> None:
        """Gives back a row's memory behind its first tokens."""
        if self._lengths[slot] > keep:
            self._caches[slot] = self._cut(slot, keep)
            self._lengths[slot] = keep

    def release_memory(self) -> None:
        """Gives the caches' memory back; every row is empty after it."""
        self._caches = [[] for _ in self._caches]
        self._lengths = [0] * len(self._caches)

    def end_profiling(self) -> Path:
        """Writes the profile asked for by `SessionConfig.profile_prefix` and returns its path."""
        return Path(self._session.end_profiling())

    def _run(self, slot: int, token_ids: Sequence[int], start: int, wanted: int) -> NDArray[np.float32]:
        """Runs tokens in one row; returns the logits of the last `wanted` ones at least, if the graph has them."""
        ort = load_onnxruntime()
        binding = self._session.io_binding()
        for name, array in self._step_inputs(token_ids, start, wanted).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, value in zip(self._io.past, self._cache(slot, start), strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in ("logits", *self._io.present):
            binding.bind_output(name)
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
        logits, *cache = binding.get_outputs()  # in the order in which they were bound
        self._caches[slot] = cache
        self._lengths[slot] = start + len(token_ids)
        return self._io.rows(logits.numpy(), self.vocab_size)

    def _step_inputs(self, token_ids: Sequence[int], start: int, wanted: int) -> dict[str, NDArray[Any]]:
        count = len(token_ids)
        values: dict[str, NDArray[Any]] = {
            "attention_mask": np.ones((1, start + count)),
            "position_ids": np.arange(start, start + count)[None],
            # A merged decoder has two branches; the one without a past ignores what it is given for it.
            "use_cache_branch": np.array([start > 0]),
            "num_logits_to_keep": np.full(self._io.keep_shape, wanted),
        }
        helpers = {name: values[name].astype(kind) for name, kind in self._io.helpers.items()}
        return {"input_ids": np.asarray(token_ids, dtype=self._io.ids_type)[None], **helpers}

    def _cache(self, slot: int, length: int) -> list[Any]:
        """Keys and values of the first `length` tokens of a row, in the graph's order."""
        if length > self._lengths[slot]:
            raise EngineError(f"the row holds {self._lengths[slot]:,} tokens, so nothing can be put at {length:,}.")
        if self._lengths[slot] != length or not self._caches[slot]:
            self._caches[slot] = self._cut(slot, length)
            self._lengths[slot] = length
        return self._caches[slot]

    def _cut(self, slot: int, length: int) -> list[Any]:
        """The beginning of a row's keys and values, as new values."""
        ort = load_onnxruntime()
        if length == 0:
            heads, width = self._io.cache_shape
            arrays = [np.zeros((1, heads, 0, width), dtype=self._io.cache_type) for _ in self._io.past]
        elif length == self._lengths[slot]:
            return self._caches[slot]
        else:
            arrays = [np.ascontiguousarray(value.numpy()[:, :, :length]) for value in self._caches[slot]]
        return [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
