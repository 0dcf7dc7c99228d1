"""Choosing the next token of one request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.logits import check_peak, highest
from qwenonnx.engine.penalties import Penalties
from qwenonnx.engine.sampling import SamplingParams

# Weights relative to the most probable token's below which candidates are left out, tried in this order.
_FLOORS = (1e-2, 1e-4)

# Weights of equal leading bits, an eighth of an octave, are one class where floors do not help.
_CLASS_SHIFT = 20

# Width of the partial sums in which a draw over many tokens looks for its token, and how many are many.
_BLOCK = 512
_MANY = 4096


class Sampler:
    """Samples the tokens of one request, one row of logits after the other.

    Order: penalties, logit bias, ban of end tokens (`min_tokens`), temperature, top-k, top-p over what top-k
    left, min-p. Greedy requests take the highest logit after the ban, of equal ones the lowest id. Top-k
    keeps exactly k tokens, of equal ones those with lower ids. Top-p keeps the smallest set of most probable
    tokens whose mass reaches p (Holtzman et al., 2020). Min-p keeps tokens of at least that share of the
    highest probability.

    Every token sampled at random takes one draw from the request's own generator, so an equal seed and equal
    logits give equal tokens whatever else runs. Ids of `num_tokens` and above have no token and are never
    chosen.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int],
        *,
        num_tokens: int,
        end_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._params = params
        self._num_tokens = num_tokens
        self._penalties = Penalties(params, prompt_ids, num_tokens) if Penalties.wanted(params) else None
        bias = sorted((i, value) for i, value in params.logit_bias.items() if 0 <= i < num_tokens)
        self._bias_ids = np.array([i for i, _ in bias], dtype=np.int64)
        self._bias = np.array([value for _, value in bias], dtype=np.float32)
        self._end_ids = np.array(sorted(i for i in end_ids if 0 <= i < num_tokens), dtype=np.int64)
        self._min_tokens = min_tokens
        self._num_sampled = 0
        seed = None if params.seed is None else params.seed % 2**64
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._scratch = np.empty(0, dtype=np.float32)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Chooses a token by its logits `[vocab]`, which are left as they are, and counts it.

        Raises:
            NumericalError: a logit is NaN or plus infinity, or no token is possible.
        """
        row = logits[: self._num_tokens]
        token_id = self._greedy(row) if self._params.is_greedy else self._random(row)
        self._num_sampled += 1
        if self._penalties is not None:
            self._penalties.add(token_id)
        return token_id

    def _greedy(self, row: NDArray[np.float32]) -> int:
        best = int(row.argmax())
        check_peak(row[best])
        if not self._changes_logits:
            return best
        row = self._changed(row)
        best = int(row.argmax())
        check_peak(row[best])
        return best

    def _random(self, row: NDArray[np.float32]) -> int:
        peak = row.max()
        check_peak(peak)
        if self._changes_logits:
            row = self._changed(row)
            peak = row.max()
            check_peak(peak)
        point = self._generator.random()
        ids = highest(row, self._params.top_k) if self._params.top_k else None
        weights = self._weights(row if ids is None else row[ids], peak)
        kept = self._kept(weights)
        index = _draw(weights, point) if kept is None else int(kept[_draw(weights[kept], point)])
        return index if ids is None else int(ids[index])

    def _weights(self, values: NDArray[np.float32], peak: np.float32) -> NDArray[np.float32]:
        """Probabilities relative to the highest, whose weight is exactly 1."""
        weights = self._buffer()[: len(values)]
        with np.errstate(over="ignore"):  # minus infinity is the right answer
            np.subtract(values, peak, out=weights)
            weights /= np.float32(self._params.temperature)
        return np.exp(weights, out=weights)

    def _kept(self, weights: NDArray[np.float32]) -> NDArray[np.int64] | None:
        """Indices that top-p and min-p leave, ascending; None where all are left whose weight is not 0 then."""
        params = self._params
        if params.top_p < 1.0:
            mass = params.top_p * _sum(weights)
            kept = _narrow_nucleus(weights, mass)
            if kept is not None:
                return kept[weights[kept] >= params.min_p]
            weights *= _wide_nucleus(weights, mass)
        if params.min_p > 0.0:
            weights *= weights >= params.min_p
        return None

    @property
    def _changes_logits(self) -> bool:
        return self._penalties is not None or len(self._bias) > 0 or self._bans_end

    @property
    def _bans_end(self) -> bool:
        return self._num_sampled < self._min_tokens and len(self._end_ids) > 0

    def _changed(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of the logits after penalties, bias and ban."""
        result = self._buffer()
        np.copyto(result, row)
        if self._penalties is not None:
            self._penalties.apply(result)
        result[self._bias_ids] += self._bias
        if self._bans_end:
            result[self._end_ids] = -np.inf
        return result

    def _buffer(self) -> NDArray[np.float32]:
        if len(self._scratch) != self._num_tokens:
            self._scratch = np.empty(self._num_tokens, dtype=np.float32)
        return self._scratch


