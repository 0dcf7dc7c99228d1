"""Exporting through Optimum where it cannot work: found early, said in one sentence, nothing left behind.

None of these tests needs torch; what Optimum itself writes is tested in tests/optimum.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from packages import contents, export_folder, names, no_progress
from tiny import write_tiny_checkpoint, write_tiny_gguf
from typer.testing import CliRunner, Result

from qwenonnx.checkpoint.layout import expected_shapes
from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.cli.main import app
from qwenonnx.errors import ExportError
from qwenonnx.export.intermediate import write_safetensors_folder
from qwenonnx.export.torch_extra import INSTALL, NEEDED

ROOT = Path(__file__).parents[2]
GOOD = {"torch": "2.13.0+cpu", "transformers": "4.57.6", "optimum": "2.1.0", "optimum-onnx": "0.1.0"}
GOOD["accelerate"] = "1.15.0"


def installed(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """Lets the extra's packages seem to be there in some versions, None for not at all."""
    versions = {**GOOD, **{name.replace("_", "-"): version for name, version in changes.items()}}

    def version(name: str) -> str:
        found = versions.get(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("qwenonnx.export.torch_extra.metadata.version", version)


def export(checkpoint: Path, target: Path) -> Result:
    return CliRunner().invoke(app, ["export", str(checkpoint), "-o", str(target), "--exporter", "optimum"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"torch": None, "optimum": None, "optimum_onnx": None, "accelerate": None},
            f"needs torch, optimum, optimum-onnx, accelerate, not installed here; install the extra: {INSTALL}",
        ),
        ({"optimum_onnx": None}, f"needs optimum-onnx, not installed here; install the extra: {INSTALL}"),
        ({"torch": None}, f"needs torch, not installed here; install the extra: {INSTALL}"),
        (
            {"transformers": "4.58.1"},
            f"needs transformers<4.58 (version 4.58.1 is installed); install the versions of the extra: {INSTALL}",
        ),
        (
            {"transformers": "5.0.0rc1", "torch": "2.4.1"},
            "needs torch>=2.6 (version 2.4.1 is installed), transformers<4.58 (version 5.0.0rc1 is installed); "
            f"install the versions of the extra: {INSTALL}",
        ),
    ],
)
def test_a_missing_or_unsuitable_part_of_the_extra_is_one_sentence(
    changes: dict[str, str | None],
    sentence: str,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, **changes)

    result = export(tiny_checkpoint, tmp_path / "out")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"qwenonnx: exporting through Optimum {sentence}\n"
    assert names(tmp_path) == []


def test_a_damaged_torch_is_one_sentence(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise OSError("libtorch_cpu.so: cannot open shared object file:\n No such file or directory")

    installed(monkeypatch)
    monkeypatch.setattr(importlib, "import_module", fail)

    result = export(tiny_checkpoint, tmp_path / "out")

    assert result.exit_code == 2
    assert result.stderr == (
        "qwenonnx: torch is installed but cannot be imported (libtorch_cpu.so: cannot open shared object file: No such "
        f"file or directory); install the extra again: {INSTALL}\n"
    )
    assert names(tmp_path) == []


def test_the_extra_is_looked_for_before_a_checkpoint_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, torch=None)
    monkeypatch.setattr("qwenonnx.cli.export.fetch", lambda *args, **options: pytest.fail("it was downloaded"))

    result = CliRunner().invoke(
        app, ["export", "qwen2.5-0.5b", "--models-dir", str(tmp_path), "--exporter", "optimum", "-q"]
    )

    assert result.exit_code == 2
    assert "needs torch" in result.stderr


def test_the_checked_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["optimum"]

    for name, low, high in NEEDED:
        bounds = [f">={'.'.join(map(str, low))}", *([f"<{'.'.join(map(str, high))}"] if high else [])]
        wanted = [line for line in extra if line.partition("[")[0].rstrip("<>=.,0123456789") == name]
        # optimum's own extra brings optimum-onnx
        assert wanted == [] if name == "optimum-onnx" else all(bound in wanted[0] for bound in bounds), name


def test_an_unknown_exporter_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tiny_checkpoint), "-o", str(tmp_path / "o"), "--exporter", "onnx"])

    assert result.exit_code == 2
    assert "'fused', 'optimum'" in result.stderr
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["gguf", "BF16", "untied"])
def test_the_intermediate_folder_holds_the_same_weights(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        source = write_tiny_gguf(tmp_path / "tiny.gguf", dtype="Q8_0")
    else:
        source = write_tiny_checkpoint(
            tmp_path / "source", tied=kind != "untied", dtype="BF16" if kind == "BF16" else "F32"
        )
    checkpoint = open_checkpoint(source)
    folder = tmp_path / "work" / "checkpoint"

    write_safetensors_folder(checkpoint, checkpoint.config, checkpoint.hf_config, folder)
    checkpoint.write_tokenizer(folder)  # only to open it again

    written = open_checkpoint(folder)
    assert written.config == checkpoint.config
    assert written.hf_config["eos_token_id"] == checkpoint.hf_config["eos_token_id"]
    for name in expected_shapes(checkpoint.config):
        np.testing.assert_array_equal(written.tensor(name), checkpoint.tensor(name))


def write_model(folder: Path, *, past: bool = True, location: str | None = None) -> None:
    """Writes a graph with the names of the tiny model's cache, or without; its one weight may be elsewhere."""
    folder.mkdir(parents=True)
    cache = [f"{i}.{kind}" for i in (0, 1) for kind in ("key", "value")] if past else []
    inputs = ["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in cache)]
    outputs = ["logits", *(f"present.{name}" for name in cache)]
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [2], [1.0, 2.0])
    if location is not None:
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in (*inputs, *outputs)}
    nodes = [helper.make_node("Identity", ["weight"], [name]) for name in outputs]
    graph = helper.make_graph(nodes, "g", [values[n] for n in inputs], [values[n] for n in outputs], [weight])
    onnx.save(helper.make_model(graph), str(folder / "model.onnx"))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda output: output.mkdir(parents=True), "Optimum wrote no model.onnx; export the checkpoint without"),
        (
            lambda output: write_model(output, past=False),
            r"Optimum wrote a graph without past_key_values.0.key, so it cannot go on from a KV cache",
        ),
        (
            lambda output: write_model(output, location="../weights.bin"),
            r"Optimum's graph has weights in \.\./weights\.bin, which is not beside it",
        ),
    ],
    ids=["nothing", "no past", "data elsewhere"],
)
def test_a_graph_that_cannot_be_used_leaves_the_old_package(
    write: Callable[[Path], None],
    sentence: str,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("qwenonnx.export.optimum_exporter")
    export_folder(tiny_checkpoint, tmp_path / "out")
    before = contents(tmp_path)
    monkeypatch.setattr(module, "require_optimum", lambda: None)
    monkeypatch.setattr(module, "run_optimum", lambda checkpoint, output: write(output))

    with pytest.raises(ExportError, match=sentence):
        module.export_through_optimum(
            open_checkpoint(tiny_checkpoint), tmp_path / "out", model="tiny", stage=no_progress
        )
    assert contents(tmp_path) == before
