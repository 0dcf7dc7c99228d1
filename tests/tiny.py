"""A tiny random Qwen2 checkpoint with a real byte-level BPE tokenizer, in the formats of published models.

Two layers, hidden size 64, and 512 embedding rows of which the tokenizer defines fewer, as in the real model.
The writers share no code with the readers in `qwenonnx.checkpoint`, so that each can show the other wrong.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens of the tiny tokenizer, in the order of their ids."""

PLAIN_ADDED_TOKENS = ("<tool_call>", "</tool_call>")
"""Added tokens that decode to visible text."""

PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pre-tokenizer pattern of Qwen2's published tokenizer.json."""

_CORPUS = """system user assistant You are Qwen, created by Alibaba Cloud. You are a helpful assistant.
The quick brown fox jumps over the lazy dog. the the the of of and and to to in in is is that that it it
def main(): return None
    for i in range(10): print(i)
"""

_GGUF_NAMES = {
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


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of the tiny model, in Hugging Face form."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": special_ids()["<|endoftext|>"],
        "eos_token_id": special_ids()["<|im_end|>"],
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
        "max_window_layers": 2,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 512,
        **overrides,
    }


def tiny_weights(seed: int = 0, config: Mapping[str, Any] | None = None) -> dict[str, NDArray[np.float32]]:
    """Random fp32 weights that fit `config`, by Hugging Face name; `lm_head.weight` only when untied.

    The scales keep activations near one through the layers, so that logits are far from flat.
    """
    config = config or tiny_config()
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size = head_dim * config["num_attention_heads"]
    kv_size = head_dim * config["num_key_value_heads"]

    def normal(*shape: int, std: float) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=0.5)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, out_size, in_size in (
            ("self_attn.q_proj", q_size, hidden),
            ("self_attn.k_proj", kv_size, hidden),
            ("self_attn.v_proj", kv_size, hidden),
            ("self_attn.o_proj", hidden, q_size),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{prefix}{name}.weight"] = normal(out_size, in_size, std=in_size**-0.5)
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                weights[f"{prefix}{name}.bias"] = normal(out_size, std=0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + normal(hidden, std=0.1)
    weights["model.norm.weight"] = 1 + normal(hidden, std=0.1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=0.5)
    return weights


@functools.cache
def tiny_bpe() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens in id order (all 256 bytes and what was learnt, no added ones) and merges as "left right"."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=384, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    return tuple(sorted(vocab, key=vocab.__getitem__)), tuple(" ".join(pair) for pair in model["merges"])


def special_ids() -> dict[str, int]:
    """Ids of the added tokens, control and plain."""
    first = len(tiny_bpe()[0])
    return {token: first + index for index, token in enumerate(SPECIAL_TOKENS + PLAIN_ADDED_TOKENS)}


def chat_template() -> str:
    """The chat template of Qwen2.5, as published."""
    return (Path(__file__).parent / "data" / "chat_template.jinja").read_text(encoding="utf-8")


def _added_tokens() -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": token, **flags, "special": token in SPECIAL_TOKENS}
        for token, token_id in special_ids().items()
    ]


def tokenizer_json() -> dict[str, Any]:
    """The tokenizer.json of the tiny model, laid out like Qwen2's."""
    tokens, merges = tiny_bpe()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": PRE_TOKENIZER},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config(*, with_template: bool = True) -> dict[str, Any]:
    """The tokenizer_config.json of the tiny model."""
    result: dict[str, Any] = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in _added_tokens()
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if with_template:
        result["chat_template"] = chat_template()
    return result


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str = "F32") -> None:
    """Writes one safetensors file; `dtype` is F32, F16 or BF16."""
    numpy_dtype = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, values in tensors.items():
        raw = values.astype(numpy_dtype).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_tiny_checkpoint(
    folder: Path,
    *,
    tied: bool = True,
    dtype: str = "F32",
    shards: int = 1,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a whole Hugging Face folder (config, weights, tokenizer) and returns it.

    `config` overrides single fields of `tiny_config()`; more than one shard brings an index file along.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full = tiny_config(**{"tie_word_embeddings": tied, **(config or {})})
    weights = tiny_weights(seed, full)
    _write_json(folder / "config.json", full)
    ids = special_ids()
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "repetition_penalty": 1.1,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
    )
    _write_json(folder / "tokenizer.json", tokenizer_json())
    _write_json(folder / "tokenizer_config.json", tokenizer_config())
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights, dtype)
        return folder
    weight_map: dict[str, str] = {}
    names = list(weights)
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: weights[name] for name in part}, dtype)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(values.size for values in weights.values()) * (4 if dtype == "F32" else 2)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return folder


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor, from its Hugging Face name."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"


def write_tiny_gguf(
    path: Path,
    *,
    tied: bool = True,
    dtype: str = "F32",
    dtypes: Mapping[str, str] | None = None,
    output: str | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the tiny model as one GGUF file with its tokenizer in the metadata, and returns `path`.

    Matrices get type `dtype` (F32, F16, BF16, Q8_0, Q5_0, Q4_0), or what `dtypes` says for a Hugging Face
    name; vectors stay F32. With `output`, a tied model also carries its embedding as `output.weight`, in that
    type, as real files do. `metadata` adds or replaces integer and string values; None leaves one out.
    """
    import gguf

    full = tiny_config(**{"tie_word_embeddings": tied, **(config or {})})
    weights = tiny_weights(seed, full)
    tokens, merges = tiny_bpe()
    ids = special_ids()
    all_tokens = [*tokens, *ids]
    types = [1] * len(tokens) + [3 if token in SPECIAL_TOKENS else 4 for token in ids]
    for index in range(len(all_tokens), full["vocab_size"]):
        all_tokens.append(f"[PAD{index}]")
        types.append(5)
    values: dict[str, Any] = {
        "qwen2.block_count": full["num_hidden_layers"],
        "qwen2.context_length": full["max_position_embeddings"],
        "qwen2.embedding_length": full["hidden_size"],
        "qwen2.feed_forward_length": full["intermediate_size"],
        "qwen2.attention.head_count": full["num_attention_heads"],
        "qwen2.attention.head_count_kv": full["num_key_value_heads"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.bos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.chat_template": chat_template(),
        **(metadata or {}),
    }
    if "head_dim" in full:
        values["qwen2.attention.key_length"] = full["head_dim"]
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "qwen2"))
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_float32("qwen2.rope.freq_base", full["rope_theta"])
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", full["rms_norm_eps"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_token_list(all_tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(merges))

    def add(name: str, tensor: NDArray[np.float32], kind: str) -> None:
        if tensor.ndim == 1 or kind == "F32":
            writer.add_tensor(name, tensor)
            return
        quantization = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(tensor, quantization)
        writer.add_tensor(name, raw, raw_dtype=quantization)

    for name, tensor in weights.items():
        add(gguf_name(name), tensor, (dtypes or {}).get(name, dtype))
    if output is not None:
        add("output.weight", weights["model.embed_tokens.weight"], output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
