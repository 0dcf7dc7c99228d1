"""`export --exporter optimum` on the tiny model: the package, the figures in it, and what users see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from packages import ONE_THREAD, TOKENS, names, no_progress, package_runner
from tiny import write_tiny_checkpoint, write_tiny_gguf

from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.errors import ExportError, VerificationError
from qwenonnx.export import optimum_exporter
from qwenonnx.export.optimum_exporter import export_through_optimum
from qwenonnx.export.torch_extra import TorchModel
from qwenonnx.export.verify import MAX_LOGIT_DIFFERENCE
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import load_runner

pytestmark = pytest.mark.optimum


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qwenonnx", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The tiny model through Optimum."""
    target = tmp_path_factory.mktemp("optimum") / "optimum-fp32"
    return export_through_optimum(open_checkpoint(tiny_checkpoint), target, model="tiny", stage=no_progress)


def test_the_package_is_whole_and_says_where_it_is_from(exported: Package, tiny_fp32: Package) -> None:
    exported.check_sums()
    manifest = exported.manifest

    assert names(exported.folder) == sorted([*manifest.files, "qwenonnx.json"])
    assert names(exported.folder.parent) == ["optimum-fp32"]
    assert (manifest.model, manifest.recipe, manifest.graph) == ("tiny", "fp32", "portable")
    assert manifest.source == tiny_fp32.manifest.source
    for field in ("num_tokens", "end_token_ids", "context_length"):
        assert getattr(manifest, field) == getattr(tiny_fp32.manifest, field)
    assert set(manifest.versions) == {
        "qwenonnx",
        "onnx",
        "onnxruntime",
        "torch",
        "transformers",
        "optimum",
        "optimum-onnx",
    }
    assert manifest.details["exporter"] == "optimum"
    graph = onnx.load(str(exported.model_path), load_external_data=False).graph
    assert list(manifest.inputs) == [value.name for value in graph.input]
    assert list(manifest.outputs) == [value.name for value in graph.output]


def test_the_graph_was_checked_against_numpy_and_pytorch(exported: Package) -> None:
    check, torch = (exported.manifest.details[name] for name in ("verification", "pytorch"))

    assert (check["positions"], check["top1_agreement"]) == (64, 1)
    assert check["max_logit_difference"] < MAX_LOGIT_DIFFERENCE
    assert (torch["texts"], torch["positions"], torch["same"]) == (8, 8 * 64, 8 * 64)
    assert 0 < torch["largest_difference"] < MAX_LOGIT_DIFFERENCE


def test_it_computes_what_the_fused_graph_computes(exported: Package, tiny_fp32: Package) -> None:
    logits = load_runner(exported, ONE_THREAD, context_length=64).score(TOKENS, 0)

    assert np.abs(logits - package_runner(tiny_fp32).score(TOKENS, 0)).max() < 1e-4


@pytest.mark.parametrize("kind", ["gguf", "untied", "bf16 in shards"])
def test_other_kinds_of_checkpoints_can_be_exported(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        source = write_tiny_gguf(tmp_path / "tiny.gguf", dtype="Q8_0")
    elif kind == "untied":
        source = write_tiny_checkpoint(tmp_path / "checkpoint", tied=False)
    else:
        source = write_tiny_checkpoint(tmp_path / "checkpoint", dtype="BF16", shards=2)

    done = run("export", source, "--exporter", "optimum", "-o", tmp_path / "deep" / "out")

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'deep' / 'out'}\n"
    assert names(tmp_path / "deep") == ["out"]
    verified = run("verify", tmp_path / "deep" / "out", source, "--max-tokens", "40", "--steps", "4")
    assert verified.returncode == 0, verified.stderr


def test_users_see_the_stages_and_nothing_of_the_tools(tiny_checkpoint: Path, tmp_path: Path) -> None:
    loud = run("export", tiny_checkpoint, "--exporter", "optimum", "-o", tmp_path / "out")
    quiet = run("export", tiny_checkpoint, "--exporter", "optimum", "-o", tmp_path / "out", "-q")

    assert (loud.returncode, quiet.returncode, quiet.stderr) == (0, 0, "")
    stages = [line.partition(":")[0] for line in loud.stderr.splitlines() if not line.endswith("…")]
    assert stages == [
        "opening the checkpoint",
        "writing the checkpoint for Optimum",
        "exporting with Optimum",
        "checking the graph",
        "comparing with PyTorch",
        "summing the files",
        "checked against the checkpoint on 64 tokens",
        "checked against PyTorch on 512 tokens of 8 texts",
    ]


def test_an_error_of_optimum_is_one_sentence(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)

    def broken(weights: object, config: object, hf_config: object, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimum_exporter, "write_safetensors_folder", broken)
        with pytest.raises((ExportError, OSError)) as caught:
            export_through_optimum(checkpoint, tmp_path / "out", model="tiny", stage=no_progress)

    assert isinstance(caught.value, ExportError)
    assert str(caught.value).startswith("Optimum could not export the checkpoint (")
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


def test_a_graph_that_differs_from_pytorch_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    class Other(TorchModel):
        """PyTorch with another opinion."""

        def score(self, token_ids: object, start: int) -> object:  # type: ignore[override]
            return super().score(token_ids, start) + 0.01  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimum_exporter, "TorchModel", Other)
        with pytest.raises(VerificationError, match=r"out: the exported graph differs from PyTorch: same likeliest"):
            export_through_optimum(open_checkpoint(tiny_checkpoint), tmp_path / "out", model="tiny", stage=no_progress)
    assert names(tmp_path) == []


def test_the_model_in_pytorch_goes_on_from_its_cache(tiny_checkpoint: Path) -> None:
    model = TorchModel(open_checkpoint(tiny_checkpoint), threads=1)
    whole = model.score(TOKENS, 0)

    pieces = np.concatenate([model.score(TOKENS[:5], 0), model.score(TOKENS[5:], 5)])

    np.testing.assert_allclose(pieces, whole, atol=1e-4)
