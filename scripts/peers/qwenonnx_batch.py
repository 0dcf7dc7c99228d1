"""A worker of bench_streams.py: qwenonnx with all streams in one batch. Arguments: PACKAGE THREADS SLOTS CONTEXT."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from qwenonnx.package.package import Package
from qwenonnx.runtime.load import PackageRunner, load_runner, session_config
from qwenonnx.runtime.memory import process_memory


def run(runner: PackageRunner, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Reads the prompts one after the other, then decodes all streams step by step."""
    start = time.perf_counter()
    tokens = [int(runner.prefill(slot, prompt, 0).argmax()) for slot, prompt in enumerate(prompts)]
    begun = time.perf_counter()
    starts = [len(prompt) for prompt in prompts]
    for _ in range(new_tokens - 1):
        tokens = runner.decode(tokens, starts).argmax(axis=1).tolist()
        starts = [position + 1 for position in starts]
    end = time.perf_counter()
    return {
        "total": end - start,
        "decode": end - begun,
        "decoded": len(prompts) * (new_tokens - 1),
        "peak": process_memory().peak,
    }


def main() -> None:
    """Answers requests from stdin until it ends."""
    threads, slots, context = (int(argument) for argument in sys.argv[2:5])
    package = Package.open(Path(sys.argv[1]))
    runner = load_runner(package, session_config(threads), context_length=context, num_slots=slots)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(runner, job["prompts"], job["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
