"""Measures what HTTP costs: tokens per second of streams through the server beside those of its engine alone, in turn.

Usage: python scripts/bench_http.py PACKAGE [--streams 1 16] [--new-tokens 64] [--repeats 5] [--json FILE]

One process serves the package and also drives its engine directly; a second process is the client, which reads the
streams as bytes. Both ways get random prompts of the same length, and each pair of runs follows at once, so that their
ratio says something even on a busy machine. Medians are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from qwenonnx.engine.engine import Engine
from qwenonnx.engine.load import load_model
from qwenonnx.engine.request import Failed, GenerationRequest
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import session_config
from qwenonnx.server.app import create_app
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.connections import connection_class
from qwenonnx.server.run import listen
from qwenonnx.server.served import Served
from qwenonnx.server.service import Service

PROMPT_TOKENS = 32


def random_prompts(streams: int, seed: int) -> list[list[int]]:
    """Token ids without meaning, other ones for each seed."""
    generator = random.Random(seed)
    return [[generator.randrange(100_000) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]


def engine_seconds(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    """How long the engine alone takes."""
    start = time.perf_counter()
    streams = [
        engine.generate(GenerationRequest(tuple(prompt), max_tokens=new_tokens, ignore_eos=True)) for prompt in prompts
    ]
    for stream in streams:
        for event in stream:
            if isinstance(event, Failed):
                raise event.error
    return time.perf_counter() - start


async def client_seconds(port: int, prompts: list[list[int]], new_tokens: int) -> float:
    """How long all streams take through HTTP, each on a connection of its own."""

    async def stream(prompt: list[int]) -> None:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        received = await reader.read()
        writer.close()
        if b"data: [DONE]" not in received or b'"error"' in received:
            raise RuntimeError(received[-500:].decode())

    start = time.perf_counter()
    await asyncio.gather(*(stream(prompt) for prompt in prompts))
    return time.perf_counter() - start


class Client:
    """The client in a process of its own: one JSON list of prompts a line, seconds back."""

    def __init__(self, port: int, new_tokens: int) -> None:
        command = [sys.executable, __file__, "--client", str(port), "--new-tokens", str(new_tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, prompts: list[list[int]]) -> float:
        """How long the prompts take."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the client has no pipes")
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


@contextmanager
def serving(package: Package) -> Iterator[tuple[int, Engine]]:
    """Serves a package in a thread; yields the port and the engine behind it."""

    def load() -> Served:
        model = load_model(package, session_config(), context_length=2048, check=False)
        return Served(model.engine, model.tokenizer, model.chat_template, "model", 0, model.context_length)

    config = ServeConfig(port=0)
    app = create_app(load, config)
    service: Service = app.state.service
    ready = threading.Event()
    service.on_ready = lambda _: ready.set()
    service.on_failure = ready.set
    with listen(config.host, 0, config.max_connections) as listener:
        protocol = connection_class(listener, config.header_timeout)
        server = uvicorn.Server(uvicorn.Config(app, http=protocol, loop="asyncio", ws="none", log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            ready.wait()
            yield listener.getsockname()[1], service.served.engine
        finally:
            server.should_exit = True
            thread.join()


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """One row for each number of streams."""
    rows = []
    with serving(Package.open(options.package)) as (port, engine):
        client = Client(port, options.new_tokens)
        try:
            for streams in options.streams:
                tokens = streams * options.new_tokens
                rates: list[tuple[float, float]] = []
                for turn in range(options.repeats + 1):
                    seed = 1000 * streams + 2 * turn
                    alone = tokens / engine_seconds(engine, random_prompts(streams, seed), options.new_tokens)
                    through = tokens / client.seconds(random_prompts(streams, seed + 1))
                    if turn:  # the first warms both up
                        rates.append((alone, through))
                rows.append(
                    {
                        "streams": streams,
                        "engine tokens/s": round(statistics.median(alone for alone, _ in rates), 1),
                        "http tokens/s": round(statistics.median(through for _, through in rates), 1),
                        "http / engine": round(statistics.median(through / alone for alone, through in rates), 3),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
        finally:
            client.close()
    return rows


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        for line in sys.stdin:
            print(asyncio.run(client_seconds(options.client, json.loads(line), options.new_tokens)), flush=True)
        return
    if options.package is None:
        parser.error("PACKAGE is missing")
    rows = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
