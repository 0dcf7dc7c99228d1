import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import (
    chat_template,
    tiny_bpe,
    tiny_weights,
    tokenizer_config,
    write_safetensors,
    write_tiny_checkpoint,
)

from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.checkpoint.safetensors_file import SafetensorsFile
from qwenonnx.errors import CheckpointError


def edit_json(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("shards", [1, 3])
def test_fp32_weights_come_back_exactly(tmp_path: Path, shards: int) -> None:
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path, shards=shards))
    for name, values in tiny_weights().items():
        assert checkpoint.shape(name) == values.shape
        assert np.array_equal(checkpoint.tensor(name), values)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_widened_to_the_nearest_fp32(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path, dtype=dtype))
    half = np.dtype(np.float16 if dtype == "F16" else ml_dtypes.bfloat16)
    for name, values in tiny_weights().items():
        result = checkpoint.tensor(name)
        assert result.dtype == np.float32
        assert np.array_equal(result, values.astype(half).astype(np.float32))


def test_writer_and_reader_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights = tiny_weights()
    write_safetensors(tmp_path / "ours.safetensors", weights)
    assert all(
        np.array_equal(values, weights[name]) for name, values in load_file(tmp_path / "ours.safetensors").items()
    )
    save_file(weights, tmp_path / "theirs.safetensors")
    theirs = SafetensorsFile(tmp_path / "theirs.safetensors")
    assert all(np.array_equal(theirs.read(name), values) for name, values in weights.items())


def test_tensors_belong_to_the_caller(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    first = checkpoint.tensor("model.norm.weight")
    first[:] = 0
    assert checkpoint.tensor("model.norm.weight").all()


def test_configurations_are_those_of_the_folder(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    assert checkpoint.hf_config == json.loads((tiny_checkpoint / "config.json").read_text())
    assert checkpoint.generation_config["top_k"] == 20
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.config.head_dim == 16


def test_generation_config_is_optional(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert open_checkpoint(tmp_path).generation_config == {}


def test_missing_shard_is_named_before_anything_else(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    text = refusal(tmp_path)
    assert "model-00002-of-00002.safetensors" in text
    assert "model-00001" not in text
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in refusal(tmp_path)


def test_file_that_the_index_does_not_list_is_ignored(tmp_path: Path) -> None:
    plain = open_checkpoint(write_tiny_checkpoint(tmp_path / "plain", shards=2))
    folder = write_tiny_checkpoint(tmp_path / "stray", shards=2)
    write_safetensors(folder / "extra.safetensors", {name: values + 1 for name, values in tiny_weights().items()})
    stray = open_checkpoint(folder)
    assert all(np.array_equal(stray.tensor(name), plain.tensor(name)) for name in tiny_weights())
    assert stray.source().sha256 == plain.source().sha256
    assert stray.source().files == plain.source().files


def test_shard_without_a_tensor_that_the_index_promises(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, shards=2)
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"other": np.ones(3, np.float32)})
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path)


def test_index_cannot_reach_outside_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "a", shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    text = index.read_text().replace("model-00001-of-00002.safetensors", "../outside.safetensors")
    index.write_text(text)
    assert "weight_map" in refusal(folder)


def test_truncated_file_tells_both_sizes_and_the_remedy(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1000)
    text = refusal(tmp_path)
    for part in ("model.safetensors", f"{size:,}", f"{size - 1000:,}", "re-download"):
        assert part in text


@pytest.mark.parametrize("length", [2**64 - 1, 2**62, 90_000_000, 100_000_001])
def test_absurd_header_length_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    path = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    text = refusal(tmp_path)
    assert f"{8 + length:,}" in text
    assert f"{len(data):,}" in text
    assert "re-download" in text


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 3) + b"{{{"])
def test_file_that_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    text = refusal(tmp_path)
    assert "model.safetensors" in text
    assert "re-download" in text


def test_damaged_header_is_always_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones((4, 8), np.float32), "b": np.ones(8, np.float32)})
    whole = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(whole) - 160)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            SafetensorsFile(path)
        except CheckpointError:
            refused += 1
    assert refused > 150


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointError, match="re-download"):
        SafetensorsFile(path)


def test_shape_that_differs_from_the_configuration(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=160)
    text = refusal(tmp_path)
    assert "model.layers.0.mlp.gate_proj.weight" in text
    assert "[128, 64]" in text
    assert "[160, 64]" in text


def test_missing_tensors_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    weights = {name: values for name, values in tiny_weights().items() if ".layers.1." not in name}
    write_safetensors(tmp_path / "model.safetensors", weights)
    text = refusal(tmp_path)
    assert "12 of 26 tensors are missing" in text
    assert "model.layers.1.self_attn.q_proj.weight" in text
    assert "and 8 more" in text


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", model_type="llama")
    assert "llama" in refusal(tmp_path)


