import json
import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import gguf_name, tiny_config, tiny_weights, write_tiny_gguf

import qwenonnx.checkpoint.gguf as gguf_checkpoint
from qwenonnx.checkpoint.gguf import GgufCheckpoint
from qwenonnx.checkpoint.gguf_file import GgufFile
from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.errors import CheckpointError


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_fp32_weights_come_back_exactly(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf"))
    for name, values in tiny_weights().items():
        assert checkpoint.shape(name) == values.shape
        assert np.array_equal(checkpoint.tensor(name), values)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("chunk", [64, 224, 1 << 20])
def test_every_type_equals_the_gguf_package_whatever_the_chunks(
    tmp_path: Path, dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "_CHUNK", chunk)
    monkeypatch.setattr(gguf_checkpoint, "_STRIPE", 64)
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", dtype=dtype))
    kind = gguf.GGMLQuantizationType[dtype]
    for name, values in tiny_weights().items():
        result = checkpoint.tensor(name)
        assert result.dtype == np.float32
        assert result.flags.writeable
        right = values if values.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert np.array_equal(result, right)


@pytest.mark.parametrize("dtype", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS"])
def test_super_block_types(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_checkpoint, "_CHUNK", 1 << 15)
    kind = gguf.GGMLQuantizationType[dtype]
    rng = np.random.default_rng(0)

    def random_blocks(values: np.ndarray[Any, Any], _kind: object) -> np.ndarray[Any, Any]:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        return rng.integers(0, 60, (values.shape[0], values.shape[1] // block * size), dtype=np.uint8)

    monkeypatch.setattr(gguf.quants, "quantize", random_blocks)
    config = {"hidden_size": 256, "intermediate_size": 512}
    path = write_tiny_gguf(tmp_path / "x.gguf", dtype=dtype, config=config)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = GgufFile(path)
    raw = np.frombuffer(stored.raw(stored.tensors[gguf_name(name)]), np.uint8).reshape(256, -1)
    assert np.array_equal(open_checkpoint(path).tensor(name), gguf.quants.dequantize(raw, kind))


def test_configuration_is_rebuilt_exactly(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf"))
    ours, theirs = checkpoint.hf_config, tiny_config()
    assert {key: ours[key] for key in ours.keys() & theirs.keys()} == {
        key: theirs[key] for key in ours.keys() & theirs.keys()
    }
    assert ours["rms_norm_eps"] == 1e-06
    assert {
        "num_key_value_heads",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
        "eos_token_id",
    } <= ours.keys()


def test_head_dim_comes_from_the_key_length(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", config={"head_dim": 32})
    assert open_checkpoint(path).config.head_dim == 32


@pytest.mark.parametrize(
    ("embedding", "output"), [("Q5_0", "Q8_0"), ("Q4_0", "Q8_0"), ("F16", "Q8_0"), ("Q8_0", "F16")]
)
def test_two_quantizations_of_one_matrix_are_tied_by_the_better(tmp_path: Path, embedding: str, output: str) -> None:
    name = "model.embed_tokens.weight"
    path = write_tiny_gguf(tmp_path / "x.gguf", dtypes={name: embedding}, output=output)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.tie_word_embeddings
    better = gguf.GGMLQuantizationType["F16" if "F16" in (embedding, output) else "Q8_0"]
    right = gguf.quants.dequantize(gguf.quants.quantize(tiny_weights()[name], better), better)
    assert np.array_equal(checkpoint.tensor(name), right)
    with pytest.raises(CheckpointError, match="no tensor lm_head"):
        checkpoint.tensor("lm_head.weight")


def test_embedding_alone_is_tied(tmp_path: Path) -> None:
    assert open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", dtype="Q8_0")).config.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["F32", "Q4_0"])
def test_truly_different_head_stays_untied(tmp_path: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", tied=False, dtype=dtype))
    assert not checkpoint.config.tie_word_embeddings
    head, embedding = checkpoint.tensor("lm_head.weight"), checkpoint.tensor("model.embed_tokens.weight")
    weights = tiny_weights(config=tiny_config(tie_word_embeddings=False))
    assert np.abs(head - weights["lm_head.weight"]).max() < 0.2
    assert np.abs(embedding - weights["model.embed_tokens.weight"]).max() < 0.2


def test_head_close_to_the_embedding_but_not_equal_stays_untied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tiny

    weights = tiny_weights(config=tiny_config(tie_word_embeddings=False))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + weights["lm_head.weight"] * np.float32(0.1)
    monkeypatch.setattr(tiny, "tiny_weights", lambda *_: weights)
    path = write_tiny_gguf(tmp_path / "x.gguf", tied=False, dtype="Q8_0")
    assert not open_checkpoint(path).config.tie_word_embeddings


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"general.architecture": "llama"})
    assert "'llama'" in refusal(path)


def test_rope_scaling_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"qwen2.rope.scaling.type": "yarn"})
    assert "yarn" in refusal(path)


def test_part_of_a_split_model_names_the_remedy(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x-00001-of-00003.gguf", metadata={"split.count": 3})
    text = refusal(path)
    assert "3 parts" in text
    assert "gguf-split --merge" in text


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"qwen2.embedding_length": None})
    assert "qwen2.embedding_length" in refusal(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"qwen2.block_count": 3})
    assert "model.layers.2.self_attn.q_proj.weight" in refusal(path)


def test_missing_gguf_package_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install gguf" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100)])
def test_file_that_is_no_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert "x.gguf" in refusal(path)


def test_big_endian_file_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100))
    assert "big-endian" in refusal(path)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0) + bytes(100))
    assert f"version {version}" in refusal(path)


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf")
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    assert np.array_equal(open_checkpoint(path).tensor("model.norm.weight"), tiny_weights()["model.norm.weight"])


