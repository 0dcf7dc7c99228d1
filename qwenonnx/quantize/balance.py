"""Changes of basis between two linears that leave their product as it is and make it less sensitive to rounding.

Let a linear W read x. With x' = M x and W' = W M^-1 nothing changes, but the errors do: rounding x' with one scale adds
noise in proportion to E|x'|^2 to what W' multiplies it by, and rounding the rows of W' adds noise in proportion to
|W'|^2. Both errors of W' x' grow with the product E|x'|^2 |W'|^2, which is smallest where the second moments of x' and
of W' are proportional. A rotation after that keeps the product and spreads peaks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.quantize.rotation import hadamard, power_of_two_factor

Double = NDArray[np.float64]
# Of the mean of a diagonal, added to it: what calibration texts hardly use still has to come through.
DAMPING = 0.01
SCALE_DAMPING = 0.001


def balancing_matrices(inputs: NDArray[np.floating], weights: NDArray[np.floating]) -> tuple[Double, Double]:
    """The best M `[K, K]` and its inverse, for second moments `[K, K]` of inputs and of weights (W^T W)."""
    moment, other = _damped(inputs), _damped(weights)
    root, inverse = _power(moment, 0.5), _power(moment, -0.5)
    metric = inverse @ _power(root @ other @ root, 0.5) @ inverse
    size = len(metric)
    block = power_of_two_factor(size)
    rotation = np.kron(np.eye(size // block), hadamard(block).astype(np.float64))
    return rotation.T @ _power(metric, 0.5), _power(metric, -0.5) @ rotation


def balancing_scales(inputs: NDArray[np.floating], weights: NDArray[np.floating]) -> NDArray[np.float32]:
    """The best diagonal of M `[K]`, for sums of squares `[K]` of inputs and of weights."""
    moment, other = (_lifted(values, SCALE_DAMPING) for values in (inputs, weights))
    return np.asarray((other / moment) ** 0.25, dtype=np.float32)


def _damped(moment: NDArray[np.floating]) -> Double:
    """The moment with mean 1 on its diagonal, and damped."""
    matrix = moment.astype(np.float64)
    diagonal = np.einsum("kk->k", matrix)
    mean = diagonal.mean()
    if mean > 0:
        matrix /= mean
    diagonal += DAMPING if mean > 0 else 1
    return matrix


def _lifted(values: NDArray[np.floating], damping: float) -> Double:
    numbers = values.astype(np.float64)
    mean = float(numbers.mean())
    return numbers / mean + damping if mean > 0 else np.ones_like(numbers)


def _power(matrix: Double, exponent: float) -> Double:
    """A power of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    values = np.maximum(values, values.max() * 1e-9)
    return np.asarray((vectors * values**exponent) @ vectors.T)
