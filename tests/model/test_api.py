"""Real clients against the real weights."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.model

USER: Any = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
OPTIONS: dict[str, Any] = {"model": "coder", "messages": USER, "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def url(model_checkpoint: Path) -> Iterator[str]:
    """Where `qwenonnx serve` serves the int8 package."""
    folder = model_checkpoint.parents[1] / "int8"
    line = [sys.executable, "-m", "qwenonnx", "serve", str(folder), "--port", "0", "--model-name", "coder"]
    process = subprocess.Popen([*line, "--context-length", "2048"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            text = process.stderr.readline()
            assert text, "the server has ended"
            found = re.search(r"Ready: .* at (http://[\d.]+:\d+)", text)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI) -> str:
    """What the others must say as well."""
    text: str | None = client.chat.completions.create(**OPTIONS).choices[0].message.content
    assert text is not None
    assert "Paris" in text
    return text


def test_openai_in_all_its_ways(client: openai.OpenAI, answer: str) -> None:
    chunks = client.chat.completions.create(**OPTIONS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    with client.chat.completions.stream(**OPTIONS) as stream:
        assert stream.get_final_completion().choices[0].message.content == answer
    raw = client.chat.completions.with_raw_response.create(**OPTIONS)
    assert raw.parse().choices[0].message.content == answer

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
            return (await other.chat.completions.create(**OPTIONS)).choices[0].message.content or ""

    assert asyncio.run(ask()) == answer


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(url: str, answer: str) -> None:
    command = ["curl", "--silent", f"{url}/v1/chat/completions", "--json", json.dumps(OPTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == answer


def test_logprobs_spell_the_answer_and_the_greedy_token_is_the_best(client: openai.OpenAI, answer: str) -> None:
    choice = client.chat.completions.create(**OPTIONS, logprobs=True, top_logprobs=5).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(token.bytes or ()) for token in content).decode() == answer
    for token in content:
        assert token.logprob == max(other.logprob for other in token.top_logprobs) <= 0


def test_a_gap_in_code_is_filled(client: openai.OpenAI) -> None:
    before, after = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
    by_suffix = client.completions.create(model="coder", prompt=before, suffix=after, max_tokens=16, temperature=0)
    by_hand = client.completions.create(
        model="coder",
        prompt=f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
        max_tokens=16,
        temperature=0,
    )
    assert by_suffix.choices[0].text.strip().startswith("a + b")
    assert by_hand.choices[0].text.startswith(by_suffix.choices[0].text)
    assert "<|" not in by_suffix.choices[0].text


def test_control_tokens_that_a_user_types_are_six_ordinary_ones(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        tokens = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi<|im_end|>"}]}).json()[
            "tokens"
        ]
    assert [tokens.count(control) for control in (151644, 151645)] == [3, 2]
    place = tokens.index(6023)
    assert tokens[place : place + 7] == [6023, 27, 91, 318, 6213, 91, 29]


def test_a_choice_each_for_two_prompts(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    both = client.completions.create(model="coder", prompt=prompts, max_tokens=4, temperature=0).choices
    assert ["Paris" in both[0].text, "Rome" in both[1].text] == [True, True]


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
def test_langchain_and_litellm(url: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="coder", temperature=0, max_tokens=16)
    assert chat.invoke(USER).content == answer
    assert "".join(chunk.content for chunk in chat.stream(USER)) == answer
    options = {**OPTIONS, "model": "openai/coder", "api_base": f"{url}/v1", "api_key": "none"}
    assert litellm.completion(**options).choices[0].message.content == answer
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
