"""Measures how far a package's logits depend on how a text is cut, and on who else is in the batch.

Usage: python scripts/compare_chunking.py PACKAGE [--tokens N]

Each evaluation text is run at once, in chunks of 16, token by token, and token by token beside three other rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package
from qwenonnx.runtime.fused_runner import FusedRunner
from qwenonnx.runtime.load import load_runner, session_config
from qwenonnx.text.tokenizer import Tokenizer

Logits = NDArray[np.float32]
ROWS = 4


def in_chunks(runner: FusedRunner, ids: Sequence[int], size: int) -> Logits:
    """Logits of all tokens, the text cut into chunks."""
    return np.concatenate([runner.score(ids[i : i + size], i) for i in range(0, len(ids), size)])


def in_a_batch(runner: FusedRunner, ids: Sequence[int]) -> Logits:
    """Logits of all tokens, decoded one by one in the first of several rows, the others running other texts."""
    rows = []
    for i in range(len(ids)):
        tokens = [ids[i], *(ids[(i * 7 + row) % len(ids)] for row in range(1, ROWS))]
        rows.append(runner.decode(tokens, [i] * ROWS)[0].copy())
    return np.stack(rows)


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    package = Package.open(arguments.package)
    tokenizer = Tokenizer.load(package.folder)
    runner = load_runner(package, session_config(), context_length=arguments.tokens + 1, num_slots=ROWS)
    texts = [tokenizer.encode(text.text)[: arguments.tokens] for text in bundled_texts()]
    whole = [runner.score(ids, 0) for ids in texts]
    ways: dict[str, Callable[[list[int]], Logits]] = {
        "in chunks of 16": lambda ids: in_chunks(runner, ids, 16),
        "one by one": lambda ids: in_chunks(runner, ids, 1),
        f"in a batch of {ROWS}": lambda ids: in_a_batch(runner, ids),
    }
    alone: list[Logits] = []
    for name, way in ways.items():
        results = [way(ids) for ids in texts]
        report(name, "at once", results, whole)
        if name == "one by one":
            alone = results
        elif alone:
            report(name, "one by one", results, alone)


def report(name: str, other: str, results: list[Logits], expected: list[Logits]) -> None:
    """Prints how far two ways are apart."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(results, expected, strict=True))
    pairs = [(a.argmax(-1), b.argmax(-1), b) for a, b in zip(results, expected, strict=True)]
    total = sum(len(b) for _, _, b in pairs)
    flips = [float(row[y] - row[x]) for a, b, logits in pairs for x, y, row in zip(a, b, logits, strict=True) if x != y]
    widest = f", the widest margin lost {max(flips):.3f}" if flips else ""
    print(
        f"{name} against {other}: max |logit difference| {difference:.4f}, other argmax at {len(flips)} of "
        f"{total:,} positions{widest}",
        flush=True,
    )


if __name__ == "__main__":
    main()
