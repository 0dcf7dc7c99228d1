"""Measures how many tokens per second many streams get together, beside OpenVINO GenAI's continuous batching, in turn.

Usage: python scripts/bench_streams.py PACKAGE [--openvino FOLDER --openvino-python PYTHON] [--json FILE]

PYTHON and FOLDER are set up as for bench_peers.py. Prompts are random tokens; every stream starts at once and gets as
many new tokens, greedily. `decode` is the rate of all streams together from the moment when all have a token until one
has all of its; `whole` is new tokens by the time of the whole job, prompts included. Medians are reported.
"""

from __future__ import annotations

import argparse
import json
import random
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
        command = [python, str(WORKERS / script), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        """Seconds `total` and `decode`, tokens `decoded` in the latter, and the peak memory so far in bytes."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
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


def random_prompts(streams: int, length: int, seed: int) -> list[list[int]]:
    """Token ids without meaning, other ones for each seed."""
    generator = random.Random(seed)
    return [[generator.randrange(100_000) for _ in range(length)] for _ in range(streams)]


def measure(
    workers: list[Worker], streams: list[int], length: int, new_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """A row per number of streams and engine; rates are of all streams together."""
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    for repeat in range(repeats + 1):
        for count in streams:
            shift = repeat % len(workers)
            for worker in workers[shift:] + workers[:shift]:
                answer = worker.run(random_prompts(count, length, 1000 * repeat + count), new_tokens if repeat else 2)
                if repeat:  # the first round warms up
                    runs.setdefault((count, worker.name), []).append(answer)
    return [
        {
            "streams": count,
            "engine": name,
            "decode_rate": statistics.median(run["decoded"] / run["decode"] for run in answers),
            "whole_rate": statistics.median(count * new_tokens / run["total"] for run in answers),
            "peak_rss_mb": max(run["peak"] for run in answers) / 1e6,
        }
        for (count, name), answers in sorted(runs.items())
    ]


def main() -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path)
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--openvino-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    threads, most = str(arguments.threads), max(arguments.streams)
    context = arguments.prompt_tokens + arguments.new_tokens
    ours = [str(arguments.package), threads, str(most), str(context)]
    workers = [Worker("qwenonnx", sys.executable, "qwenonnx_batch.py", ours)]
    if arguments.openvino_python:
        cache = str(1 + most * context * 24_576 // 10**9)
        theirs = [str(arguments.openvino), threads, cache]
        workers.append(Worker("OpenVINO", arguments.openvino_python, "openvino_batch.py", theirs))
    try:
        rows = measure(workers, arguments.streams, arguments.prompt_tokens, arguments.new_tokens, arguments.repeats)
    finally:
        for worker in workers:
            worker.close()
    print(f"{'streams':>7} {'engine':10} {'decode/s':>9} {'whole/s':>8} {'peak MB':>8}")
    for row in rows:
        print(
            f"{row['streams']:7} {row['engine']:10} {row['decode_rate']:9.1f} {row['whole_rate']:8.1f} "
            f"{row['peak_rss_mb']:8.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
