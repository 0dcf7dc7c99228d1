"""A worker of bench_streams.py: OpenVINO GenAI's continuous batching. Arguments: MODEL_FOLDER THREADS CACHE_GB.

MODEL_FOLDER is what `optimum-cli export openvino --task text-generation-with-past --weight-format int8` writes.
Runs in an environment of its own, so it imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def run(pipeline: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Answers all prompts at once; decoding counts from when all have a token until the first has all of them."""
    config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
    start = time.perf_counter()
    handles = [
        pipeline.add_request(i, openvino.Tensor(np.asarray([prompt], dtype=np.int64)), config)
        for i, prompt in enumerate(prompts)
    ]
    counts = [0] * len(handles)
    begun = ended = (0.0, 0)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter()
        for i, handle in enumerate(handles):
            while handle.can_read():
                counts[i] += sum(len(output.generated_ids) for output in handle.read().values())
        if min(counts) > 0 and not begun[1]:
            begun = (now, sum(counts))
        if max(counts) < new_tokens:
            ended = (now, sum(counts))
    if sum(counts) != len(prompts) * new_tokens:
        raise RuntimeError(f"{sum(counts)} tokens came, not {len(prompts) * new_tokens}")
    return {
        "total": time.perf_counter() - start,
        "decode": ended[0] - begun[0],
        "decoded": ended[1] - begun[1],
        "peak": peak_bytes(),
    }


def main() -> None:
    """Answers requests from stdin until it ends."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = int(sys.argv[3])
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", properties)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(pipeline, job["prompts"], job["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
