"""The commands on the tiny model, from checkpoint to chat."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from packages import contents
from typer.testing import CliRunner, Result

from qwenonnx.cli.main import app
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package

BENCH = ("--prompt", "3", "--prompt", "20", "--new-tokens", "4", "--repeats", "1", "--threads", "1")


def run(*args: str | Path, text: str | None = None) -> Result:
    """Runs a command that must succeed."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=text)
    assert result.exit_code == 0, result.stderr
    return result


def test_from_checkpoint_to_chat(tiny_checkpoint: Path, tmp_path: Path) -> None:
    exported = run("export", tiny_checkpoint, "-o", tmp_path / "fp32")
    quantized = run("quantize", tmp_path / "fp32")
    inspected = run("inspect", tmp_path / "int8")
    evaluated = run("eval", tmp_path / "int8", "--max-tokens", "32")
    measured = run("bench", tmp_path / "int8", *BENCH)
    answered = run("chat", tmp_path / "int8", "--max-tokens", "8", text="Hello")

    assert exported.stdout == f"{tmp_path / 'fp32'}\n"
    assert "checked against the checkpoint on 64 tokens" in exported.stderr
    assert "writing the graph: done" in exported.stderr
    assert quantized.stdout == f"{tmp_path / 'int8'}\n"
    assert "int8 (fused graph)" in inspected.stdout
    assert "MatMulIntegerToFloat" in inspected.stdout
    assert "all files match their sums" in inspected.stdout
    assert [line.split()[0] for line in evaluated.stdout.splitlines() if line][-2:] == ["overall", "worst"]
    assert (
        len(evaluated.stdout.splitlines()) == len(bundled_texts()) + 4
    )  # headings, overall, an empty line, worst places
    assert "3 + 4" in measured.stdout
    assert "20 + 4" in measured.stdout
    assert answered.stdout.endswith("\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp32", "int8"]


def test_default_outputs_are_below_the_models_folder_and_beside_the_input(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_checkpoint, "My-Model/checkpoint")

    exported = run("export", "My-Model/checkpoint", "--models-dir", "all")
    monkeypatch.chdir(tmp_path / "all" / "my-model" / "fp32")
    quantized = run("quantize", ".")

    assert exported.stdout == "all/my-model/fp32\n"
    assert Path(quantized.stdout.strip()) == tmp_path / "all" / "my-model" / "int8"
    assert Package.open(Path(quantized.stdout.strip())).manifest.model == "my-model"


def test_the_paths_that_are_printed_are_relative_where_the_input_is(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_checkpoint, "tiny/checkpoint")

    assert run("export", "tiny/checkpoint", "-q").stdout == "models/tiny/fp32\n"
    assert run("quantize", "models/tiny/fp32/", "-q").stdout == "models/tiny/int8\n"


def test_replacing_a_package_is_said_in_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export = ("export", tiny_checkpoint, "-o", tmp_path / "fp32")
    quantize = ("quantize", tmp_path / "fp32")
    for command, name in ((export, "fp32"), (quantize, "int8")):
        first, second, quiet = run(*command), run(*command), run(*command, "-q")

        assert "replacing" not in first.stderr
        assert second.stderr.splitlines().count(f"replacing the package in {tmp_path / name}") == 1
        assert quiet.stderr == ""


def commands_with_json(fp32: Path, int8: Path) -> dict[str, Sequence[str | Path]]:
    return {
        "inspect": ("inspect", int8),
        "eval": ("eval", int8, "--reference", fp32, "--max-tokens", "16", "--threads", "1"),
        "bench": ("bench", int8, *BENCH),
    }


@pytest.mark.parametrize("name", ["inspect", "eval", "bench"])
def test_json_on_stdout_is_json_and_nothing_else(name: str, tiny_fp32: Package, tiny_int8: Package) -> None:
    result = run(*commands_with_json(tiny_fp32.folder, tiny_int8.folder)[name], "--json", "-")

    values = json.loads(result.stdout)
    expected = {"inspect": "operators", "eval": "kl_mean", "bench": "runs"}
    assert expected[name] in values
    assert ": done in" in result.stderr


@pytest.mark.parametrize("name", ["inspect", "eval", "bench"])
def test_json_in_a_file_comes_beside_the_table(
    name: str, tiny_fp32: Package, tiny_int8: Package, tmp_path: Path
) -> None:
    result = run(*commands_with_json(tiny_fp32.folder, tiny_int8.folder)[name], "--json", tmp_path / "out.json")

    assert isinstance(json.loads((tmp_path / "out.json").read_text(encoding="utf-8")), dict)
    assert len(result.stdout.splitlines()) > 2


@pytest.mark.parametrize("name", ["export", "quantize", "inspect", "eval", "bench"])
def test_quiet_says_nothing_on_stderr(
    name: str, tiny_checkpoint: Path, tiny_fp32: Package, tiny_int8: Package, tmp_path: Path
) -> None:
    commands = {
        **commands_with_json(tiny_fp32.folder, tiny_int8.folder),
        "export": ("export", tiny_checkpoint, "-o", tmp_path / "out"),
        "quantize": ("quantize", tiny_fp32.folder, "-o", tmp_path / "out"),
    }

    result = run(*commands[name], "--quiet")

    assert result.stderr == ""
    assert result.stdout


def test_bench_reports_what_was_measured(tiny_int8: Package) -> None:
    values = json.loads(run("bench", tiny_int8.folder, *BENCH, "--json", "-").stdout)

    assert [(entry["prompt_tokens"], entry["new_tokens"]) for entry in values["runs"]] == [(3, 4), (20, 4)]
    assert all(entry[key] > 0 for entry in values["runs"] for key in ("ttft", "prefill_rate", "decode_rate"))
    assert values["recipe"] == "int8"
    assert values["threads"] == 1
    assert values["memory"]["peak"] >= values["memory"]["resident"] > 0
    assert set(values["cpu"]) == {"model", "flags"}


def test_a_package_evaluated_against_itself_is_perfect(tiny_fp32: Package, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("The quick brown fox jumps over the lazy dog.", encoding="utf-8")

    result = run("eval", tiny_fp32.folder, "--text", tmp_path / "mine.txt", "--json", "-")

    values = json.loads(result.stdout)
    assert values["top1_agreement"] == 1
    assert abs(values["kl_mean"]) < 1e-6
    assert list(values["texts"]) == ["mine.txt"]


def test_inspect_without_the_check_says_so(tiny_int8: Package) -> None:
    result = run("inspect", tiny_int8.folder, "--no-check")

    assert "not checked" in result.stdout
    assert "match their sums" not in result.stdout


def test_a_piped_question_is_answered_once_and_the_same_every_time(tiny_int8: Package) -> None:
    chat = ("chat", tiny_int8.folder, "--max-tokens", "12", "--system", "Be brief.", "--threads", "1")

    first, second = run(*chat, text="Hello é 模型\n"), run(*chat, text="Hello é 模型\n")

    assert first.stdout == second.stdout
    assert first.stderr in ("", "[stopped at --max-tokens 12]\n")
    assert len(first.stdout) >= 12


def test_reading_commands_change_nothing(tiny_fp32: Package, tiny_int8: Package) -> None:
    root = tiny_int8.folder.parent
    before = contents(root)

    for command in commands_with_json(tiny_fp32.folder, tiny_int8.folder).values():
        run(*command)
    run("chat", tiny_int8.folder, "--max-tokens", "2", text="Hi")

    assert contents(root) == before
