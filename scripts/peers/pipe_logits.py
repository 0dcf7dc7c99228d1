"""What the workers of fidelity_peers.py have in common: requests on stdin, logits on stdout.

A worker first writes the width of its logits as a line of JSON. Each request is a line of JSON with `tokens` and the
position `start` of the first of them; the answer is their logits `[n, width]` as raw float32. Start 0 begins a text.
Imports nothing of the project, as the workers run in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Score = Callable[[list[int], int], Any]


def serve_logits(load: Callable[[], tuple[Score, int]]) -> None:
    """Loads a model, which gives a scoring function and the logits' width, and answers until stdin ends.

    Whatever the engine itself prints goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    score, width = load()
    answers.write(json.dumps({"width": width}).encode() + b"\n")
    answers.flush()
    for line in sys.stdin:
        job = json.loads(line)
        logits = np.ascontiguousarray(score(job["tokens"], job["start"]), dtype="<f4")
        if logits.shape != (len(job["tokens"]), width):
            raise RuntimeError(f"{len(job['tokens'])} tokens gave logits {logits.shape}, not of width {width}")
        answers.write(logits.data)
        answers.flush()
