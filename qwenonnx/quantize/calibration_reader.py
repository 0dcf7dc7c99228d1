"""What a portable graph is fed while ranges of its activations are measured: real texts with real past states."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.files import Progress
from qwenonnx.package.package import Package
from qwenonnx.runtime.graph_io import GraphIo

Feeds = dict[str, NDArray[Any]]
# A prompt in two chunks, the second on top of the first one's states, and steps of one token.
CHUNKS = (48, 16, 1, 1, 1, 1)


class PastStatesReader:
    """Chunks of texts and single tokens with the keys and values that the model itself computed for what is before.

    It is a `CalibrationDataReader` of onnxruntime by what it does.

    Raises:
        PackageError: the graph is no decoder with a KV cache.
    """

    def __init__(self, source: Package, session: Any, texts: Sequence[Sequence[int]], progress: Progress) -> None:
        self._session = session
        self._io = GraphIo.of(session, source.config, source.model_path)
        self._steps = self._all_steps(texts, progress)

    def get_next(self) -> Mapping[str, NDArray[Any]] | None:
        """The inputs of the next run, or None when there are no more."""
        return next(self._steps, None)

    def _all_steps(self, texts: Sequence[Sequence[int]], progress: Progress) -> Iterator[Feeds]:
        for done, ids in enumerate(texts):
            yield from self._steps_of(ids)
            progress(done + 1, len(texts))

    def _steps_of(self, ids: Sequence[int]) -> Iterator[Feeds]:
        io = self._io
        heads, width = io.cache_shape
        states: Sequence[NDArray[Any]] = [np.zeros((1, heads, 0, width), dtype=io.cache_type)] * len(io.past)
        bounds = sorted({min(bound, len(ids)) for bound in itertools.accumulate(CHUNKS, initial=0)})
        for start, stop in itertools.pairwise(bounds):
            values: Feeds = {
                "attention_mask": np.ones((1, stop)),
                "position_ids": np.arange(start, stop)[None],
                "use_cache_branch": np.array([start > 0]),
                "num_logits_to_keep": np.full(io.keep_shape, stop - start),
            }
            feeds: Feeds = {
                "input_ids": np.array([ids[start:stop]], dtype=io.ids_type),
                **{name: values[name].astype(kind) for name, kind in io.helpers.items()},
                **dict(zip(io.past, states, strict=True)),
            }
            states = self._session.run(list(io.present), feeds)
            yield feeds
