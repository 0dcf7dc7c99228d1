"""Rows of one step: each is sampled as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scripted import ScriptedRunner

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Failed, Finished, GenerationRequest
from qwenonnx.engine.sampler import Sampler
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.errors import NumericalError
from qwenonnx.text.tokenizer import Tokenizer

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 100),
)


@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**32))
def test_rows_of_a_batch_are_sampled_as_alone(params: list[SamplingParams], seed: int) -> None:
    steps = np.random.default_rng(seed).standard_normal((5, len(params), 600)).astype(np.float32) * 3
    together = [Sampler(one, (1, 2, 3), num_tokens=580) for one in params]
    found = [[sampler.sample(row) for sampler, row in zip(together, rows, strict=True)] for rows in steps]
    for column, one in enumerate(params):
        alone = Sampler(one, (1, 2, 3), num_tokens=580)
        assert [alone.sample(rows[column].copy()) for rows in steps] == [row[column] for row in found]


class OneBadRow(ScriptedRunner):
    """Has NaN in row 1 of the third step of several rows."""

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        logits = super().decode(token_ids, starts)
        if len(token_ids) == 3 and sum(len(ids) == 3 for ids, _ in self.decode_calls) == 3:
            logits[1, 17] = np.nan
        return logits


def test_a_bad_row_fails_alone(tiny_tokenizer: Tokenizer) -> None:
    wanted = [20 + i for i in range(30)]
    engine = Engine(OneBadRow(wanted, num_slots=3), tiny_tokenizer, EngineConfig(max_running=3, cached_rows=0))
    streams = [engine.generate(GenerationRequest((1, 2, i), max_tokens=30, ignore_eos=True)) for i in range(3)]
    engine.start()
    answers = [list(stream) for stream in streams]
    engine.close()
    failed = [events for events in answers if isinstance(events[-1], Failed)]
    assert len(failed) == 1
    assert isinstance(failed[0][-1], Failed)
    assert isinstance(failed[0][-1].error, NumericalError)
    for events in answers:
        if isinstance(events[-1], Finished):
            assert [i for event in events if isinstance(event, Delta) for i in event.token_ids] == wanted
