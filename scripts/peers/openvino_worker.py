"""A worker of bench_peers.py: OpenVINO GenAI. Arguments: MODEL_FOLDER THREADS.

MODEL_FOLDER is what `optimum-cli export openvino --task text-generation-with-past --weight-format int8` writes.
Runs in an environment of its own, so it imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Answers requests from stdin until it ends."""
    pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
    for line in sys.stdin:
        job = json.loads(line)
        config = openvino_genai.GenerationConfig(max_new_tokens=job["new_tokens"], ignore_eos=True, do_sample=False)
        prompt = openvino.Tensor(np.asarray([job["prompt"]], dtype=np.int64))
        start = time.perf_counter()
        metrics = pipeline.generate(prompt, config).perf_metrics
        total = time.perf_counter() - start
        first = metrics.get_ttft().mean / 1e3
        print(json.dumps({"first": first, "rest": total - first, "peak": peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
