"""Stages of work, as they are shown where there is no terminal."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest

import qwenonnx.cli.console as console
from qwenonnx.cli.console import Stages


def test_a_short_stage_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(patience=3600) as stages:
        stages.begin("first")(1, 2)
        stages.begin("second")

    assert re.fullmatch(r"first: done in \d+\.\d s\nsecond: done in \d+\.\d s\n", capsys.readouterr().err)
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_stage_that_lasts_has_a_line_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    shown = threading.Event()

    def say(text: str) -> None:
        lines.append(text)
        shown.set()

    monkeypatch.setattr(console, "say", say)
    with Stages(patience=0.0) as stages:
        stages.begin("first")
        assert shown.wait(30)

    assert lines[0] == "first …"
    assert lines[1].startswith("first: done in ")
    assert len(lines) == 2


def test_quiet_stages_say_nothing_and_failed_ones_are_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(quiet=True, patience=0.0) as stages:
        stages.begin("first")
    with contextlib.suppress(ValueError), Stages(patience=3600) as stages:
        stages.begin("second")
        raise ValueError

    assert capsys.readouterr().err == ""