def test_truncated_file_tells_both_sizes_and_the_remedy(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf")
    size = max(tensor.offset + tensor.size for tensor in GgufFile(path).tensors.values())
    with path.open("r+b") as file:
        file.truncate(size - 1000)
    text = refusal(path)
    for part in ("x.gguf", f"{size:,}", f"{size - 1000:,}", "re-download"):
        assert part in text


def test_file_cut_inside_the_header(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf")
    data = path.read_bytes()
    header = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    for size in range(4, header - 32, 97):
        path.write_bytes(data[:size])
        text = refusal(path)
        assert f"{size:,} bytes" in text
        assert "re-download" in text


@pytest.mark.parametrize("count", [2**64 - 1, 2**40, 10**6])
def test_absurd_counts_are_refused_before_they_are_believed(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.gguf"
    body = bytes(1000)
    string = struct.pack("<Q", 1) + b"k"
    for header in (
        struct.pack("<QQ", count, 0),
        struct.pack("<QQ", 0, count),
        struct.pack("<QQQ", 0, 1, count),
        struct.pack("<QQ", 0, 1) + string + struct.pack("<IQ", 8, count),
        struct.pack("<QQ", 0, 1) + string + struct.pack("<IIQ", 9, 0, count),
        struct.pack("<QQ", 0, 1) + string + struct.pack("<IIQ", 9, 8, count),
        struct.pack("<QQ", 0, 1) + string + struct.pack("<IIQ", 9, 9, count),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + header + body)
        assert "re-download" in refusal(path)


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    nest = struct.pack("<IQ", 9, 1) * 10_000
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + nest + bytes(100))
    assert "re-download" in refusal(path)


def test_damaged_header_is_always_an_error_of_ours(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf")
    whole = path.read_bytes()
    header = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            open_checkpoint(path).write_tokenizer(tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > 30


def test_all_metadata_types_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    values: dict[str, tuple[str, Any]] = {
        "a": ("uint8", 200), "b": ("int8", -3), "c": ("uint16", 60_000), "d": ("int16", -5),
        "e": ("uint32", 4_000_000_000), "f": ("int32", -7), "g": ("float32", 0.5), "h": ("bool", True),
        "i": ("string", "é模"), "j": ("uint64", 2**63), "k": ("int64", -(2**62)), "l": ("float64", 0.1),
        "m": ("array", [1, 2, 3]), "n": ("array", ["x", "", "模"]),
        "o": ("array", [0.5, 0.25]), "p": ("array", [[1, 2], [3]]), "q": ("array", [True, False]),
    }  # fmt: skip
    for key, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(key, value)
    writer.add_tensor("t", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert {key: file.metadata[key] for key in values} == {key: value for key, (_, value) in values.items()}
    assert file.tensors["t"].shape == (2, 3)


def test_source_describes_the_file(tmp_path: Path) -> None:
    import hashlib

    path = write_tiny_gguf(tmp_path / "Tiny-Q8.gguf")
    source = open_checkpoint(path).source()
    assert (source.kind, source.name, source.files) == ("gguf", "Tiny-Q8", ("Tiny-Q8.gguf",))
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_file_behind_a_symlink_in_an_odd_folder(tmp_path: Path) -> None:
    blob = write_tiny_gguf(tmp_path / "blob")
    folder = tmp_path / "mod el é 模型 🤖 100%"
    folder.mkdir()
    (folder / "m.gguf").symlink_to(blob)
    checkpoint = open_checkpoint(folder)
    checkpoint.write_tokenizer(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


@pytest.mark.model
def test_real_file_is_tied_by_its_q8_matrix(model_checkpoint: Path) -> None:
    checkpoint = GgufCheckpoint(model_checkpoint)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (24, 14, 2, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (896, 4864, 151_936)
    assert (config.rope_theta, config.rms_norm_eps, config.context_length) == (1e6, 1e-6, 32_768)
    assert config.tie_word_embeddings
    file = GgufFile(model_checkpoint)
    output = file.tensors["output.weight"]
    rows = np.frombuffer(file.raw(output), np.uint8).reshape(151_936, -1)[1000:1010]
    right = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(checkpoint.tensor("model.embed_tokens.weight")[1000:1010], right)
    for layer in (0, 12, 23):
        for name in "qkv":
            assert np.abs(checkpoint.tensor(f"model.layers.{layer}.self_attn.{name}_proj.bias")).max() > 0.01


@pytest.mark.model
def test_reading_the_real_embedding_needs_little_extra_memory(model_checkpoint: Path) -> None:
    import tracemalloc

    checkpoint = GgufCheckpoint(model_checkpoint)
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        size = checkpoint.tensor("model.embed_tokens.weight").nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before - size < 64 << 20


@pytest.mark.parametrize("count", [1, 3, (1 << 24) - 1])
def test_a_wrong_number_of_blocks_is_refused(count: int, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"qwen2.block_count": count})
    text = refusal(path)
    assert "tensors of 2 blocks" in text or "model.layers.2.self_attn.q_proj.weight" in text


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    assert "no regular file" in refusal(tmp_path / "x.gguf")
    assert "no regular file" in refusal(tmp_path)
