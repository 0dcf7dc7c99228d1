"""Real clients, unchanged, against exact text. LangChain and LiteLLM come with the extra `clients`."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import openai
import pytest
from http_checks import MODEL

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]

TEXT = " Hello, 😀 world!\n"
KEY = "a-key"
USER: Any = [{"role": "system", "content": "Be short"}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Running:
    """A server that always says TEXT."""
    return start_shared(TEXT, api_key=KEY)


def test_openai_create(server: Running) -> None:
    answer = server.client.chat.completions.create(model=MODEL, messages=USER, user="me", metadata={"a": "b"})
    assert answer.choices[0].message.content == TEXT
    assert server.client.completions.create(model=MODEL, prompt="Hi", max_tokens=99).choices[0].text == TEXT


def test_openai_stream(server: Running) -> None:
    stream = server.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT


def test_openai_stream_helper(server: Running) -> None:
    with server.client.chat.completions.stream(
        model=MODEL, messages=USER, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == TEXT
    (done,) = (event for event in events if event.type == "content.done")
    assert done.content == final.choices[0].message.content == TEXT
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.prompt_tokens == len(server.template.encode(USER))


def test_openai_stream_helper_with_several_choices_and_logprobs(server: Running) -> None:
    with server.client.chat.completions.stream(
        model=MODEL, messages=USER, n=2, logprobs=True, top_logprobs=2
    ) as stream:
        final = stream.until_done().get_final_completion()
    assert [choice.message.content for choice in final.choices] == [TEXT, TEXT]
    for choice in final.choices:
        assert choice.logprobs is not None
        spelled = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content or ())
        assert spelled.decode() == TEXT


def test_openai_raw_responses(server: Running) -> None:
    raw = server.client.chat.completions.with_raw_response.create(model=MODEL, messages=USER)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == TEXT
    with server.client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=USER, stream=True
    ) as streamed:
        assert [*streamed.iter_lines()][-2] == "data: [DONE]"


def test_openai_async(server: Running) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=USER)
            stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return answer.choices[0].message.content or "", "".join(parts)

    assert asyncio.run(ask()) == (TEXT, TEXT)


def test_openai_errors_and_what_is_not_retried(server: Running) -> None:
    client = server.client.with_options(max_retries=2)
    before = len(server.runner.prefill_calls)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x " * 600}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id is not None
    assert len(server.runner.prefill_calls) == before


def curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "20", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Running) -> None:
    url = f"{server.url}/v1/chat/completions"
    body = json.dumps({"model": MODEL, "messages": USER})
    # Without a header, curl would call the body a form.
    said = json.loads(curl(url, "--json", body))
    assert said["choices"][0]["message"]["content"] == TEXT
    stream = curl(url, "--json", json.dumps({"messages": USER, "stream": True}))
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    assert stream.endswith("data: [DONE]\n\n")
    assert curl("--head", f"{server.url}/health").startswith("HTTP/1.1 200")


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")  # of their own making
def test_langchain(server: Running) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key=KEY, model=MODEL, max_retries=0, temperature=0, seed=1)
    answer = chat.invoke("Hi")
    assert answer.content == TEXT
    assert answer.usage_metadata["input_tokens"] > 0
    chunks = list(chat.stream([("system", "Be short"), ("human", "Hi")]))
    assert "".join(chunk.content for chunk in chunks) == TEXT
    several = chat.generate([[HumanMessage("Hi")]], n=2, logprobs=True, top_logprobs=2)
    assert [generation.text for generation in several.generations[0]] == [TEXT, TEXT]
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(base_url=f"{server.url}/v1", api_key=KEY, model="gpt-4", max_retries=0).invoke("Hi")


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
def test_litellm(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    import litellm

    options: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "messages": USER,
        "num_retries": 0,
    }
    assert litellm.completion(**options).choices[0].message.content == TEXT
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT

    async def ask() -> str:
        stream = await litellm.acompletion(**options, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == TEXT
    # It knows this kind of error by the words of OpenAI's message.
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(**{**options, "messages": [{"role": "user", "content": "x " * 600}]})