def _narrow_nucleus(weights: NDArray[np.float32], mass: float) -> NDArray[np.int64] | None:
    """The indices of the fewest, highest weights that hold the mass, ascending; of equal ones the lowest.

    Sorting the vocabulary is slow and hardly ever needed: weights above a floor are all higher than those below it,
    so the highest floor will do whose candidates hold the mass. None where they are many.
    """
    for floor in _FLOORS:
        above = weights > floor
        if int(np.count_nonzero(above)) > _MANY:
            return None
        ids = np.flatnonzero(above)
        values = weights[ids]
        if _sum(values) >= mass:
            return ids[_first(values, mass)]
    return None


def _wide_nucleus(weights: NDArray[np.float32], mass: float) -> NDArray[np.bool_]:
    """Marks the same among many: like weights are one class, and only the class that reaches the mass is sorted."""
    classes = weights.view(np.int32) >> _CLASS_SHIFT  # of positive numbers, in their order
    counts = np.bincount(classes)
    edges = (np.arange(len(counts), dtype=np.int32) << _CLASS_SHIFT).view(np.float32)
    total = _sum(weights)
    estimated = (counts * edges).cumsum()
    last = min(int(np.searchsorted(estimated * (total / estimated[-1]), total - mass)), len(counts) - 1)
    while (held := _sum(weights * (classes > last))) >= mass and last < len(counts) - 1:
        last += 1
    ids = np.flatnonzero(classes == last)
    while last > 0 and held + _sum(weights[ids]) < mass:
        held += _sum(weights[ids])
        last -= 1
        ids = np.flatnonzero(classes == last)
    kept: NDArray[np.bool_] = classes > last
    if len(ids):
        kept[ids[_first(weights[ids], mass - held)]] = True
    return kept


def _sum(weights: NDArray[np.float32]) -> float:
    return float(weights.sum(dtype=np.float64))


def _first(values: NDArray[np.float32], mass: float) -> NDArray[np.bool_]:
    """Marks the fewest of the highest values that hold the mass, at least one; of equal ones the first."""
    ranked = -np.sort(-values)
    count = min(int(np.searchsorted(ranked.cumsum(dtype=np.float64), mass)) + 1, len(values))
    least = ranked[count - 1]
    kept: NDArray[np.bool_] = values > least
    kept[np.flatnonzero(values == least)[: count - int(np.count_nonzero(kept))]] = True
    return kept


def _draw(weights: NDArray[np.float32], point: float) -> int:
    """The index at which the cumulated weights pass the share `point` of their sum; never one of weight 0.

    Of many, it finds the block by the blocks' sums, then the index inside of it.
    """
    if len(weights) <= _MANY:
        cumulated = weights.cumsum(dtype=np.float64)
        return _passing(cumulated, point * float(cumulated[-1]))
    starts = np.arange(0, len(weights), _BLOCK)
    cumulated = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    target = point * float(cumulated[-1])
    block = _passing(cumulated, target)
    inside = weights[starts[block] : starts[block] + _BLOCK].cumsum(dtype=np.float64)
    before = float(cumulated[block - 1]) if block else 0.0
    return int(starts[block]) + _passing(inside, target - before)


def _passing(cumulated: NDArray[np.float64], target: float) -> int:
    """The first index whose value exceeds `target`, which rounding may have put at the end."""
    target = min(target, float(np.nextafter(cumulated[-1], 0.0)))
    return int(np.searchsorted(cumulated, target, side="right"))
