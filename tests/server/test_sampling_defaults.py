"""Where sampling parameters come from when a request does not give them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.prepare import prepare_completion
from qwenonnx.server.served import GenerationDefaults

if TYPE_CHECKING:
    from serving_app import Start

pytest_plugins = ["serving_app"]


PUBLISHED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
DEFAULTS = GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("config", "right"),
    [
        ({}, GenerationDefaults()),
        (PUBLISHED, DEFAULTS),
        ({**PUBLISHED, "do_sample": False}, GenerationDefaults(repetition_penalty=1.1)),
        ({"temperature": 0.7}, GenerationDefaults()),
        ({"do_sample": True}, GenerationDefaults(temperature=1.0, top_k=50)),
        (
            {"do_sample": True, "temperature": "hot", "top_p": None, "top_k": True, "repetition_penalty": 0},
            GenerationDefaults(temperature=1.0, top_k=50),
        ),
        ({"do_sample": True, "top_k": 0, "top_p": float("nan")}, GenerationDefaults(temperature=1.0)),
    ],
)
def test_reading_a_generation_config(config: dict[str, Any], right: GenerationDefaults) -> None:
    assert GenerationDefaults.from_generation_config(config) == right


def sampling(start: Start, config: ServeConfig | None = None, **fields: Any) -> SamplingParams:
    served = start(defaults=DEFAULTS).service.served
    body = json.dumps({"prompt": "Hi", **fields}).encode()
    return prepare_completion(body, served, config or ServeConfig()).requests[0].sampling


def test_the_package_decides_when_nobody_else_does(start: Start) -> None:
    params = sampling(start, temperature=None)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.8, 20)
    assert params.repetition_penalty == 1.1
    assert params.seed is None


def test_the_option_of_the_server_beats_the_package(start: Start) -> None:
    params = sampling(start, ServeConfig(temperature=0.0, top_k=-1))
    assert params.is_greedy
    assert (params.top_p, params.top_k) == (0.8, 0)


def test_the_request_beats_both(start: Start) -> None:
    params = sampling(
        start,
        ServeConfig(temperature=0.3, top_p=0.5),
        temperature=1.5,
        top_p=0.9,
        top_k=0,
        repetition_penalty=1.0,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"5": -100},
        seed=-1,
    )
    assert params == SamplingParams(
        temperature=1.5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={5: -100.0},
        seed=2**64 - 1,
    )


def test_no_probability_mass_leaves_the_most_probable_token(start: Start) -> None:
    assert sampling(start, top_p=0).is_greedy


def test_end_tokens_can_be_ignored_and_put_off(start: Start) -> None:
    running = start("ab")
    assert running.chat(ignore_eos=True, max_tokens=20).json()["usage"]["completion_tokens"] == 20
    short = running.chat().json()["usage"]["completion_tokens"]
    assert running.chat(min_tokens=short + 3).json()["usage"]["completion_tokens"] > short + 2
    assert running.chat(min_tokens=5, max_tokens=4).json()["error"]["param"] == "min_tokens"
