"""`qwenonnx eval` with several packages, and its plot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import qwenonnx.evaluate.fidelity as fidelity
from qwenonnx.cli.main import app
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package

SHORT = ("--max-tokens", "16", "--threads", "1", "--quiet")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, args)])


def test_one_package_has_all_its_figures_and_its_worst_places(tiny_int8: Package) -> None:
    result = run(tiny_int8.folder, *SHORT)

    assert result.exit_code == 0, result.stderr
    *rows, empty, worst = result.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["text", *(text.name for text in bundled_texts()), "overall"]
    assert empty == ""
    assert worst.startswith("worst text ")
    assert ", worst position " in worst


def test_several_packages_are_compared_in_one_run(tiny_fp32: Package, tiny_int8: Package, tmp_path: Path) -> None:
    folders = (tiny_int8.folder, tiny_fp32.folder)

    result = run(*folders, *SHORT, "--json", tmp_path / "both.json")
    alone = run(tiny_int8.folder, *SHORT, "--json", tmp_path / "one.json")

    assert (result.exit_code, alone.exit_code) == (0, 0), result.stderr
    blocks = result.stdout.split("\n\n")
    assert [len(block.splitlines()) for block in blocks] == [len(bundled_texts()) + 1, 3, 2]
    assert blocks[0].splitlines()[0].split() == ["text", "tokens", "int8:", "KL", "top-1", "fp32:", "KL", "top-1"]
    assert [line.split()[0] for line in blocks[1].splitlines()] == ["overall", "int8", "fp32"]
    assert "fp32: worst text " in blocks[2]
    both, one = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("both.json", "one.json"))
    assert list(both) == ["packages"]
    assert list(both["packages"]) == ["int8", "fp32"]
    assert both["packages"]["int8"] == one
    assert abs(both["packages"]["fp32"]["kl_mean"]) < 1e-6
    keys = {"kl_mean", "top1_agreement", "perplexity", "reference_perplexity", "texts", "worst_text"}
    assert keys <= set(one)


def test_packages_of_one_name_are_told_apart_by_their_paths(tiny_int8: Package, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_int8.folder, tmp_path / "int8")

    result = run(tiny_int8.folder, copy, *SHORT, "--json", tmp_path / "both.json")

    assert result.exit_code == 0, result.stderr
    values = json.loads((tmp_path / "both.json").read_text(encoding="utf-8"))
    assert list(values["packages"]) == [str(tiny_int8.folder), str(copy)]


def test_a_package_named_twice_is_refused(tiny_int8: Package) -> None:
    result = run(tiny_int8.folder, f"{tiny_int8.folder}/../int8", *SHORT)

    assert result.exit_code == 2
    assert "the same package is named twice" in result.stderr


def test_a_plot_is_drawn_beside_the_results(tiny_int8: Package, tmp_path: Path) -> None:
    result = run(tiny_int8.folder, *SHORT, "--plot", tmp_path / "kl.svg")

    assert result.exit_code == 0, result.stderr
    drawn = (tmp_path / "kl.svg").read_text(encoding="utf-8")
    assert ">python_code<" in drawn
    assert "tiny fp32" in drawn


@pytest.mark.parametrize(
    ("name", "reason"), [("kl.pdf", "is written as .png or .svg"), ("no/kl.svg", "there is no such folder")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_work(
    name: str, reason: str, tiny_int8: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("must not be evaluated")

    monkeypatch.setattr(fidelity, "measure_candidates", never)

    result = run(tiny_int8.folder, *SHORT, "--plot", tmp_path / name)

    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
