"""The plot: what it shows, and that it is the same each time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from qwenonnx.errors import UsageError
from qwenonnx.evaluate.fidelity import FidelityReport, TextResult
from qwenonnx.evaluate.metrics import Comparison
from qwenonnx.evaluate.plot import check_plot_path, plot_reports

NAMES = ("english", "c_code", "中文.txt", "costs $5 & <more> $", "x" * 200)


def report(*means: float) -> FidelityReport:
    return FidelityReport(
        tuple(
            TextResult(name, Comparison(positions=100, kl=100 * mean)) for name, mean in zip(NAMES, means, strict=True)
        )
    )


REPORTS = {"int8": report(0.002, 0.001, 0.003, 0.004, 0.005), "int4": report(0.02, 0.01, 0.03, 0.04, 0.05)}


def test_an_svg_names_every_text_and_package_and_the_reference(tmp_path: Path) -> None:
    plot_reports(REPORTS, "some-model fp32", tmp_path / "plot.svg")

    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for text in ("english", "c_code", "中文.txt", "costs $5 &amp; &lt;more&gt; $", "x" * 39 + "…"):
        assert f">{text}<" in drawn
    assert ">int8 (overall 0.00300)<" in drawn
    assert ">int4 (overall 0.03000)<" in drawn
    assert ">KL divergence from some-model fp32, by text<" in drawn
    for tick in ("0.001", "0.01", "0.05"):
        assert f">{tick}<" in drawn
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]


def test_equal_figures_give_equal_bytes(tmp_path: Path) -> None:
    for suffix in ("svg", "png"):
        for name in ("first", "second"):
            plot_reports(REPORTS, "fp32", tmp_path / f"{name}.{suffix}")

        assert (tmp_path / f"first.{suffix}").read_bytes() == (tmp_path / f"second.{suffix}").read_bytes()
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")


def test_texts_are_sorted_with_the_most_faithful_on_top(tmp_path: Path) -> None:
    plot_reports({"int8": REPORTS["int8"]}, "fp32", tmp_path / "plot.svg")

    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    places = [drawn.index(f">{name}<") for name in ("c_code", "english", "中文.txt")]
    assert places == sorted(places)


def test_a_package_that_equals_its_reference_can_be_drawn(tmp_path: Path) -> None:
    reports = {f"copy {i}": report(0.0, -1e-12, 0.0, 0.0, 0.0) for i in range(9)}

    plot_reports(reports, "fp32", tmp_path / "plot.png")

    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("mean", [0.0033, 0.00012, 0.9])
def test_the_axis_has_a_number_however_near_the_figures_are(mean: float, tmp_path: Path) -> None:
    plot_reports({"int8": report(mean, mean, mean, mean, mean * 1.01)}, "fp32", tmp_path / "plot.svg")

    assert re.search(r">0\.\d+<|>\d<|>\de-05<", (tmp_path / "plot.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["plot.SVG", "plot.png", "a.b.svg"])
def test_known_suffixes_are_accepted(name: str) -> None:
    check_plot_path(Path(name))


@pytest.mark.parametrize("name", ["plot", "plot.pdf", "svg", "plot.svg.gz"])
def test_other_suffixes_are_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name}: a plot is written as \.png or \.svg; "):
        check_plot_path(Path(name))


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(UsageError, match=r"pip install 'qwenonnx\[plot\]'$"):
        check_plot_path(Path("plot.svg"))
