"""genai_config.json: what onnxruntime-genai's folders have in place of config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenonnx.config import MAX_CONTEXT, ModelConfig
from qwenonnx.errors import PackageError

GENAI_CONFIG = "genai_config.json"
# What onnxruntime-genai's and other builders call a Qwen2.
_TYPES = ("qwen2", "decoder")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class GenaiConfig:
    """A genai_config.json, read.

    `model` has the sizes that running a graph takes; those that only matter when one is written (the width of the MLP,
    epsilon, the base of the rotary embedding) are not in the file, and are zero. `generation` is what a
    generation_config.json would say, and `filename` the graph.
    """

    model: ModelConfig
    generation: dict[str, Any]
    filename: str

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> GenaiConfig:
        """Reads the JSON object; `where` names the file in messages.

        Raises:
            PackageError: an entry is missing or wrong, or the model is none of Qwen2.
        """
        model = _object(raw, "model", where)
        decoder = _object(model, "decoder", where)
        if model.get("type") not in _TYPES:
            raise PackageError(f"{where}: model.type is {model.get('type')!r}, but only Qwen2 and Qwen2.5 can be run.")
        filename = decoder.get("filename")
        if not isinstance(filename, str) or not filename:
            raise PackageError(f"{where}: model.decoder.filename must be a file's name, but it is {filename!r}.")
        if decoder.get("sliding_window"):
            raise PackageError(f"{where}: model.decoder.sliding_window is set, which cannot be run here.")
        heads = _size(decoder, "num_attention_heads", where)
        hidden = _size(decoder, "hidden_size", where)
        config = ModelConfig(
            vocab_size=_size(model, "vocab_size", where),
            hidden_size=hidden,
            intermediate_size=0,
            num_layers=_size(decoder, "num_hidden_layers", where),
            num_heads=heads,
            num_kv_heads=_size(decoder, "num_key_value_heads", where),
            head_dim=_size(decoder, "head_size", where),
            rms_norm_eps=0.0,
            rope_theta=0.0,
            context_length=_size(model, "context_length", where, least=2, most=MAX_CONTEXT),
            tie_word_embeddings=False,
        )
        search = raw.get("search")
        sampling = search if isinstance(search, Mapping) else {}
        generation = {name: model[name] for name in _TOKENS if model.get(name) is not None}
        generation |= {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
        return cls(config, generation, filename)


def _object(parent: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = parent.get(name)
    if not isinstance(value, Mapping):
        raise PackageError(f"{where}: {name} must be an object, but it is {value!r}.")
    return value


def _size(parent: Mapping[str, Any], name: str, where: str, *, least: int = 1, most: int = 1 << 24) -> int:
    value = parent.get(name)
    if type(value) is not int or not least <= value <= most:
        raise PackageError(f"{where}: {name} must be a whole number between {least} and {most:,}, but it is {value!r}.")
    return value
