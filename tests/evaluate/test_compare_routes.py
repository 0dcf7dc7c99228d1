"""`scripts/compare_routes.py` on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from qwenonnx.package.package import Package

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_routes.py"
SHORT = ("--length", "24", "--new-tokens", "4", "--repeats", "1", "--eval-tokens", "16", "--threads", "1")


def test_packages_are_measured_side_by_side(tiny_fp32: Package, tiny_int8: Package, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tiny_fp32.folder), str(tiny_int8.folder), *SHORT]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    first, empty, headers, rule, *rows = done.stdout.splitlines()
    assert (first, empty) == ("24 prompt tokens, 4 new ones, 1 threads", "")
    assert headers.startswith("| package | on disk | first token | prefill | decode | peak memory | mean KL |")
    assert rule.startswith("|---|---:|")
    assert [row.split("|")[1].strip() for row in rows] == ["`fp32`", "`int8`"]
    figures = {row["package"]: row for row in json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))}
    assert figures["fp32"]["top1_agreement"] == 1
    assert abs(figures["fp32"]["kl_mean"]) < 1e-6 < figures["int8"]["kl_mean"]
    assert figures["int8"]["bytes"] == tiny_int8.bytes
    for row in figures.values():
        assert min(row[name] for name in ("ttft_ms", "prefill_rate", "decode_rate", "peak_rss_mb")) > 0
