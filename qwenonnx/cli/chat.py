"""`qwenonnx chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from qwenonnx.cli.options import Threads

if TYPE_CHECKING:
    from qwenonnx.cli.chat_backends import Message


def chat(
    target: Annotated[str, typer.Argument(metavar="DIR|URL", help="A package, or the address of a server (http://…).")],
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")] = None,
    temperature: Annotated[
        float, typer.Option(metavar="X", min=0, max=2, help="0 always takes the likeliest token.")
    ] = 0.0,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="QWENONNX_API_KEY", help="For a server that wants one.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Chat in the terminal, or answer what comes through a pipe."""
    from qwenonnx.cli.chat_backends import ChatSettings, open_backend
    from qwenonnx.cli.conversation import answer, converse
    from qwenonnx.errors import UsageError

    settings = ChatSettings(max_tokens=max_tokens, temperature=temperature, api_key=api_key, threads=threads)
    with open_backend(target, settings) as backend:
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if sys.stdin.isatty():
            converse(backend, messages, max_tokens)
            return
        question = sys.stdin.read().strip()
        if not question:
            raise UsageError("nothing came through the pipe; send a message, or run `chat` in a terminal to type one.")
        answer(backend, [*messages, {"role": "user", "content": question}], max_tokens)
