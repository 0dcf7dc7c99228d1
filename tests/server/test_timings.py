"""The `timings` object, on request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from openai.types.chat import ChatCompletion

from qwenonnx.engine.request import Finished, Timings, Usage
from qwenonnx.server.totals import Totals

if TYPE_CHECKING:
    from serving_app import Running

pytest_plugins = ["serving_app"]

NAMES = {
    "queue_ms",
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_second",
}


def test_sums_and_speeds() -> None:
    totals = Totals(2)
    for index in range(4):
        totals.add(index, Finished("stop", Usage(100, 11, 40), Timings(queue=0.1, prefill=0.5, decode=2.0)))
    assert totals.usage == Usage(200, 44, 80)
    assert totals.timings_object() == {
        "queue_ms": 400,
        "cache_n": 80,
        "prompt_n": 120,
        "prompt_ms": 2000,
        "prompt_per_second": 60,
        "predicted_n": 44,
        "predicted_ms": 8000,
        "predicted_per_second": 5,
    }


def test_no_time_is_no_speed() -> None:
    totals = Totals()
    totals.add(0, Finished("stop", Usage(1, 0), Timings(0, 0, 0)))
    assert totals.timings_object()["predicted_per_second"] is None


def test_an_answer_in_one_piece(shared: Running) -> None:
    response = shared.chat(timings=True)
    ChatCompletion.model_validate_json(response.content, strict=True)
    timings = response.json()["timings"]
    assert set(timings) == NAMES
    assert timings["predicted_n"] == response.json()["usage"]["completion_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == response.json()["usage"]["prompt_tokens"]
    assert "timings" not in shared.chat().json()
    assert "timings" not in shared.chat(timings=False).json()


@pytest.mark.parametrize("usage", [False, True])
def test_the_last_frame_of_a_stream(shared: Running, usage: bool) -> None:
    text = shared.complete(timings=True, stream=True, n=2, stream_options={"include_usage": usage}).text
    *others, last = (json.loads(event[6:]) for event in text.split("\n\n")[1:-2])
    assert set(last["timings"]) == NAMES
    assert (last["choices"] == []) is usage
    assert not any("timings" in other for other in others)
