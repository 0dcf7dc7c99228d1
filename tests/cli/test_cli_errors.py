"""What goes wrong is one line on stderr and an exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packages import contents, export_folder
from tiny import write_tiny_checkpoint
from typer.testing import CliRunner

from qwenonnx.cli.main import app
from qwenonnx.package.package import Package


def fail(*args: str | Path, code: int) -> str:
    """Runs a command that must fail; returns the one line it says."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input="")
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("qwenonnx: ")
    return line


@pytest.mark.parametrize("command", ["quantize", "inspect", "eval", "bench", "serve", "chat"])
def test_a_folder_that_is_no_package_is_a_failure(command: str, tmp_path: Path) -> None:
    assert "not a package" in fail(command, tmp_path, code=1)
    assert "nowhere: no such folder" in fail(command, tmp_path / "nowhere", code=1)


@pytest.mark.parametrize("command", ["quantize", "inspect", "eval", "bench", "serve", "chat"])
def test_a_damaged_package_is_a_failure_that_names_the_file(command: str, tiny_fp32: Package, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny_fp32.folder, tmp_path / "fp32")
    with (damaged / "model.onnx.data").open("r+b") as file:
        file.truncate(1000)

    assert "fp32/model.onnx.data: 1,000 bytes, but the manifest says" in fail(command, damaged, code=1)


def test_a_source_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    assert "there is no such file or folder" in fail("export", tmp_path / "nowhere", code=2)


def test_a_folder_without_a_checkpoint_is_a_failure(tmp_path: Path) -> None:
    assert "there is no checkpoint here" in fail("export", tmp_path, "-o", tmp_path / "out", code=1)


def test_a_target_with_foreign_files_is_a_failure(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    assert "thesis.txt" in fail("export", tiny_checkpoint, "-o", tmp_path, "-q", code=1)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


def test_quantizing_wrongly_is_a_failure(tiny_fp32: Package, tiny_int8: Package, tmp_path: Path) -> None:
    assert "already quantized" in fail("quantize", tiny_int8.folder, "-o", tmp_path / "out", "-q", code=1)
    assert "no recipe 'int3'" in fail("quantize", tiny_fp32.folder, "-o", tmp_path / "out", "--recipe", "int3", code=1)
    assert "the same folder" in fail("quantize", tiny_fp32.folder, "-o", tiny_fp32.folder, code=1)
    assert not list(tmp_path.iterdir())


def test_a_benchmark_longer_than_the_context_is_a_usage_error(tiny_fp32: Package) -> None:
    line = fail("bench", tiny_fp32.folder, "--prompt", "2000", "--new-tokens", "100", code=2)

    assert "2,100 tokens are more than this model's context of 2,048" in line


def test_an_evaluation_longer_than_the_context_is_a_usage_error(tiny_fp32: Package) -> None:
    assert "2,048" in fail("eval", tiny_fp32.folder, "--max-tokens", "4000", "-q", code=2)


def test_evaluating_different_models_is_a_usage_error(tiny_int8: Package, tmp_path: Path) -> None:
    other = export_folder(write_tiny_checkpoint(tmp_path / "c", config={"vocab_size": 600}), tmp_path / "other")

    line = fail("eval", tiny_int8.folder, "--reference", other.folder, "-q", code=2)

    assert "512 and 600 rows of vocabulary" in line


def test_a_text_that_cannot_be_read_is_a_usage_error(tiny_fp32: Package, tmp_path: Path) -> None:
    assert "cannot be read as UTF-8" in fail("eval", tiny_fp32.folder, "--text", tmp_path / "none.txt", "-q", code=2)


@pytest.mark.parametrize("command", ["inspect", "eval", "bench"])
def test_a_place_for_results_is_checked_before_the_work(command: str, tiny_fp32: Package, tmp_path: Path) -> None:
    line = fail(command, tiny_fp32.folder, "--json", tmp_path / "nowhere" / "out.json", code=2)

    assert "nowhere: there is no such folder" in line
    assert "this is a folder" in fail(command, tiny_fp32.folder, "--json", tmp_path, code=2)


def test_no_answering_server_is_a_failure() -> None:
    assert "no answer" in fail("chat", "http://127.0.0.1:9", code=1)


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "DIR", "--prompt", "0"],
        ["bench", "DIR", "--new-tokens", "1"],
        ["bench", "DIR", "--threads", "0"],
        ["eval", "DIR", "--max-tokens", "1"],
        ["chat", "DIR", "--temperature", "3"],
        ["quantize"],
        ["unheard-of"],
        ["inspect", "DIR", "--unheard-of"],
    ],
    ids=" ".join,
)
def test_wrong_options_are_usage_errors(args: list[str]) -> None:
    result = CliRunner().invoke(app, args)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_traceback_is_shown_with_debug(tmp_path: Path) -> None:
    plain, debug = (command(*flags, "inspect", tmp_path) for flags in ([], ["--debug"]))

    assert plain.returncode == 1
    assert len(plain.stderr.splitlines()) == 1
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert debug.stderr.splitlines()[-1].endswith("make one with `qwenonnx export`.")


def test_a_closed_pipe_is_no_crash(tiny_fp32: Package) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        process = subprocess.run(
            [sys.executable, "-m", "qwenonnx", "inspect", str(tiny_fp32.folder), "--quiet"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert process.stderr == ""
    assert process.returncode in (0, 1)


def test_a_file_that_may_not_be_written_is_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert "file" in fail("export", tiny_checkpoint, "-o", tmp_path / "file" / "out", "-q", code=1)


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "qwenonnx", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
