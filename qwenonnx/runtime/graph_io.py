"""Inputs and outputs of a decoder graph that somebody else exported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.errors import EngineError, PackageError

_TYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
# Names of cache tensors end in layer and kind, joined by dots, slashes, underscores or colons.
_CACHE = re.compile(
    r"(?P<stem>.*?)[._/:]*(?P<layer>\d+)[._/:]+(?:self_attn|attn|decoder)?[._/:]*(?P<kind>key|value|k|v)s?"
)
_HELPERS = ("attention_mask", "position_ids", "use_cache_branch", "num_logits_to_keep")


@dataclass(frozen=True, slots=True)
class GraphIo:
    """What a graph takes and gives.

    `past` and `present` are the names of the cache tensors, paired by layer and kind, key before value. `helpers` are
    the names of further inputs that this program knows, by their types; `cache_shape` is (kv_heads, head_dim) and
    `keep_shape` the shape of `num_logits_to_keep`. A graph whose batch is fixed to one row is a `single_row` one.
    """

    ids_type: type[np.generic]
    helpers: dict[str, type[np.generic]]
    past: tuple[str, ...]
    present: tuple[str, ...]
    cache_type: type[np.generic]
    cache_shape: tuple[int, int]
    keep_shape: tuple[int, ...]
    single_row: bool

    @classmethod
    def of(cls, session: Any, config: ModelConfig, where: Path) -> GraphIo:
        """Reads them from an onnxruntime session.

        Raises:
            PackageError: the graph is no decoder with a KV cache, or one of its sizes is fixed or another than the
                configuration's.
        """
        inputs = {value.name: value for value in session.get_inputs()}
        outputs = {value.name: value for value in session.get_outputs()}
        for name, names in (("input_ids", inputs), ("logits", outputs)):
            if name not in names:
                raise PackageError(f"{where}: the graph has no {name}; it is not a decoder that can be run here.")
        known = {"input_ids", *_HELPERS}
        past = _cache_names([name for name in inputs if name not in known], config, where, "input")
        present = _cache_names([name for name in outputs if name != "logits"], config, where, "output")
        _check_axes(inputs, past, where)
        cache = inputs[past[0]]
        shape = tuple(
            size if isinstance(size, int) else usual
            for size, usual in zip(
                (cache.shape[1], cache.shape[3]), (config.num_kv_heads, config.head_dim), strict=True
            )
        )
        if shape[0] < config.num_kv_heads or shape[0] > config.num_heads or shape[1] != config.head_dim:
            raise PackageError(
                f"{where}: its cache has {shape[0]} heads of {shape[1]}, but its configuration tells of "
                f"{config.num_kv_heads} of {config.head_dim}; they do not belong together."
            )
        vocab = outputs["logits"].shape[-1]
        if isinstance(vocab, int) and vocab != config.vocab_size:
            raise PackageError(
                f"{where}: it gives {vocab:,} logits, but its configuration tells of {config.vocab_size:,} tokens; "
                "they do not belong together."
            )
        return cls(
            ids_type=_type(inputs["input_ids"], where),
            helpers={name: _type(inputs[name], where) for name in _HELPERS if name in inputs},
            past=past,
            present=present,
            cache_type=_type(cache, where),
            cache_shape=(shape[0], shape[1]),
            keep_shape=(1,) * len(inputs["num_logits_to_keep"].shape) if "num_logits_to_keep" in inputs else (),
            single_row=1 in (inputs["input_ids"].shape[0], cache.shape[0]),
        )

    def rows(self, logits: NDArray[Any], vocab_size: int) -> NDArray[np.float32]:
        """Logits `[batch, n, vocab]` (or without one of the first two axes) as rows `[batch * n, vocab]` in fp32.

        Raises:
            EngineError: their last axis, which the graph left open, is not the vocabulary.
        """
        if logits.shape[-1] != vocab_size:
            raise EngineError(
                f"the graph gives {logits.shape[-1]:,} logits, but its configuration tells of {vocab_size:,} tokens."
            )
        return np.asarray(logits.reshape(-1, vocab_size), dtype=np.float32)


def _type(value: Any, where: Path) -> type[np.generic]:
    if value.type not in _TYPES:
        raise PackageError(f"{where}: {value.name} is of the type {value.type}, which cannot be used here.")
    return _TYPES[value.type]


def _cache_names(names: Sequence[str], config: ModelConfig, where: Path, side: str) -> tuple[str, ...]:
    """The names of the cache tensors in the order layer 0 key, layer 0 value, layer 1 key, and so on."""
    found: dict[tuple[int, str], str] = {}
    for name in names:
        match = _CACHE.fullmatch(name)
        if match is None:
            if side == "output":
                continue  # hidden states and the like are not asked for
            raise PackageError(f"{where}: the graph wants an input {name!r}, which is not known here.")
        key = int(match["layer"]), match["kind"][0]
        if key in found:
            raise PackageError(f"{where}: {name!r} and {found[key]!r} are the same part of the KV cache.")
        found[key] = name
    wanted = [(layer, kind) for layer in range(config.num_layers) for kind in "kv"]
    missing = [key for key in wanted if key not in found]
    if missing or len(found) > len(wanted):
        what = (
            f"no {side} for the {'keys' if missing[0][1] == 'k' else 'values'} of layer {missing[0][0]}"
            if missing
            else (f"{len(found) // 2} layers of KV cache where its configuration tells of {config.num_layers}")
        )
        remedy = "" if found else "; export it with its past, as the task text-generation-with-past"
        raise PackageError(f"{where}: the graph has {what}{remedy}.")
    return tuple(found[key] for key in wanted)


def _check_axes(inputs: dict[str, Any], past: Sequence[str], where: Path) -> None:
    """Every length must be free; a batch fixed to one row will do."""
    ids = inputs["input_ids"]
    if len(ids.shape) != 2 or len(inputs[past[0]].shape) != 4:
        raise PackageError(f"{where}: input_ids or the KV cache have another rank than a decoder's.")
    fixed = [
        ("input_ids", "sequence", ids.shape[1]),
        ("input_ids", "batch", ids.shape[0] if ids.shape[0] != 1 else None),
    ]
    fixed += [(name, "past", inputs[name].shape[2]) for name in past]
    fixed += [(name, "batch", inputs[name].shape[0] if inputs[name].shape[0] != 1 else None) for name in past]
    if "attention_mask" in inputs:
        fixed.append(("attention_mask", "length", inputs["attention_mask"].shape[-1]))
    for name, axis, size in fixed:
        if isinstance(size, int):
            raise PackageError(
                f"{where}: the {axis} axis of {name} is fixed to {size}, so that other lengths cannot run; export it "
                "with dynamic axes."
            )
