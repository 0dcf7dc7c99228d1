"""Measures a package beside llama.cpp and OpenVINO on this machine: same prompts, same threads, in turn.

Usage: python scripts/bench_peers.py PACKAGE [--gguf FILE --llama-python PYTHON]
           [--openvino FOLDER --openvino-python PYTHON] [--json FILE]

Each PYTHON is an interpreter in a virtual environment of its own, with one of these built or installed:
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python
    pip install openvino-genai
FILE is a GGUF file of the same model; it is converted to Q8_0 once, beside it. FOLDER is what `optimum-cli export
openvino --weight-format int8` (optimum-intel with nncf) writes. The engines run in processes of their own and take
turns run by run, so that a machine whose speed drifts treats them alike. Medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
WORKERS = REPOSITORY / "scripts" / "peers"


class Worker:
    """An engine in a process of its own: one JSON request a line, one JSON answer a line."""

    def __init__(self, name: str, python: str, script: str, arguments: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(WORKERS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def run(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        """Seconds to the first token and for the others, and the peak memory so far in bytes."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self._process.stdin.write(json.dumps({"prompt": prompt, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} worker ended early")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def prompt_ids(length: int, seed: int, vocabulary: int) -> list[int]:
    """Token ids without meaning, other ones for each seed, so that no cache helps anybody."""
    import random

    generator = random.Random(seed)
    return [generator.randrange(vocabulary) for _ in range(length)]


def measure(
    workers: list[Worker], lengths: list[int], new_tokens: int, repeats: int, vocabulary: int = 100_000
) -> list[dict[str, Any]]:
    """A row per engine and prompt length; prompts are of ids below `vocabulary`."""
    times: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repeat in range(repeats + 1):
        for length in lengths:
            shift = repeat % len(workers)
            for worker in workers[shift:] + workers[:shift]:
                answer = worker.run(prompt_ids(length, 1000 * repeat + length, vocabulary), new_tokens)
                if repeat:  # the first round warms up
                    times.setdefault((worker.name, length), []).append(answer)
    rows = []
    for (name, length), runs in sorted(times.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        first = statistics.median(run["first"] for run in runs)
        rows.append(
            {
                "engine": name,
                "prompt_tokens": length,
                "new_tokens": new_tokens,
                "ttft_ms": first * 1e3,
                "prefill_rate": length / first,
                "decode_rate": (new_tokens - 1) / statistics.median(run["rest"] for run in runs),
                "peak_rss_mb": max(run["peak"] for run in runs) / 1e6,
            }
        )
    return rows


def main() -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-python")
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--openvino-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[40, 512])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    threads = str(arguments.threads)
    workers = [Worker("qwenonnx", sys.executable, "qwenonnx_worker.py", [str(arguments.package), threads])]
    if arguments.llama_python:
        workers.append(
            Worker("llama.cpp Q8_0", arguments.llama_python, "llama_worker.py", [str(arguments.gguf), threads])
        )
    if arguments.openvino_python:
        workers.append(
            Worker("OpenVINO", arguments.openvino_python, "openvino_worker.py", [str(arguments.openvino), threads])
        )
    try:
        rows = measure(workers, arguments.lengths, arguments.new_tokens, arguments.repeats)
    finally:
        for worker in workers:
            worker.close()
    print(f"{'engine':16} {'prompt':>6} {'TTFT ms':>8} {'prefill/s':>9} {'decode/s':>8} {'peak MB':>8}")
    for row in rows:
        print(
            f"{row['engine']:16} {row['prompt_tokens']:6} {row['ttft_ms']:8.0f} {row['prefill_rate']:9.0f} "
            f"{row['decode_rate']:8.1f} {row['peak_rss_mb']:8.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
