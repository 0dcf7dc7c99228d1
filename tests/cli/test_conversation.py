"""`qwenonnx chat` in a terminal, with what is typed and what is answered written down."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from qwenonnx.cli.chat_backends import Message
from qwenonnx.cli.conversation import HELP, answer, converse


class Echo:
    """Answers with the last message; keeps every conversation it was sent."""

    def __init__(self, reason: str = "stop", interrupt: bool = False) -> None:
        self.asked: list[list[Message]] = []
        self._reason = reason
        self._interrupt = interrupt

    def reply(self, messages: list[Message]) -> Generator[str, None, str | None]:
        self.asked.append(list(messages))
        yield "you said: "
        if self._interrupt:
            raise KeyboardInterrupt
        yield messages[-1]["content"]
        return self._reason

    @property
    def questions(self) -> list[str]:
        return [messages[-1]["content"] for messages in self.asked]


def typing(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """A reader of these lines; Ctrl-C and Ctrl-D are KeyboardInterrupt and EOFError."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    return read


def test_a_conversation_remembers_until_it_starts_over(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Echo()
    system: Message = {"role": "system", "content": "Be brief."}

    converse(backend, [system], None, typing("one", " two ", "", "/new", "three", EOFError))

    assert [len(messages) for messages in backend.asked] == [2, 4, 2]
    assert backend.asked[1][2] == {"role": "assistant", "content": "you said: one"}
    assert backend.asked[2] == [system, {"role": "user", "content": "three"}]
    captured = capsys.readouterr()
    assert captured.out.startswith("you said: one\nyou said: two\nyou said: three\n")
    assert "started over" in captured.err


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_leaving_asks_nothing(leave: str) -> None:
    backend = Echo()
    converse(backend, [], None, typing(leave))
    assert backend.asked == []


def test_commands_are_listed_and_unknown_ones_do_not_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Echo()

    converse(backend, [], None, typing("/help", "/clear", "/new now", "/", "/etc/hosts: what is it?", "/exit"))

    assert backend.questions == ["/etc/hosts: what is it?"]
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith(HELP)
    assert said[1:] == [
        HELP,
        f"/clear is no command. {HELP}",
        f"/new is no command. {HELP}",
        f"/ is no command. {HELP}",
    ]
    assert all(command in HELP for command in ("/new", "/help", "/exit"))


def test_one_interrupt_keeps_the_conversation_and_two_in_a_row_leave(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Echo()

    converse(backend, [], None, typing(KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt, "never read"))

    assert backend.questions == ["one"]
    assert capsys.readouterr().err.count("Ctrl-C once more") == 2


def test_an_interrupted_answer_is_kept_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(Echo(interrupt=True), [{"role": "user", "content": "Hi"}], None) == "you said: "
    assert "[stopped]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "limit", "said"),
    [
        ("length", 8, "[stopped at --max-tokens 8]\n"),
        ("length", None, "[stopped: no room for more]\n"),
        ("stop", 8, ""),
    ],
)
def test_an_answer_cut_short_is_said(
    reason: str, limit: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(Echo(reason), [{"role": "user", "content": "Hi"}], limit) == "you said: Hi"
    assert capsys.readouterr() == ("you said: Hi\n", said)
