"""A worker of fidelity_peers.py: llama.cpp through llama-cpp-python. Arguments: GGUF THREADS CONTEXT."""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp
from pipe_logits import Score, serve_logits


def load() -> tuple[Score, int]:
    """The model that the arguments name; set up as for bench_peers.py."""
    threads, context = int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(
        sys.argv[1],
        n_ctx=context,
        n_batch=context,
        n_ubatch=context,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        logits_all=True,
        verbose=False,
    )

    def score(tokens: list[int], start: int) -> Any:
        if start == 0:
            model.reset()
        model.eval(tokens)
        return model.scores[start : start + len(tokens)]

    return score, model.n_vocab()


if __name__ == "__main__":
    serve_logits(load)
