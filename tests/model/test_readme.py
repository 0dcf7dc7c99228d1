"""The README's commands, run as printed on the real weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def step_by_step() -> list[str]:
    """The commands of the block that goes through everything, without those that install."""
    (block,) = (text for text in blocks("bash") if "qwenonnx quantize" in text)
    return [line for line in block.splitlines() if "qwenonnx" in line]


@pytest.fixture(scope="module")
def serving(model_checkpoint: Path) -> Iterator[None]:
    """All steps run in order; the last one, `serve`, is left running."""
    *steps, serve = step_by_step()
    assert serve.startswith("qwenonnx serve ")
    for command in steps:
        result = subprocess.run(command, shell=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        assert result.stdout.strip(), command
    with subprocess.Popen(serve.split(), cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{ADDRESS}/health").close()
                break
            except urllib.error.URLError:  # also a 503 while it loads
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                time.sleep(0.1)
        yield
        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_curl_streams_an_answer(serving: None) -> None:
    (command,) = (text for text in blocks("bash") if text.startswith("curl"))
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("data: {") > 5
    assert result.stdout.rstrip().endswith("data: [DONE]")


def test_the_python_example_prints_code(serving: None) -> None:
    (code,) = blocks("python")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "def " in result.stdout
