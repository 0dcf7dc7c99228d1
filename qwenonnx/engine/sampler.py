"""Choosing the next token of one request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from qwenonnx.engine.penalties import Penalties
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.errors import NumericalError

# Weights relative to the most probable token's below which candidates are left out, tried in this order.
_FLOORS = (1e-2, 1e-4, 1e-6)

# Width of the partial sums in which a draw over the whole vocabulary looks for its token.
_BLOCK = 512


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
        _check_peak(row[best])
        if not self._changes_logits:
            return best
        row = self._changed(row)
        best = int(row.argmax())
        _check_peak(row[best])
        return best

    def _random(self, row: NDArray[np.float32]) -> int:
        peak = row.max()
        _check_peak(peak)
        if self._changes_logits:
            row = self._changed(row)
            peak = row.max()
            _check_peak(peak)
        weights = self._buffer()
        with np.errstate(over="ignore"):  # minus infinity is the right answer
            np.subtract(row, peak, out=weights)
            weights /= np.float32(self._params.temperature)
        np.exp(weights, out=weights)  # the highest is exactly 1
        point = self._generator.random()
        if self._params.top_k or self._params.top_p < 1.0:
            ids = self._nucleus(weights)
        elif self._params.min_p > 0.0:
            ids = np.flatnonzero(weights >= self._params.min_p)
        else:
            return _draw_blockwise(weights, point)
        return int(ids[_draw(weights[ids], point)])

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

    def _nucleus(self, weights: NDArray[np.float32]) -> NDArray[np.int64]:
        """Ids that top-k, top-p and min-p leave, in ascending order.

        Sorting the vocabulary is slow and hardly ever needed: tokens above a floor are all more probable than
        those below it, so the highest floor will do whose candidates are k and hold the mass p.
        """
        params = self._params
        if params.top_k:
            count, mass = min(params.top_k, len(weights)), 0.0
        else:
            count, mass = 1, params.top_p * float(weights.sum(dtype=np.float64))
        ids = np.arange(len(weights))
        for floor in _FLOORS:
            candidates = np.flatnonzero(weights > floor)
            if len(candidates) >= count and float(weights[candidates].sum(dtype=np.float64)) >= mass:
                ids = candidates
                break
        ranked = -np.sort(-weights[ids])
        if params.top_k:
            ranked = ranked[:count]
        if params.top_p < 1.0:
            cumulated = ranked.cumsum(dtype=np.float64)
            # After top-k, p is a share of the mass that top-k left.
            mass = params.top_p * float(cumulated[-1]) if params.top_k else mass
            ranked = ranked[: int(np.searchsorted(cumulated, mass)) + 1]
        ids = _best(weights, ids, ranked)
        return ids[weights[ids] >= params.min_p]

    def _buffer(self) -> NDArray[np.float32]:
        if len(self._scratch) != self._num_tokens:
            self._scratch = np.empty(self._num_tokens, dtype=np.float32)
        return self._scratch


def _check_peak(peak: np.float32) -> None:
    """The highest logit tells all: NaN and plus infinity come out on top, minus infinity only if alone."""
    if not np.isfinite(peak):
        raise NumericalError(
            f"The model's logits are not finite (their maximum is {peak}); the package may be damaged or its "
            "precision too low, so check it with `qwenonnx eval`."
        )


def _best(weights: NDArray[np.float32], ids: NDArray[np.int64], ranked: NDArray[np.float32]) -> NDArray[np.int64]:
    """Those of `ids` whose weights are the `ranked` ones; of equal weights at the end, the lowest ids."""
    values = weights[ids]
    kept = values > ranked[-1]
    equal = np.flatnonzero(values == ranked[-1])
    kept[equal[: len(ranked) - int(np.count_nonzero(kept))]] = True
    best: NDArray[np.int64] = ids[kept]
    return best


def _draw(weights: NDArray[np.float32], point: float) -> int:
    """The index at which the cumulated weights pass the share `point` of their sum; never one of weight 0."""
    cumulated = weights.cumsum(dtype=np.float64)
    return _passing(cumulated, point * float(cumulated[-1]))


def _draw_blockwise(weights: NDArray[np.float32], point: float) -> int:
    """As `_draw`, for long rows: finds the block by the blocks' sums, then the token inside of it."""
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
