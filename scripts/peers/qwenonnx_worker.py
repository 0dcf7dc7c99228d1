"""A worker of bench_peers.py: qwenonnx through its engine. Arguments: PACKAGE THREADS."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from qwenonnx.engine.load import load_model
from qwenonnx.engine.request import Delta, Failed, GenerationRequest
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import session_config
from qwenonnx.runtime.memory import process_memory


def main() -> None:
    """Answers requests from stdin until it ends."""
    model = load_model(Package.open(Path(sys.argv[1])), session_config(int(sys.argv[2])))
    model.engine.start()
    for line in sys.stdin:
        job = json.loads(line)
        request = GenerationRequest(tuple(job["prompt"]), max_tokens=job["new_tokens"], ignore_eos=True)
        start = time.perf_counter()
        times = []
        for event in model.engine.generate(request):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                times += [time.perf_counter()] * len(event.token_ids)
        answer = {"first": times[0] - start, "rest": times[-1] - times[0], "peak": process_memory().peak}
        print(json.dumps(answer), flush=True)
    model.engine.close()


if __name__ == "__main__":
    main()
