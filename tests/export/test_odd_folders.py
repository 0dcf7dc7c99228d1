"""Folder names that trip path handling: every step must work in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from packages import TOKENS, export_folder, package_runner, quantize

from qwenonnx.package.package import Package

NAMES = (
    "mod el é 模型 🤖",
    "100% %20 %s {x} $HOME",
    "-o",
    "a'b\"c;d",
    "x" * 200,
    "模" * 80,
    ".hidden",
    "n\newline",
)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_odd_names_work_from_checkpoint_to_logits(name: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    base = tmp_path / name
    checkpoint = shutil.copytree(tiny_checkpoint, base / name)

    fp32 = export_folder(checkpoint, base / "out" / name)
    int8 = quantize(fp32, base / "int8" / name)
    quantize(fp32, base / "int8" / name)

    for package in (fp32, int8):
        reopened = Package.open(package.folder)
        reopened.check_sums()
        assert package_runner(reopened).prefill(0, TOKENS, 0).shape == (512,)
    assert [path.name for path in (base / "int8").iterdir()] == [name]


@pytest.mark.parametrize("form", ["{}", "{}/", "./{}", "a/../{}", "a/./../{}/"])
def test_relative_paths_and_slashes_work(
    form: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    shutil.copytree(tiny_checkpoint, "checkpoint")

    fp32 = export_folder(Path(form.format("checkpoint")), Path(form.format("fp32")))
    int8 = quantize(Package.open(Path(form.format("fp32"))), Path(form.format("int8")))

    assert package_runner(int8).prefill(0, TOKENS, 0).argmax() == package_runner(fp32).prefill(0, TOKENS, 0).argmax()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "checkpoint", "fp32", "int8"]
