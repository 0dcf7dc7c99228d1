"""The order of the recipes' fidelity, on the tiny model."""

from __future__ import annotations

from pathlib import Path

from packages import no_progress, package_runner, quantize

from qwenonnx.evaluate.fidelity import measure_candidates
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package
from qwenonnx.quantize.options import QuantizeOptions
from qwenonnx.quantize.quantizer import quantize_package
from qwenonnx.text.tokenizer import Tokenizer


def test_recipes_with_more_bits_are_nearer_to_fp32(tiny_fp32: Package, tiny_int8: Package, tmp_path: Path) -> None:
    calibration = tmp_path / "calibration.txt"
    calibration.write_text(
        "The river rises in the mountains and reaches the sea after many days. " * 8, encoding="utf-8"
    )
    packages = {
        "int8-block": quantize(tiny_fp32, tmp_path / "int8-block", "int8-block"),
        "int8": tiny_int8,
        # A random model in 4 bits is past the limit that trained ones keep.
        "int4": quantize_package(
            tiny_fp32,
            tmp_path / "int4",
            "int4",
            stage=no_progress,
            options=QuantizeOptions(calibration=(calibration,), gate=False),
        ),
    }

    reports = measure_candidates(
        package_runner(tiny_fp32),
        {name: package_runner(package) for name, package in packages.items()},
        Tokenizer.load(tiny_fp32.folder),
        bundled_texts(),
        max_tokens=96,
    )

    overall = [reports[name].overall.kl_mean for name in packages]
    assert 0 < overall[0] < overall[1] < overall[2]
    for int8, int4 in zip(reports["int8"].texts, reports["int4"].texts, strict=True):
        assert int8.comparison.kl_mean < int4.comparison.kl_mean
