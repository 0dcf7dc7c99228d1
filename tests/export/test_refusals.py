"""What an export refuses although the checkpoint is whole, and what it says then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packages import export_folder, names, no_progress
from tiny import chat_template, tiny_weights, tokenizer_config, tokenizer_json, write_safetensors, write_tiny_checkpoint

from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.errors import CheckpointError, QwenonnxError
from qwenonnx.export.exporter import export_checkpoint

EMBEDDING = "model.embed_tokens.weight"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def refusal(checkpoint: Path, target: Path) -> str:
    with pytest.raises(QwenonnxError) as caught:
        export_folder(checkpoint, target)
    assert names(target.parent) == ["checkpoint"]
    text = str(caught.value)
    assert "\n" not in text
    assert ".partial-" not in text
    return text


@pytest.mark.parametrize("in_file", [True, False])
def test_a_template_with_a_fault_is_refused_with_its_line(in_file: bool, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    broken = "{% for m in messages %}\n{{ m.content }}\n{% endfi %}"
    if in_file:
        (checkpoint / "chat_template.jinja").write_text(broken)
    else:
        write_json(checkpoint / "tokenizer_config.json", {**tokenizer_config(), "chat_template": broken})

    text = refusal(checkpoint, tmp_path / "out")

    assert "chat template is not valid Jinja in line 3" in text
    assert "endfi" in text


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    write_json(checkpoint / "tokenizer_config.json", {**tokenizer_config(), "chat_template": 5})

    assert "chat template is not text" in refusal(checkpoint, tmp_path / "out")


def test_a_template_whose_control_tokens_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    tokenizer = tokenizer_json()
    for token in tokenizer["added_tokens"]:
        token["content"] = token["content"].replace("im_start", "im_stort")
    write_json(checkpoint / "tokenizer.json", tokenizer)

    assert "uses <|im_start|>, which its tokenizer does not have" in refusal(checkpoint, tmp_path / "out")


def test_marks_of_other_models_in_a_template_are_ordinary_text(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    template = "<|user|>" + chat_template()
    write_json(checkpoint / "tokenizer_config.json", {**tokenizer_config(), "chat_template": template})

    export_folder(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", EMBEDDING])
def test_weights_that_are_not_finite_are_refused_in_one_sentence(value: float, name: str, tmp_path: Path) -> None:
    weights = tiny_weights()
    weights[name].reshape(-1)[:] = value
    write_safetensors(write_tiny_checkpoint(tmp_path / "checkpoint") / "model.safetensors", weights)

    refusal(checkpoint=tmp_path / "checkpoint", target=tmp_path / "out")


def test_a_failed_check_names_the_target(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "checkpoint", tied=False)
    weights = tiny_weights(0, json.loads((folder / "config.json").read_text()))
    weights["lm_head.weight"] *= np.float32(1e-3)
    write_safetensors(folder / "model.safetensors", weights)

    assert refusal(folder, tmp_path / "out").startswith(f"{tmp_path / 'out'}: the exported graph fails its check")


def test_the_shortest_context_can_be_exported(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", config={"max_position_embeddings": 2})

    assert export_folder(checkpoint, tmp_path / "out").manifest.context_length == 2


def test_the_longest_context_is_bounded(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", config={"max_position_embeddings": 10**9})

    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        export_folder(checkpoint, tmp_path / "out")


def test_a_name_of_two_lines_becomes_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    package = export_checkpoint(open_checkpoint(tiny_checkpoint), tmp_path / "out", model="a\nb", stage=no_progress)

    assert package.manifest.model == "a_b"
