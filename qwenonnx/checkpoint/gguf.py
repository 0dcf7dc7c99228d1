"""Checkpoints in one GGUF file, as llama.cpp uses them; quantized weights are expanded to fp32 when read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.checkpoint.base import CheckpointSource
from qwenonnx.checkpoint.gguf_file import GgufFile, GgufTensor, gguf_package
from qwenonnx.checkpoint.gguf_tokenizer import GgufTokenizer
from qwenonnx.checkpoint.layout import EMBEDDING, HEAD, check_shapes
from qwenonnx.checkpoint.weight_files import RE_DOWNLOAD, describe_source
from qwenonnx.config import ModelConfig
from qwenonnx.errors import CheckpointError

_WHOLE_NAMES = {
    EMBEDDING: "token_embd.weight",
    HEAD: "output.weight",
    "model.norm.weight": "output_norm.weight",
}
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

_CHUNK = 1 << 20  # weights expanded at once by one thread: 4 MB of result and about as much again twice in temporaries
_STRIPE = 1 << 13  # weights per row handed to gguf, which works in groups of 16 rows; whole blocks of every type
_MAX_THREADS = 4
_SAMPLED_ROWS = 64


class GgufCheckpoint:
    """A Qwen2 model in a GGUF file; satisfies `Checkpoint`.

    Where a tied model is stored with two quantizations of its one matrix (`output.weight` and
    `token_embd.weight`), the one with more bits stands for both.

    Raises:
        CheckpointError: the file is damaged, holds another architecture, or is one part of several.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._metadata = self._file.metadata
        self._refuse_unsupported()
        self._tensors = self._by_hf_name()
        embedding = self._tensors.get(EMBEDDING)
        if embedding is None:
            raise CheckpointError(f"{path}: there is no tensor token_embd.weight, so this is not a whole model.")
        tied = self._tie()
        self._config = ModelConfig.from_hf(self._hf_fields(embedding.shape[0], tied), str(path))
        check_shapes(self._config, {name: tensor.shape for name, tensor in self._tensors.items()}, str(path))
        self._tokenizer = GgufTokenizer(self._metadata, self._config, str(path))

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return self._config

    @property
    def hf_config(self) -> dict[str, Any]:
        """A config.json made from the file's metadata."""
        return {**self._config.to_hf(), **self._tokenizer.token_ids}

    @property
    def generation_config(self) -> dict[str, Any]:
        """The ids that end a text; the format knows no sampling defaults."""
        return self._tokenizer.generation_config()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading its values."""
        return self._tensor(name).shape

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Reads one tensor as fp32 into memory of its own, with some ten MB of temporaries."""
        return self._expand(self._tensor(name), slice(None))

    def write_tokenizer(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, rebuilt from the metadata, into `folder`."""
        self._tokenizer.write(folder)

    def source(self) -> CheckpointSource:
        """Describes the file and hashes it."""
        return describe_source("gguf", self._file.path.stem, [self._file.path])

    def _tensor(self, name: str) -> GgufTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self._file.path}: there is no tensor {name}.") from None

    def _refuse_unsupported(self) -> None:
        path = self._file.path
        architecture = self._metadata.get("general.architecture")
        if architecture != "qwen2":
            raise CheckpointError(
                f"{path}: the architecture is {architecture!r}, but only 'qwen2' (Qwen2, Qwen2.5) can be used."
            )
        parts = self._metadata.get("split.count", 1)
        if parts != 1:
            raise CheckpointError(
                f"{path}: this is one of {parts} parts of a model; join them with: gguf-split --merge "
                f"{path.name} OUTPUT.gguf"
            )

    def _by_hf_name(self) -> dict[str, GgufTensor]:
        stored = self._file.tensors
        result = {name: stored[other] for name, other in _WHOLE_NAMES.items() if other in stored}
        count = self._integer("qwen2.block_count")
        if count > len(stored) or any(name.startswith(f"blk.{count}.") for name in stored):
            layers = {name.split(".")[1] for name in stored if name.startswith("blk.")}
            raise CheckpointError(
                f"{self._file.path}: the metadata gives qwen2.block_count as {count}, but the file has tensors of "
                f"{len(layers)} blocks; {RE_DOWNLOAD}."
            )
        for layer in range(count):
            for module, other in _MODULES.items():
                for kind in ("weight", "bias"):
                    found = stored.get(f"blk.{layer}.{other}.{kind}")
                    if found is not None:
                        result[f"model.layers.{layer}.{module}.{kind}"] = found
        return result

    def _tie(self) -> bool:
        """Decides whether head and embedding are one matrix; if so, keeps the copy with more bits."""
        head, embedding = self._tensors.get(HEAD), self._tensors[EMBEDDING]
        if head is None:
            return True
        if head.shape != embedding.shape or not self._same_matrix(head, embedding):
            return False
        del self._tensors[HEAD]
        if head.bits > embedding.bits:
            self._tensors[EMBEDDING] = head
        return True

    def _same_matrix(self, first: GgufTensor, second: GgufTensor) -> bool:
        """Whether two tensors differ by no more than what their quantization explains, by some rows."""
        step = max(1, first.shape[0] // _SAMPLED_ROWS)
        rows = [slice(row, row + 1) for row in range(0, first.shape[0], step)]
        one, other = (np.concatenate([self._expand(tensor, row) for row in rows]).ravel() for tensor in (first, second))
        scale = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
        correlation = float(one @ other) / scale if scale else 1.0
        # Two quantizations of one matrix: about 0.9999 at 8 bits, 0.995 at 4, 0.95 at 2.
        bits = min(first.bits, second.bits)
        return correlation > (0.999 if bits >= 8 else 0.98 if bits >= 4 else 0.9)

    def _expand(self, tensor: GgufTensor, rows: slice) -> NDArray[np.float32]:
        """Dequantizes some rows of a matrix, or a whole vector, in chunks over a few threads."""
        dequantize = gguf_package().quants.dequantize
        kind = gguf_package().GGMLQuantizationType(tensor.type)
        raw = np.frombuffer(self._file.raw(tensor), np.uint8)
        shape = tensor.shape
        if len(shape) > 1:
            raw = raw.reshape(shape[0], -1)[rows].reshape(-1)
            shape = (len(range(shape[0])[rows]), *shape[1:])
        result = np.empty(shape, np.float32)
        flat = result.reshape(-1)
        stripe = _STRIPE // tensor.block * tensor.block_bytes

        def expand_chunk(start: int) -> None:
            stop = min(start + _CHUNK, flat.size)
            part = raw[start // tensor.block * tensor.block_bytes : stop // tensor.block * tensor.block_bytes]
            # Blocks are independent, so rows may be of any length; long ones spare gguf most of its Python
            # loop.
            whole = len(part) // stripe * stripe
            for piece in (part[:whole].reshape(-1, stripe), part[whole:].reshape(1, -1)):
                if piece.size:
                    with np.errstate(all="ignore"):  # a damaged scale gives infinities, not a warning
                        values = dequantize(piece, kind).reshape(-1)
                    flat[start : start + values.size] = values
                    start += values.size

        starts = range(0, flat.size, _CHUNK)
        try:
            if len(starts) == 1:
                expand_chunk(0)
            else:
                with ThreadPoolExecutor(min(_MAX_THREADS, max(2, os.cpu_count() or 1))) as pool:
                    list(pool.map(expand_chunk, starts))
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._file.path}: tensor {tensor.name} has type {kind.name}, which the gguf package "
                "cannot expand; use a file in another quantization (Q8_0, Q6_K, Q4_K_M)."
            ) from error
        self._file.release()
        return result

    def _hf_fields(self, vocab_size: int, tied: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model_type": "qwen2",
            "vocab_size": vocab_size,
            "hidden_size": self._integer("qwen2.embedding_length"),
            "intermediate_size": self._integer("qwen2.feed_forward_length"),
            "num_hidden_layers": self._integer("qwen2.block_count"),
            "num_attention_heads": self._integer("qwen2.attention.head_count"),
            "num_key_value_heads": self._metadata.get("qwen2.attention.head_count_kv"),
            "head_dim": self._metadata.get("qwen2.attention.key_length"),
            "rms_norm_eps": _shortest(self._metadata.get("qwen2.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._metadata.get("qwen2.rope.freq_base")),
            "max_position_embeddings": self._integer("qwen2.context_length"),
            "tie_word_embeddings": tied,
        }
        scaling = self._metadata.get("qwen2.rope.scaling.type")
        if scaling not in (None, "none"):
            fields["rope_scaling"] = {"rope_type": scaling}
        return {key: value for key, value in fields.items() if value is not None}

    def _integer(self, key: str) -> int:
        value = self._metadata.get(key)
        # No model has a size beyond this; a larger one would only make the checks that follow slow.
        if type(value) is not int or not 0 < value < 1 << 24:
            raise CheckpointError(f"{self._file.path}: the metadata gives {key} as {value!r}; {RE_DOWNLOAD}.")
        return value


def _shortest(value: Any) -> Any:
    """Undoes the widening of an fp32 constant: 9.999999974752427e-07 was written as 1e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