def test_quantized_checkpoint_is_refused_by_its_configuration(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    assert "'awq'" in refusal(tmp_path)


def test_quantized_checkpoint_is_refused_by_its_tensors(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    weights = tiny_weights()
    weights["model.layers.0.mlp.down_proj.qweight"] = weights.pop("model.layers.0.mlp.down_proj.weight")
    write_safetensors(tmp_path / "model.safetensors", weights)
    text = refusal(tmp_path)
    assert "quantized" in text
    assert "model.layers.0.mlp.down_proj.qweight" in text


def test_tensor_type_that_is_no_float_is_refused(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    at = data.index(b'"model.norm.weight": {"dtype": "F32"')
    path.write_bytes(data[:at] + data[at:].replace(b'"F32"', b'"I32"', 1))
    text = refusal(tmp_path)
    assert "model.norm.weight is stored as I32" in text


def test_untied_head_is_the_stored_one(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path, tied=False))
    weights = tiny_weights(config=checkpoint.hf_config)
    assert not checkpoint.config.tie_word_embeddings
    assert np.array_equal(checkpoint.tensor("lm_head.weight"), weights["lm_head.weight"])
    assert not np.array_equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_tying_a_different_head_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tied=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    text = refusal(tmp_path)
    assert "lm_head.weight" in text
    assert "tie_word_embeddings" in text


def test_tied_checkpoint_may_repeat_its_embedding_as_head(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    weights = tiny_weights()
    write_safetensors(
        tmp_path / "model.safetensors", {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    )
    assert open_checkpoint(tmp_path).config.tie_word_embeddings


def test_untied_checkpoint_without_head_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight" in refusal(tmp_path)


def test_unknown_tensor_name(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.tensor("nothing")
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.shape("nothing")


def test_hub_cache_layout_with_symlinks(tmp_path: Path) -> None:
    original = write_tiny_checkpoint(tmp_path / "original")
    blobs = tmp_path / "models--Qwen--Tiny" / "blobs"
    snapshot = tmp_path / "models--Qwen--Tiny" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(original.iterdir()):
        shutil.copy(path, blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob{number}")
    checkpoint = open_checkpoint(snapshot)
    assert np.array_equal(checkpoint.tensor("model.norm.weight"), tiny_weights()["model.norm.weight"])
    assert checkpoint.source().name == "Qwen/Tiny"
    assert checkpoint.source().files == ("model.safetensors",)


@pytest.mark.parametrize("name", ["mod el é 模型 🤖", "100%s %d", "x" * 200, "[a-z]*"])
def test_folder_names_of_any_kind(tmp_path: Path, name: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / name, shards=2)
    target = tmp_path / (name + "-out")
    target.mkdir()
    checkpoint = open_checkpoint(folder)
    checkpoint.tensor("model.norm.weight")
    checkpoint.write_tokenizer(target)
    assert (target / "tokenizer.json").exists()


def test_relative_path_and_trailing_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path / "here" / "checkpoint")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint(Path("here/checkpoint/")).source().name == "here"


def test_source_hashes_the_weights(tmp_path: Path) -> None:
    import hashlib

    single = open_checkpoint(write_tiny_checkpoint(tmp_path / "single")).source()
    path = tmp_path / "single" / "model.safetensors"
    assert single.kind == "safetensors"
    assert single.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert single.bytes == path.stat().st_size
    sharded = open_checkpoint(write_tiny_checkpoint(tmp_path / "sharded", shards=2))
    before = sharded.source()
    assert len(before.files) == 2
    write_tiny_checkpoint(tmp_path / "sharded", shards=2, seed=1)
    assert open_checkpoint(tmp_path / "sharded").source().sha256 != before.sha256


def test_tokenizer_is_copied_with_its_template(tiny_checkpoint: Path, tmp_path: Path) -> None:
    open_checkpoint(tiny_checkpoint).write_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tiny_checkpoint / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == tokenizer_config()


def test_separate_template_file_goes_into_the_configuration(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "a")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(with_template=False)))
    (folder / "chat_template.jinja").write_text(chat_template())
    open_checkpoint(folder).write_tokenizer(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == chat_template()


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "a")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    open_checkpoint(folder).write_tokenizer(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == "D"


def test_folder_without_tokenizer_is_refused_at_once(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(tmp_path)


def test_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "a", config={"vocab_size": 381})
    with pytest.raises(CheckpointError, match="ids up to 382"):
        open_checkpoint(folder).write_tokenizer(tmp_path)


def test_vocab_and_merges_are_converted_silently(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer

    folder = write_tiny_checkpoint(tmp_path / "slow")
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    tokens, merges = tiny_bpe()
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    open_checkpoint(folder).write_tokenizer(tmp_path)
    converted = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>user\nThe quick 东京's fox: 12 <tool_call>{}</tool_call><|im_end|>"
    assert converted.encode(text).ids == fast.encode(text).ids
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == chat_template()
    if "torch" not in sys.modules:
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json_names_the_file(tmp_path: Path, name: str) -> None:
    write_tiny_checkpoint(tmp_path, shards=2)
    (tmp_path / name).write_text('{"a": ')
    assert name in refusal(tmp_path)
    (tmp_path / name).write_text("[]")
    assert name in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", 512, -1, True, [380, 512], [None], 1.5])
def test_an_end_token_that_is_none_is_refused(file: str, value: object, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_json(tmp_path / file, eos_token_id=value)
    text = refusal(tmp_path)
    assert f"{file}: eos_token_id has " in text
    assert "vocabulary of 512 rows" in text


@pytest.mark.parametrize("value", [None, 380, [378, 380], []])
def test_end_tokens_may_be_one_or_several_or_none(value: object, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=value)
    assert open_checkpoint(tmp_path).hf_config["eos_token_id"] == value


@pytest.mark.parametrize(
    ("layers", "part"),
    [(1, "counts 1 layers, but there is a tensor model.layers.1."), (3, "12 of 38 tensors are missing")],
)
def test_a_wrong_number_of_layers_is_refused(layers: int, part: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=layers)
    assert part in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / name
    path.unlink()
    (tmp_path / "elsewhere").mkdir() if kind == "folder" else os.mkfifo(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name}: this is (a folder|no regular file), but a file is expected"):
        open_checkpoint(tmp_path / "checkpoint").write_tokenizer(tmp_path)


def test_a_template_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: this is not UTF-8"):
        open_checkpoint(checkpoint).write_tokenizer(tmp_path)
