"""A worker of bench_peers.py: llama.cpp through llama-cpp-python. Arguments: GGUF THREADS.

Runs in an environment of its own, so it imports nothing of this project.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

Q8_0 = 7  # LLAMA_FTYPE_MOSTLY_Q8_0


def as_q8_0(path: Path) -> Path:
    """The model with all matrices in Q8_0, made once beside the original."""
    target = path.with_name(f"{path.stem}.q8_0.gguf")
    if not target.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = Q8_0
        options.allow_requantize = True
        partial = target.with_suffix(".partial")
        source, result = str(path).encode(), str(partial).encode()
        if llama_cpp.llama_model_quantize(source, result, ctypes.byref(options)) != 0:
            raise RuntimeError(f"llama.cpp cannot convert {path}")
        partial.rename(target)
    return target


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Answers requests from stdin until it ends."""
    threads = int(sys.argv[2])
    model = llama_cpp.Llama(
        str(as_q8_0(Path(sys.argv[1]))),
        n_ctx=4096,
        n_batch=512,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )

    def step(tokens: list[int]) -> int:
        model.eval(tokens)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())

    for line in sys.stdin:
        job = json.loads(line)
        model.reset()
        start = time.perf_counter()
        token = step(job["prompt"])
        first = time.perf_counter()
        for _ in range(job["new_tokens"] - 1):
            token = step([token])
        end = time.perf_counter()
        print(json.dumps({"first": first - start, "rest": end - first, "peak": peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
