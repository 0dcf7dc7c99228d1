"""The conversation of `qwenonnx chat`: prompt, commands, answers, Ctrl-C."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from qwenonnx.cli.console import say

if TYPE_CHECKING:
    from qwenonnx.cli.chat_backends import ChatBackend, Message

HELP = "/new starts over, /help shows this, /exit or Ctrl-D leaves; Ctrl-C stops an answer or clears the line."
_COMMAND = re.compile(r"/\w*")
"""A first word like this is meant as a command, one like /etc/hosts is not."""


def converse(
    backend: ChatBackend, messages: list[Message], max_tokens: int | None, read: Callable[[str], str] = input
) -> None:
    """Reads messages and answers them until the user leaves; `messages` are those that each conversation begins with.

    Raises:
        QwenonnxError: an answer failed.
    """
    say(f"Type a message. {HELP}")
    start = list(messages)
    for line in _lines(read):
        word = line.split()[0]
        if line == "/new":
            messages = list(start)
            say("started over")
        elif line == "/help":
            say(HELP)
        elif _COMMAND.fullmatch(word):
            say(f"{word} is no command. {HELP}")
        else:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": answer(backend, messages, max_tokens)})


def answer(backend: ChatBackend, messages: list[Message], max_tokens: int | None) -> str:
    """Prints the answer as it comes, and returns it. Ctrl-C stops it; that, and a limit, is said on stderr.

    Raises:
        QwenonnxError: it failed.
    """
    pieces: list[str] = []
    reason = None
    reply = backend.reply(messages)
    try:
        while True:
            pieces.append(next(reply))
            sys.stdout.write(pieces[-1])
            sys.stdout.flush()
    except StopIteration as end:
        reason = end.value
    except KeyboardInterrupt:
        say("\n[stopped]")
    finally:
        reply.close()
    print(flush=True)
    if reason == "length":
        say("[stopped: no room for more]" if max_tokens is None else f"[stopped at --max-tokens {max_tokens}]")
    return "".join(pieces)


def _lines(read: Callable[[str], str]) -> Iterator[str]:
    typed = _typed()
    interrupted = False
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted and not typed():
                return
            interrupted = True
            say("(Ctrl-C once more, or Ctrl-D, leaves)")
            continue
        interrupted = False
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def _typed() -> Callable[[], str]:
    """What tells the text on the line when Ctrl-C is pressed, where readline is there."""
    try:
        import readline  # also gives input() editing and history
    except ImportError:
        return str
    return readline.get_line_buffer
