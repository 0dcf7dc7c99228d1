"""Fixtures: the real app with a scripted model, on a loopback port. A pytest plugin of the tests beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from http_checks import CONTEXT, MODEL, wait_until
from scripted import Script, ScriptedRunner
from starlette.types import Receive, Scope, Send

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.server.app import create_app
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.served import GenerationDefaults, Served
from qwenonnx.server.service import Service
from qwenonnx.text.chat_template import ChatTemplate
from qwenonnx.text.tokenizer import Tokenizer


@dataclasses.dataclass
class Running:
    """A server at work, and what is behind it."""

    url: str
    runner: ScriptedRunner
    tokenizer: Tokenizer
    template: ChatTemplate
    service: Service
    http: httpx.Client
    open_client: Callable[[], openai.OpenAI]

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        """A client that retries nothing; made on demand, because making one is slow."""
        return self.open_client()

    def chat(self, content: Any = "Hi", **fields: Any) -> httpx.Response:
        """POSTs a conversation of one user message."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        """POSTs a prompt."""
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    def raw(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        """POSTs bytes."""
        all_headers = {"content-type": "application/json", **headers}
        return self.http.post(path, content=body, headers=all_headers)

    def last_prompt(self) -> str:
        """What the model was last given, control tokens included."""
        slot, ids, start = self.runner.prefill_calls[-1]
        del ids, start
        length = self.runner._prompt_lengths[slot]
        return self.tokenizer.decode(self.runner._rows[slot][:length], skip_special=False)


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


@pytest.fixture(scope="session")
def template(tiny_checkpoint: Path, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(tiny_checkpoint, tokenizer)


@pytest.fixture
def start(host: Host, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Start]:
    """Starts servers whose model says `text` and then ends its turn; they are shut down after the test."""
    with ExitStack() as stack:
        yield functools.partial(start_server, stack, host, tokenizer=tokenizer, template=template)


@pytest.fixture(scope="session")
def start_shared(host: Host, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Start]:
    """As `start`, for servers that several tests use; they are shut down in the end."""
    with ExitStack() as stack:
        yield functools.partial(start_server, stack, host, tokenizer=tokenizer, template=template)


@pytest.fixture(scope="session")
def shared(start_shared: Start) -> Running:
    """A server that always says "Hello, world!", for tests that leave it as it was."""
    return start_shared()


def start_server(
    stack: ExitStack,
    host: Host,
    text: str = "Hello, world!",
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    ids: list[int] | None = None,
    say: Callable[[str], str] | None = None,
    end: bool = True,
    config: ServeConfig | None = None,
    engine_config: EngineConfig | None = None,
    defaults: GenerationDefaults | None = None,
    api_key: str = "none",
    **runner_options: Any,
) -> Running:
    """Starts a server that is shut down when the stack closes; `say` makes answers from prompts."""
    ending = [tokenizer.added_tokens["<|im_end|>"]] if end else []
    script: Script = [*(tokenizer.encode(text) if ids is None else ids), *ending]
    if say is not None:
        answer = say

        def script(prompt: tuple[int, ...]) -> list[int]:
            return [*tokenizer.encode(answer(tokenizer.decode(prompt, skip_special=False))), *ending]

    runner = ScriptedRunner(script, **{"vocab_size": 512, "context_length": CONTEXT, **runner_options})

    def load() -> Served:
        return Served(
            engine=Engine(runner, tokenizer, engine_config),
            tokenizer=tokenizer,
            chat_template=template,
            model_name=MODEL,
            created=1_700_000_000,
            context_length=runner.context_length,
            defaults=defaults or GenerationDefaults(),
            aliases=("Qwen/Tiny",),
            info={"threads": 2},
        )

    app = create_app(load, config or ServeConfig())
    url = stack.enter_context(host.mounted(app))
    stack.callback(runner.release)
    # Without TLS, the slow part of making a client can be left out.
    http = stack.enter_context(httpx.Client(base_url=url, timeout=30, verify=False))

    def open_client() -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=30)
        return stack.enter_context(client)

    service: Service = app.state.service
    wait_until(lambda: service.status == "ok")
    return Running(url, runner, tokenizer, template, service, http, open_client)


class Host:
    """One uvicorn for all tests: starting one for each takes longer than most tests. Apps live under `/<number>`."""

    def __init__(self) -> None:
        self._apps: dict[str, FastAPI] = {}
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, number, rest = scope["path"].split("/", 2)
        await self._apps[number]({**scope, "path": f"/{rest}", "raw_path": b""}, receive, send)

    @contextmanager
    def run(self) -> Iterator[Host]:
        """Serves on a free loopback port."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            config = uvicorn.Config(self, log_config=None, ws="none", lifespan="off", timeout_graceful_shutdown=5)
            server = uvicorn.Server(config)
            self._loop = asyncio.new_event_loop()
            self._port = listener.getsockname()[1]
            thread = threading.Thread(target=self._serve, args=(server, listener))
            thread.start()
            try:
                wait_until(lambda: server.started)
                yield self
            finally:
                server.should_exit = True
                thread.join()

    @contextmanager
    def mounted(self, app: FastAPI) -> Iterator[str]:
        """Runs an app and yields its address."""
        self._count += 1
        number = str(self._count)
        lifespan = app.router.lifespan_context(app)
        self._apps[number] = app
        asyncio.run_coroutine_threadsafe(lifespan.__aenter__(), self._loop).result(20)
        try:
            yield f"http://127.0.0.1:{self._port}/{number}"
        finally:
            asyncio.run_coroutine_threadsafe(lifespan.__aexit__(None, None, None), self._loop).result(20)
            del self._apps[number]

    def _serve(self, server: uvicorn.Server, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(server.serve(sockets=[listener]))


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    with Host().run() as host:
        yield host
