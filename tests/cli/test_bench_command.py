"""`qwenonnx bench`: the comparison with what a package was quantized from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import qwenonnx.bench.measure as measuring
from qwenonnx.bench.measure import Measurement, Workload
from qwenonnx.cli.main import app
from qwenonnx.engine.engine import Engine
from qwenonnx.files import Progress
from qwenonnx.package.package import Package

SHORT = ("--prompt", "20", "--prompt", "7", "--new-tokens", "4", "--repeats", "1", "--threads", "1")


def run(*args: str | Path) -> Result:
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    assert result.exit_code == 0, result.stderr
    return result


def figures(*args: str | Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(*args, *SHORT, "--json", "-").stdout)
    return values


class Scripted:
    """Takes the place of measuring: the package decodes at the first rate, its source at the second."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self.workloads: list[Workload] = []

    def __call__(
        self, engine: Engine, vocabulary: int, workload: Workload, progress: Progress | None = None
    ) -> list[Measurement]:
        rate = self._rates[len(self.workloads)]
        self.workloads.append(workload)
        return [Measurement(length, 4, 0.1, rate * 10, rate, 0.1, 0.1) for length in workload.prompt_lengths]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    script = Scripted([14.0, 20.0])
    monkeypatch.setattr(measuring, "measure", script)
    return script


def test_a_quantized_package_is_compared_with_fp32_beside_it(tiny_int8: Package) -> None:
    values = figures(tiny_int8.folder)

    assert values["source"]["recipe"] == "fp32"
    assert values["source"]["prompt_tokens"] == 7
    assert values["source"]["decode_speedup"] > 0
    assert values["source"]["prefill_speedup"] > 0
    assert set(values["cpu_flags"]) == {"present", "missing"}
    assert (values["warning"] is None) is (values["source"]["decode_speedup"] > 1)


def test_a_package_that_is_slower_than_its_source_is_warned_about(tiny_int8: Package, scripted: Scripted) -> None:
    result = run(tiny_int8.folder, *SHORT, "--json", "-")

    (line,) = (line for line in result.stderr.splitlines() if "warning" in line)
    assert line.startswith("warning: int8 does not decode faster than its source on this machine (14.0 against 20.0")
    assert f"comparing with {tiny_int8.folder.parent / 'fp32'} (16 tokens, twice)" in result.stderr
    values = json.loads(result.stdout)
    assert f"warning: {values['warning']}" == line
    assert values["source"]["decode_speedup"] == pytest.approx(0.7)
    assert [workload.prompt_lengths for workload in scripted.workloads] == [(20, 7), (7,)]


def test_the_speedup_is_shown_to_people(tiny_int8: Package, scripted: Scripted) -> None:
    result = run(tiny_int8.folder, *SHORT, "--quiet")

    assert "beside fp32, after 7 tokens: decode 0.70 times as fast (20.0/s there), prefill 0.70" in result.stdout
    assert result.stderr == ""


def test_memory_is_that_of_the_package_alone(
    tiny_int8: Package, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qwenonnx.runtime.memory as memory

    measured_before: list[int] = []
    real = memory.process_memory

    def process_memory() -> memory.ProcessMemory:
        measured_before.append(len(scripted.workloads))
        return real()

    monkeypatch.setattr(memory, "process_memory", process_memory)
    run(tiny_int8.folder, *SHORT)

    assert measured_before == [1]
    assert len(scripted.workloads) == 2


def test_there_is_no_comparison_where_it_is_not_wanted_or_not_possible(
    tiny_fp32: Package, tiny_int8: Package, tmp_path: Path
) -> None:
    alone = shutil.copytree(tiny_int8.folder, tmp_path / "int8")
    without = [figures(tiny_int8.folder, "--no-compare"), figures(tiny_fp32.folder), figures(alone)]
    damaged = shutil.copytree(tiny_fp32.folder, tmp_path / "fp32")
    (damaged / "model.onnx").unlink()
    without.append(figures(alone))

    for values in without:
        assert values["source"] is None
        assert values["warning"] is None


def test_the_source_can_be_named(tiny_fp32: Package, tiny_int8: Package, tmp_path: Path) -> None:
    alone = shutil.copytree(tiny_int8.folder, tmp_path / "alone")

    assert figures(alone, "--source", tiny_fp32.folder)["source"]["recipe"] == "fp32"

    missing = CliRunner().invoke(app, ["bench", str(alone), "--source", str(tmp_path / "none"), *SHORT])
    assert missing.exit_code == 1
    assert "none: no such folder" in missing.stderr


def test_the_engine_is_measured_instead_where_that_is_asked_for(tiny_fp32: Package) -> None:
    few = ("--prompt", "10", "--new-tokens", "3", "--repeats", "1", "--threads", "1")
    modes = ("--streams", "1", "--streams", "3", "--turns", "2", "--soak", "8", "--copy")
    values = json.loads(run(tiny_fp32.folder, *few, *modes, "--json", "-").stdout)

    assert [entry["streams"] for entry in values["streams"]] == [1, 3]
    assert [entry["prompt_tokens"] for entry in values["turns"]] == [10, 23]
    assert values["long_prompts"]["streams"] == 3
    assert values["soak"]["requests"] == 8
    assert [entry["task"] for entry in values["copy"]] == ["edit of a file", "free text"]
    assert "runs" not in values


def test_the_engines_figures_are_shown_to_people(tiny_fp32: Package) -> None:
    few = ("--prompt", "10", "--new-tokens", "3", "--repeats", "1", "--threads", "1", "--quiet")
    shown = run(tiny_fp32.folder, *few, "--streams", "2", "--turns", "2", "--soak", "8", "--copy").stdout

    for text in ("2 x (10 + 3)", "2 streams while prompts of", "to turn 1", "edit of a file", "left over: 0 requests"):
        assert text in shown


def test_turns_that_do_not_fit_the_context_are_refused(tiny_fp32: Package) -> None:
    result = CliRunner().invoke(app, ["bench", str(tiny_fp32.folder), "--turns", "100000"])

    assert result.exit_code == 2
    assert "tokens are more than this model's context of" in result.stderr
