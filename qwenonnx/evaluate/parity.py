"""Whether two models compute the same: likeliest tokens and logits at every position, with rounding allowed for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qwenonnx.errors import NumericalError
from qwenonnx.evaluate.fidelity import CHUNK, Scorer
from qwenonnx.files import Progress

Logits = NDArray[np.float32]
# Two tokens whose logits are closer than this in the reference are equally likely: fp32 rounds sums of a thousand terms
# of this size to about 1e-5.
TIE = 1e-4
# Tokens whose logits are held twice, at once and in pieces: 2 x 78 MB for a vocabulary of 151,936.
MAX_WHOLE = 128
CUT = 16
ROWS = 4


class BatchScorer(Scorer, Protocol):
    """A model that can also run one token in each of several rows."""

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> Logits:
        """Logits `[n, vocab]` of one token in each of the rows 0..n-1, at position `starts[i]`."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A named text as token ids."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parity:
    """How two models agree on some positions; results of parts add up.

    `same` counts positions with the same likeliest token, `ties` those with another one that is as likely (within
    `TIE`). `widest_margin` is the most that a reference's likeliest token had ahead of the other one where they
    differ. `text` and `position` say where the largest logit difference is.
    """

    positions: int = 0
    same: int = 0
    ties: int = 0
    widest_margin: float = 0.0
    largest_difference: float = 0.0
    text: str = ""
    position: int = 0

    def __add__(self, other: Parity) -> Parity:
        worst = other if not self.text or other.largest_difference > self.largest_difference else self
        return Parity(
            positions=self.positions + other.positions,
            same=self.same + other.same,
            ties=self.ties + other.ties,
            widest_margin=max(self.widest_margin, other.widest_margin),
            largest_difference=worst.largest_difference,
            text=worst.text,
            position=worst.position,
        )

    def holds(self, tolerance: float) -> bool:
        """Whether every likeliest token is the same, or as likely, and no logit differs by more than `tolerance`."""
        return self.same + self.ties == self.positions and self.largest_difference <= tolerance

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


def compare_rows(expected: Logits, actual: Logits, text: str = "", start: int = 0) -> Parity:
    """Compares logits `[n, vocab]` of the positions from `start` on.

    Raises:
        NumericalError: a logit is NaN or infinite.
    """
    if not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        raise NumericalError(f"the model produced NaN or infinite logits in {text!r} from position {start} on.")
    ours, theirs = expected.argmax(axis=-1), actual.argmax(axis=-1)
    rows = np.arange(len(expected))
    margins = (expected[rows, ours] - expected[rows, theirs])[ours != theirs]
    differences = np.abs(expected - actual).max(axis=-1)
    return Parity(
        positions=len(expected),
        same=int((ours == theirs).sum()),
        ties=int((margins < TIE).sum()),
        widest_margin=float(margins.max(initial=0.0)),
        largest_difference=float(differences.max()),
        text=text,
        position=start + int(differences.argmax()),
    )


def compare_models(
    reference: Scorer, candidate: Scorer, texts: Sequence[TokenText], progress: Progress | None = None
) -> list[Parity]:
    """Compares two models on each text, in chunks of bounded memory.

    Raises:
        NumericalError: a model gives NaN or infinite logits.
    """
    total = sum(len(text.ids) for text in texts)
    done = 0
    results = []
    for text in texts:
        parity = Parity()
        for start in range(0, len(text.ids), CHUNK):
            part = text.ids[start : start + CHUNK]
            parity += compare_rows(reference.score(part, start), candidate.score(part, start), text.name, start)
            done += len(part)
            if progress is not None:
                progress(done, total)
        results.append(parity)
    return results


def compare_pieces(
    runner: BatchScorer, texts: Sequence[TokenText], steps: int, progress: Progress | None = None
) -> dict[str, Parity]:
    """Runs the beginnings of texts in other ways than at once; by the name of the way.

    Chunks are of 16 tokens, over the first 128 of each text. The first `steps` tokens are also run one by one, and as
    one row of four that run other tokens; the latter is compared with one by one. The runner needs four rows.

    Raises:
        NumericalError: the model gives NaN or infinite logits.
    """
    total = sum(min(len(text.ids), MAX_WHOLE) + 2 * min(len(text.ids), steps) for text in texts)
    done = 0
    results = dict.fromkeys((f"in chunks of {CUT}", "one by one", f"in a batch of {ROWS}"), Parity())
    for text in texts:
        ids = text.ids[:MAX_WHOLE]
        whole = runner.score(ids, 0)
        singles = ids[:steps]
        alone = _in_chunks(runner, singles, 1)
        ways = (
            (_in_chunks(runner, ids, CUT), whole),
            (alone, whole[: len(alone)]),
            (_in_a_batch(runner, singles), alone),
        )
        for name, (actual, expected) in zip(results, ways, strict=True):
            results[name] += compare_rows(expected, actual, text.name)
            done += len(actual)
            if progress is not None:
                progress(done, total)
    return results


def _in_chunks(runner: Scorer, ids: Sequence[int], size: int) -> Logits:
    return np.concatenate([runner.score(ids[i : i + size], i) for i in range(0, len(ids), size)])


def _in_a_batch(runner: BatchScorer, ids: Sequence[int]) -> Logits:
    """Logits of all tokens, decoded one by one in the first of several rows, the others running other tokens."""
    rows = []
    for i in range(len(ids)):
        tokens = [ids[i], *(ids[(i * 7 + row) % len(ids)] for row in range(1, ROWS))]
        rows.append(runner.decode(tokens, [i] * ROWS)[0].copy())
    return np.stack(rows)
