"""`qwenonnx verify` between packages; with PyTorch see tests/optimum."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packages import export_folder
from tiny import tiny_weights, write_safetensors, write_tiny_checkpoint
from typer.testing import CliRunner, Result

from qwenonnx.cli.main import app
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package

SHORT = ("--max-tokens", "24", "--steps", "4", "--threads", "1")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, args)])


@pytest.fixture(scope="session")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The tiny model with one weight a little different."""
    folder = tmp_path_factory.mktemp("changed")
    checkpoint = write_tiny_checkpoint(folder / "checkpoint")
    weights = tiny_weights()
    weights["model.norm.weight"] *= 1.01
    write_safetensors(checkpoint / "model.safetensors", weights)
    return export_folder(checkpoint, folder / "fp32")


def test_a_package_is_the_same_as_itself(tiny_fp32: Package, tmp_path: Path) -> None:
    result = run(tiny_fp32.folder, tiny_fp32.folder, *SHORT, "--json", tmp_path / "out.json")

    assert result.exit_code == 0, result.stderr
    texts, overall = result.stdout.strip().split("\n\n")
    assert [row.split()[0] for row in texts.splitlines()[1:]] == [text.name for text in bundled_texts()]
    assert [row.partition("  ")[0] for row in overall.splitlines()] == [
        "overall",
        "A against B",
        "A in chunks of 16",
        "A one by one",
        "A in a batch of 4",
    ]
    assert "the same: every likeliest token, and all logits within 0.005" in result.stderr
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["holds"] is True
    assert report["overall"]["positions"] == report["overall"]["same"] == 21 * 24
    assert report["overall"]["largest_difference"] == 0
    assert report["pieces"]["one by one"]["positions"] == 21 * 4


def test_a_different_model_fails_with_the_figures(tiny_fp32: Package, changed: Package, tmp_path: Path) -> None:
    result = run(changed.folder, tiny_fp32.folder, *SHORT, "--json", tmp_path / "out.json")

    assert result.exit_code == 1
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["holds"] is False
    place = f"position {report['overall']['position']} of {report['overall']['text']}"
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("qwenonnx: "))
    assert "do not compute the same: A against B, " in line
    assert place in line
    assert "A one by one" not in line


def test_the_tolerance_is_the_users(tiny_fp32: Package, changed: Package) -> None:
    result = run(changed.folder, tiny_fp32.folder, *SHORT, "--tolerance", "2", "-q")

    # The gains of the final norm are all 1 % larger: no likeliest token changes.
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("order", ["quantized first", "quantized second"])
def test_quantized_packages_are_not_judged(tiny_fp32: Package, tiny_int8: Package, order: str, tmp_path: Path) -> None:
    pair = [tiny_int8.folder, tiny_fp32.folder]
    if order == "quantized second":
        pair.reverse()

    result = run(*pair, *SHORT, "--json", tmp_path / "out.json")

    assert result.exit_code == 0, result.stderr
    assert f"not judged, since {tiny_int8.folder} (int8) is not fp32" in result.stderr
    assert "`qwenonnx eval` measures it" in result.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["holds"] is None
    assert report["overall"]["largest_difference"] > 0.01


def test_ones_own_texts_can_be_compared(tiny_fp32: Package, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("The quick brown fox jumps over the lazy dog.", encoding="utf-8")

    result = run(tiny_fp32.folder, tiny_fp32.folder, *SHORT, "--text", tmp_path / "mine.txt", "-q")

    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.split("\n\n")[0].splitlines()) == 2
    assert result.stdout.splitlines()[1].startswith("mine.txt ")
    assert result.stderr == ""


def test_another_model_is_refused(tiny_fp32: Package, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", config={"num_hidden_layers": 1})
    other = export_folder(checkpoint, tmp_path / "other")

    for folder in (other.folder, checkpoint):
        result = run(tiny_fp32.folder, folder, *SHORT, "-q")
        assert result.exit_code == 2
        assert "this is another model than A (1 layers of 64, 512 rows of vocabulary against 2 of 64, 512)" in (
            result.stderr
        )


def test_another_tokenizer_is_refused(tiny_fp32: Package, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = []
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    other = export_folder(checkpoint, tmp_path / "other")

    result = run(tiny_fp32.folder, other.folder, *SHORT, "-q")

    assert result.exit_code == 1
    assert "its tokenizer splits the text 'c_code' into other tokens" in result.stderr


def test_a_checkpoint_needs_torch(tiny_fp32: Package, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("qwenonnx.export.torch_extra.metadata.version", version)

    result = run(tiny_fp32.folder, tiny_checkpoint, *SHORT, "-q")

    assert result.exit_code == 2
    assert result.stderr == (
        "qwenonnx: running a checkpoint in PyTorch needs torch, not installed here; install the extra: "
        "pip install 'qwenonnx[optimum]'\n"
    )


def test_what_is_neither_package_nor_checkpoint_is_refused(tiny_fp32: Package, tmp_path: Path) -> None:
    shutil.copy(tiny_fp32.folder / "tokenizer.json", tmp_path)

    nothing, empty = run(tiny_fp32.folder, tmp_path / "no"), run(tiny_fp32.folder, tmp_path)

    assert (nothing.exit_code, empty.exit_code) == (1, 1)
    assert "no such folder" in nothing.stderr
    assert "there is no checkpoint here" in empty.stderr
