"""`scripts/compare_greedy.py` on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from qwenonnx.package.package import Package

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_greedy.py"
PROMPTS = Path(__file__).parents[1] / "data" / "greedy_prompts.json"


def compare(package: Package, reference: Package, report: Path) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), str(package.folder), str(reference.folder), "--json", str(report)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    values: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return result.stdout, values


def test_there_are_fifty_different_prompts() -> None:
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))

    assert len(prompts) == len(set(prompts)) == 50
    assert all(isinstance(prompt, str) and prompt.strip() for prompt in prompts)


def test_a_package_agrees_with_itself(tiny_fp32: Package, tmp_path: Path) -> None:
    printed, report = compare(tiny_fp32, tiny_fp32, tmp_path / "report.json")

    assert printed == "50 of 50 answers begin with the same 32 tokens\n"
    assert (report["agreeing"], report["prompts"], len(report["answers"])) == (50, 50, 50)
    assert all(answer["parts_at"] is None for answer in report["answers"])


def test_answers_that_part_are_shown_with_place_and_margin(
    tiny_fp32: Package, tiny_int8: Package, tmp_path: Path
) -> None:
    printed, report = compare(tiny_int8, tiny_fp32, tmp_path / "report.json")

    parted = [answer for answer in report["answers"] if answer["parts_at"] is not None]
    assert 0 < len(parted) == 50 - report["agreeing"]
    assert printed.splitlines()[-1] == f"{report['agreeing']} of 50 answers begin with the same 32 tokens"
    assert printed.count("the reference says") == len(parted)
    for answer in parted:
        assert 0 <= answer["parts_at"] < 32
        assert answer["margin"] > 0
