"""Measures how faithful other engines' models are to an fp32 package, as `qwenonnx eval` does for packages.

Usage: python scripts/fidelity_peers.py REFERENCE [--package FOLDER ...] [--gguf FILE ... --llama-python PYTHON]
           [--openvino FOLDER ... --openvino-python PYTHON [--openvino-property NAME=VALUE ...]] [--json FILE]

REFERENCE is the fp32 package; all models must have been made from its weights. Each PYTHON is an interpreter in a
virtual environment of its own with llama-cpp-python or openvino; see bench_peers.py. Every model gets the same token
ids, those of the bundled evaluation texts, in the same chunks; one is in memory at a time beside the reference. Where
vocabularies have different widths, rows that only one of them has are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from qwenonnx.cli.console import Stages, table
from qwenonnx.evaluate.fidelity import FidelityReport, Scorer, measure_fidelity
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import load_runner, session_config
from qwenonnx.text.tokenizer import Tokenizer

WORKERS = Path(__file__).parent / "peers"


class PeerScorer:
    """Another engine in a process of its own, which sends logits through a pipe; see peers/pipe_logits.py."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.width = 0

    def __enter__(self) -> Self:
        line = self._answers.readline()
        if not line:
            self._close()
            raise RuntimeError(f"the {self._name} worker ended before its model was loaded")
        self.width = int(json.loads(line)["width"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits `[n, width]` of tokens at positions `[start, start + n)`; the earlier ones came just before."""
        with suppress(BrokenPipeError):  # the missing answer is reported below
            self._requests.write(json.dumps({"tokens": list(token_ids), "start": start}).encode() + b"\n")
            self._requests.flush()
        answer = self._answers.read(4 * len(token_ids) * self.width)
        if len(answer) < 4 * len(token_ids) * self.width:
            raise RuntimeError(f"the {self._name} worker ended early")
        return np.frombuffer(answer, dtype="<f4").reshape(len(token_ids), self.width)

    def _close(self) -> None:
        with suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        self._process.wait(timeout=60)


@dataclass(frozen=True, slots=True)
class Clipped:
    """The first `width` logits of another scorer's."""

    scorer: Scorer
    width: int

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits `[n, width]`."""
        return self.scorer.score(token_ids, start)[:, : self.width]


@dataclass(frozen=True, slots=True)
class Model:
    """A model to measure: what it is called, its file or folder, and how to load it with the width of its logits."""

    name: str
    path: Path
    load: Callable[[], AbstractContextManager[tuple[Scorer, int]]]

    @property
    def bytes_on_disk(self) -> int:
        """All files of the model."""
        files = [self.path] if self.path.is_file() else self.path.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())


def peer(name: str, path: Path, command: Sequence[str]) -> Model:
    """A model of another engine; `command` runs its worker."""

    @contextmanager
    def load() -> Iterator[tuple[Scorer, int]]:
        with PeerScorer(name, command) as scorer:
            yield scorer, scorer.width

    return Model(name, path, load)


def own(path: Path, threads: int, context: int) -> Model:
    """A package of this project."""

    @contextmanager
    def load() -> Iterator[tuple[Scorer, int]]:
        runner = load_runner(Package.open(path), session_config(threads), context_length=context)
        yield runner, runner.vocab_size

    return Model(f"qwenonnx {path.name}", path, load)


def models(arguments: argparse.Namespace) -> list[Model]:
    """The models that the command line names."""
    threads, context = str(arguments.threads), str(arguments.max_tokens)
    found = [own(path, arguments.threads, arguments.max_tokens) for path in arguments.package]
    properties = list(arguments.openvino_property)
    for path in arguments.openvino:
        worker = [arguments.openvino_python, str(WORKERS / "openvino_logits.py")]
        name = " ".join(["OpenVINO", path.name, *properties])
        found.append(peer(name, path, [*worker, str(path), threads, *properties]))
    for path in arguments.gguf:
        worker = [arguments.llama_python, str(WORKERS / "llama_logits.py")]
        found.append(peer(f"llama.cpp {path.stem}", path, [*worker, str(path), threads, context]))
    return found


def row(model: Model, report: FidelityReport) -> list[str]:
    """A line of the table."""
    figures = report.overall
    return [
        model.name,
        f"{model.bytes_on_disk / 1e6:.0f} MB",
        f"{figures.kl_mean:.5f}",
        f"{figures.top1_agreement:.2%}",
        f"{figures.perplexity:.3f}",
        f"{figures.worst_kl:.3f}",
    ]


def main() -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--package", type=Path, action="append", default=[])
    parser.add_argument("--gguf", type=Path, action="append", default=[])
    parser.add_argument("--llama-python")
    parser.add_argument("--openvino", type=Path, action="append", default=[])
    parser.add_argument("--openvino-python")
    parser.add_argument("--openvino-property", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.gguf and not arguments.llama_python:
        parser.error("--gguf needs --llama-python")
    if arguments.openvino and not arguments.openvino_python:
        parser.error("--openvino needs --openvino-python")
    base = Package.open(arguments.reference)
    tokenizer = Tokenizer.load(base.folder)
    reference = load_runner(base, session_config(arguments.threads), context_length=arguments.max_tokens)
    rows, results = [], {}
    with Stages() as stages:
        for model in models(arguments):
            progress = stages.begin(model.name)
            with model.load() as (scorer, width):
                common = min(width, reference.vocab_size)
                report = measure_fidelity(
                    Clipped(reference, common),
                    Clipped(scorer, common),
                    tokenizer,
                    bundled_texts(),
                    max_tokens=arguments.max_tokens,
                    progress=progress,
                )
            rows.append(row(model, report))
            results[model.name] = {"bytes": model.bytes_on_disk, "width": common, **report.to_json()}
    print(table(["model", "on disk", "mean KL", "top-1", "perplexity", "worst KL"], rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
