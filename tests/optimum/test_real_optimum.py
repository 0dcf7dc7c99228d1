"""`export --exporter optimum` on the real 0.5B weights: as PyTorch and the fused graph, served and streamed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from qwenonnx.export.verify import MAX_LOGIT_DIFFERENCE
from qwenonnx.package.package import Package

pytestmark = [pytest.mark.optimum, pytest.mark.model]


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qwenonnx", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


@pytest.fixture(scope="module")
def exported(model_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package that Optimum's graph makes; 2 GB."""
    target = tmp_path_factory.mktemp("real") / "optimum-fp32"
    done = run("export", model_checkpoint, "--exporter", "optimum", "-o", target)
    assert done.returncode == 0, done.stderr
    return Package.open(target)


def test_the_likeliest_tokens_are_pytorchs_on_eight_texts(exported: Package) -> None:
    torch = exported.manifest.details["pytorch"]

    assert (torch["texts"], torch["positions"]) == (8, 512)
    assert torch["same"] == torch["positions"]
    assert torch["largest_difference"] < MAX_LOGIT_DIFFERENCE


def test_the_tied_matrix_is_stored_once_and_files_can_be_read_by_others(exported: Package) -> None:
    assert exported.bytes < 2_010_000_000
    assert {oct(path.stat().st_mode & 0o044) for path in exported.folder.iterdir()} == {"0o44"}


def test_it_computes_what_the_fused_graph_computes(exported: Package, model_checkpoint: Path) -> None:
    fused = model_checkpoint.parents[1] / "fp32"

    done = run("verify", exported.folder, fused, "--max-tokens", "32", "--steps", "2")

    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def address(exported: Package) -> Iterator[str]:
    """A server process on a free port."""
    command = [sys.executable, "-m", "qwenonnx", "serve", str(exported.folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "Ready: serving" in line:
                break
        found = re.search(r"http://\S+:\d+", "".join(lines))
        assert found, "".join(lines)
        yield found.group()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_a_streamed_answer_names_the_capital(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "What is the capital of France? Answer with one word."}],
            stream=True,
            max_tokens=8,
            temperature=0,
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "Paris" in "".join(pieces)
