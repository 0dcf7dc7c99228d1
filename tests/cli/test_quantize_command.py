"""`quantize` on what it cannot quantize: one sentence, exit 1, and not a byte of the input changed."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from packages import contents, names
from typer.testing import CliRunner, Result

from qwenonnx.cli.main import app
from qwenonnx.package.manifest import Manifest
from qwenonnx.package.package import Package
from qwenonnx.package.writer import finish_package


def quantize(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, args)])


def refused(*args: str | Path) -> str:
    """Runs a command that must fail; returns the one sentence it says."""
    result = quantize(*args, "--quiet")
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("qwenonnx: ")
    return line


@pytest.fixture
def fp32(tiny_fp32: Package, tmp_path: Path) -> Path:
    """A copy of the fp32 package."""
    return shutil.copytree(tiny_fp32.folder, tmp_path / "fp32")


def a_zip() -> bytes:
    """A zip file, as browsers and chat programs make of a folder."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.onnx", b"inside")
    return buffer.getvalue()


def test_a_quantized_package_is_not_quantized_again(tiny_int8: Package, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_int8.folder, tmp_path / "int8")
    before = contents(folder)

    for recipe in ("int8", "int4", "dynamic"):
        line = refused(folder, "-o", tmp_path / "out", "--recipe", recipe)
        assert "int8: already quantized (recipe int8); quantize the fp32 package that it was made from" in line

    assert contents(folder) == before
    assert names(tmp_path) == ["int8"]


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_the_input_is_not_the_output(recipe: str, fp32: Path) -> None:
    before = contents(fp32)

    for target in (fp32, fp32 / ".", fp32.parent / "x" / ".." / "fp32"):
        assert "input and output are the same folder" in refused(fp32, "-o", target, "--recipe", recipe)

    assert contents(fp32) == before
    assert names(fp32.parent) == ["fp32"]


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "in a folder"])
def test_a_zip_called_onnx_is_no_package(inside: bool, tmp_path: Path) -> None:
    archive = tmp_path / "folder" / "model.onnx" if inside else tmp_path / "model.onnx"
    archive.parent.mkdir(exist_ok=True)
    archive.write_bytes(a_zip())

    line = refused(archive, "-o", tmp_path / "out")

    assert f"{archive}: this is a file, not a package's folder" in line
    assert archive.read_bytes() == a_zip()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("listed", [False, True], ids=["as it was", "in the manifest"])
def test_a_zip_in_the_place_of_the_graph_is_refused(listed: bool, fp32: Path) -> None:
    (fp32 / "model.onnx").write_bytes(a_zip())
    if listed:
        finish_package(fp32, Manifest.read(fp32))
    before = contents(fp32)

    line = refused(fp32, "-o", fp32.parent / "out")

    assert "fp32/model.onnx: " in line
    assert ("zip archive" in line) is listed
    assert contents(fp32) == before
    assert names(fp32.parent) == ["fp32"]


@pytest.mark.parametrize("output", [True, False], ids=["named", "by default"])
def test_a_folder_that_cannot_be_written_is_refused(
    output: bool, fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(fp32)
    locked = tmp_path / "locked" if output else tmp_path
    locked.mkdir(exist_ok=True)
    found = names(locked)
    really = os.access
    # Whoever runs the tests may be allowed everything, so this is what the system would say to others.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and really(path, mode))

    line = refused(fp32, *(("-o", locked / "int8") if output else ()))

    assert f"{locked} cannot be written to; choose another folder with -o" in line
    assert contents(fp32) == before
    assert names(locked) == found


def test_a_recipe_of_another_kind_of_graph_is_refused_with_those_that_fit(fp32: Path) -> None:
    for recipe in ("dynamic", "static"):
        line = refused(fp32, "--recipe", recipe)
        assert f"the recipe {recipe} is for graphs of other exporters, and this one is fused" in line
        assert line.endswith("choose one of: int8, int8-block, int4.")
    assert names(fp32.parent) == ["fp32"]


@pytest.mark.parametrize("option", ["--per-channel", "--no-per-channel", "--reduce-range"])
def test_options_of_other_recipes_are_refused(option: str, fp32: Path) -> None:
    line = refused(fp32, option)

    assert line.endswith(f"the recipe int8 knows no {option.replace('--no-', '--')}; leave it out.")
    assert names(fp32.parent) == ["fp32"]


def test_a_pattern_that_matches_nothing_is_refused(fp32: Path) -> None:
    assert "--exclude *.q: no linear has such a name" in refused(fp32, "--exclude", "*.o_proj", "--exclude", "*.q")
    assert names(fp32.parent) == ["fp32"]


def test_linears_can_be_excluded(fp32: Path) -> None:
    result = quantize(fp32, "--exclude", "*.down_proj", "--exclude", "lm_head", "-q")

    assert result.exit_code == 0, result.output
    chosen = Package.open(fp32.parent / "int8").manifest.details["quantization"]
    assert chosen["exclude"] == ["*.down_proj", "lm_head"]
