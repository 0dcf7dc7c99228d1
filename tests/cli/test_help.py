"""Help is there at once: nothing heavy is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from qwenonnx import __version__
from qwenonnx.cli.main import app

COMMANDS = ("pull", "export", "adopt", "quantize", "eval", "verify", "serve", "chat", "bench", "inspect")
HEAVY = ("onnxruntime", "numpy", "onnx", "fastapi", "transformers", "torch", "tokenizers", "gguf", "huggingface_hub")
SCRIPT = """
import json, sys
from typer.testing import CliRunner
from qwenonnx.cli.main import app
results = {" ".join(args): CliRunner().invoke(app, args).exit_code for args in json.loads(sys.argv[1])}
print(json.dumps([results, [*sys.modules]]))
"""


def test_help_imports_nothing_heavy() -> None:
    calls = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    command = [sys.executable, "-c", SCRIPT, json.dumps(calls)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    results, loaded = json.loads(done.stdout)
    assert set(results.values()) == {0}
    assert len(results) == len(calls)
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []


def test_the_group_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])

    listed = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ") and line.split()}
    assert set(COMMANDS) <= listed


def test_every_line_of_the_list_fits_a_terminal_of_80_columns() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})

    listed = result.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_values_have_names_that_people_use(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    usage = text.splitlines()[0]

    assert "{" not in usage
    assert "[[" not in usage
    assert "list[" not in text


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_explained(command: str, flag: str) -> None:
    result = CliRunner().invoke(app, [command, flag])
    declared = get_command(app).commands[command]  # type: ignore[attr-defined]

    assert result.exit_code == 0
    assert declared.help.splitlines()[0] in " ".join(result.stdout.split())
    for parameter in declared.params:
        if parameter.param_type_name == "option":
            assert parameter.help, parameter.name
            assert parameter.opts[0] in result.stdout


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])

    assert (result.exit_code, result.stdout) == (0, f"qwenonnx {__version__}\n")


def test_the_module_can_be_run() -> None:
    command = [sys.executable, "-m", "qwenonnx", "--version"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == f"qwenonnx {__version__}\n"
