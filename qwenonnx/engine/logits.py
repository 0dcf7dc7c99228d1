"""What is asked of a row of logits in several places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.errors import NumericalError

# Width of the pieces whose maxima bound the highest values of a row.
_BLOCK = 256


def check_peak(peak: np.float32) -> None:
    """The highest logit tells all: NaN and plus infinity come out on top, minus infinity only if alone.

    Raises:
        NumericalError: it is not finite.
    """
    if not np.isfinite(peak):
        raise NumericalError(
            f"The model's logits are not finite (their maximum is {peak}); the package may be damaged or its "
            "precision too low, so check it with `qwenonnx eval`."
        )


def highest(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` highest values (of all, where there are fewer), ascending; of equal ones the lowest.

    At least `count` values reach the `count`-th highest of the maxima of equal pieces, so that only few are sorted.
    """
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    if count >= len(row):
        return np.arange(len(row))
    pieces = len(row) // _BLOCK
    if count <= pieces:
        maxima = row[: pieces * _BLOCK].reshape(pieces, _BLOCK).max(axis=1)
        ids = np.flatnonzero(row >= np.partition(maxima, pieces - count)[pieces - count])
    else:
        ids = np.arange(len(row))
    values = row[ids]
    least = np.partition(values, len(values) - count)[len(values) - count]
    kept = values > least
    equal = np.flatnonzero(values == least)
    kept[equal[: count - int(np.count_nonzero(kept))]] = True
    best: NDArray[np.int64] = ids[kept]
    return best
