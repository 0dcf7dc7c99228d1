"""`qwenonnx chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from qwenonnx.cli.console import say
from qwenonnx.cli.options import Threads

if TYPE_CHECKING:
    from qwenonnx.cli.chat_backends import ChatBackend, Message


def chat(
    target: Annotated[str, typer.Argument(metavar="DIR|URL", help="A package, or the address of a server (http://…).")],
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = 0.0,
    api_key: Annotated[str | None, typer.Option(envvar="QWENONNX_API_KEY", help="For a server that wants one.")] = None,
    threads: Threads = None,
) -> None:
    """Chat in the terminal. With input from a pipe, answer once and stop."""
    from qwenonnx.cli.chat_backends import ChatSettings, open_backend

    settings = ChatSettings(max_tokens=max_tokens, temperature=temperature, api_key=api_key, threads=threads)
    with open_backend(target, settings) as backend:
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if not sys.stdin.isatty():
            messages.append({"role": "user", "content": sys.stdin.read().strip()})
            _answer(backend, messages)
            return
        say("Type a message; Ctrl-C stops an answer, Ctrl-D or /exit leaves, /new starts over.")
        start = len(messages)
        for line in _lines():
            if line == "/new":
                del messages[start:]
                continue
            messages.append({"role": "user", "content": line})
            answer = _answer(backend, messages)
            messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def _answer(backend: ChatBackend, messages: list[Message]) -> str:
    pieces: list[str] = []
    reply = backend.reply(messages)
    try:
        for piece in reply:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        say("\n[stopped]")
    finally:
        reply.close()
    print()
    return "".join(pieces)
