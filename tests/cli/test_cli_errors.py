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

READERS = ("quantize", "inspect", "eval", "bench", "serve", "chat")
"""The commands that take a package."""


def fail(*args: str | Path, code: int, text: str = "") -> str:
    """Runs a command that must fail; returns the one line it says."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=text)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("qwenonnx: ")
    return line


@pytest.mark.parametrize("command", READERS)
def test_a_folder_that_is_no_package_is_a_failure(command: str, tmp_path: Path) -> None:
    assert "not a package" in fail(command, tmp_path, code=1)
    assert "nowhere: no such folder" in fail(command, tmp_path / "nowhere", code=1)


@pytest.mark.parametrize("command", READERS)
def test_a_folder_of_packages_or_a_file_in_one_gets_a_hint(command: str, tiny_fp32: Package, tmp_path: Path) -> None:
    shutil.copytree(tiny_fp32.folder, tmp_path / "fp32")

    assert f"did you mean {tmp_path}/fp32?" in fail(command, tmp_path, code=1)
    line = fail(command, tmp_path / "fp32" / "model.onnx", code=1)
    assert "this is a file, not a package's folder" in line
    assert line.endswith(f"did you mean {tmp_path}/fp32?")


@pytest.mark.parametrize("command", READERS)
def test_the_name_of_a_model_gets_a_hint(
    command: str, tiny_fp32: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QWENONNX_MODELS_DIR", raising=False)
    for name in ("fp32", "int8"):
        shutil.copytree(tiny_fp32.folder, Path("models", "qwen2.5-0.5b", name))
    both = "did you mean models/qwen2.5-0.5b/fp32 or models/qwen2.5-0.5b/int8?"

    assert fail(command, "qwen2.5-0.5b", code=1).endswith(both)
    assert fail(command, "Qwen/Qwen2.5-0.5B", code=1).endswith(both)
    assert fail(command, "qwen2.5-0.5b/int8", code=1).endswith("did you mean models/qwen2.5-0.5b/int8?")
    assert fail(command, "qwen2-0.5b", code=1).endswith("make one with `qwenonnx export qwen2-0.5b`.")
    monkeypatch.setenv("QWENONNX_MODELS_DIR", "elsewhere")
    assert "no package of this model is in elsewhere" in fail(command, "qwen2.5-0.5b", code=1)


@pytest.mark.parametrize("command", ["quantize", "inspect", "eval", "bench", "serve"])
def test_an_address_in_the_place_of_a_package_is_a_usage_error(command: str) -> None:
    assert "http://127.0.0.1:8000/v1: this is an address" in fail(command, "http://127.0.0.1:8000/v1", code=2)


def test_an_address_without_http_gets_a_hint() -> None:
    for target in ("localhost:8000", "10.0.0.1:80/v1"):
        assert fail("chat", target, code=2).endswith(f"did you mean http://{target}?")


@pytest.mark.parametrize("text", ["", " \n"])
def test_nothing_through_the_pipe_is_a_usage_error(text: str, tiny_int8: Package) -> None:
    assert "nothing came through the pipe" in fail("chat", tiny_int8.folder, code=2, text=text)
    assert "nothing came through the pipe" in fail("chat", "http://127.0.0.1:9", code=2, text=text)


@pytest.mark.parametrize("command", READERS)
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
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))

    assert "cannot be read as UTF-8" in fail("eval", tiny_fp32.folder, "--text", tmp_path / "latin.txt", "-q", code=2)
    assert "none.txt: there is no such file" in fail("eval", tiny_fp32.folder, "--text", tmp_path / "none.txt", code=2)


@pytest.mark.parametrize("command", ["inspect", "eval", "bench"])
def test_a_place_for_results_is_checked_before_the_work(command: str, tiny_fp32: Package, tmp_path: Path) -> None:
    line = fail(command, tiny_fp32.folder, "--json", tmp_path / "nowhere" / "out.json", code=2)

    assert "nowhere: there is no such folder" in line
    assert "this is a folder" in fail(command, tiny_fp32.folder, "--json", tmp_path, code=2)


def test_no_answering_server_is_a_failure() -> None:
    assert "no answer" in fail("chat", "http://127.0.0.1:9", code=1, text="Hi")


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "DIR", "--prompt", "0"],
        ["bench", "DIR", "--new-tokens", "1"],
        ["bench", "DIR", "--threads", "0"],
        ["eval", "DIR", "--max-tokens", "1"],
        ["chat", "DIR", "--temperature", "3"],
        ["serve", "DIR", "--temperature", "3"],
        ["serve", "DIR", "--port", "70000"],
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


@pytest.mark.parametrize("command", ["export", "quantize"])
def test_an_output_without_a_name_is_a_usage_error(command: str, tiny_fp32: Package) -> None:
    assert "The output folder is an empty text" in fail(command, tiny_fp32.folder, "-o", "", code=2)
