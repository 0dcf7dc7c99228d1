"""SIGTERM and Ctrl-C end a command in order: no traceback, nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packages import names

SCRIPT = """
import os, sys
import qwenonnx.export.parts as parts
from qwenonnx.cli.main import main

number = int(sys.argv.pop(1))
parts.check_chat_template = lambda folder, tokenizer: os.kill(os.getpid(), number)
main()
"""
"""Runs a command that gets a signal in the middle of an export."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_export_that_is_ended_leaves_nothing(
    number: signal.Signals, code: int, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    line = [sys.executable, "-c", SCRIPT, str(int(number)), "export", str(tiny_checkpoint), "-o", str(tmp_path / "out")]
    done = subprocess.run([*line, "-q"], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr, done.stdout) == (code, "", "")
    assert names(tmp_path) == []


def test_ctrl_c_before_the_command_runs_is_no_traceback() -> None:
    script = "import qwenonnx.cli.main as m\ndef app(): raise KeyboardInterrupt\nm.app = app\nm.main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (130, "")
