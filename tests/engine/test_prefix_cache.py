"""A cache that outlives the process, and system prompts that are there from the start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packages import ONE_THREAD, package_runner
from scripted import ScriptedRunner

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.load import LoadedModel, load_model
from qwenonnx.engine.prefix_files import PrefixFiles, package_sum
from qwenonnx.engine.request import Delta, Finished, GenerationRequest
from qwenonnx.errors import UsageError
from qwenonnx.package.package import Package
from qwenonnx.text.tokenizer import Tokenizer

LONG = tuple(range(1, 101))
OTHER = tuple(range(200, 260))

Start = Callable[..., Engine]


@pytest.fixture
def start(tiny_fp32: Package, tmp_path: Path) -> Iterator[Start]:
    """Starts engines over the tiny model with one folder of prefixes."""
    engines: list[Engine] = []

    def make(
        *, prompts: tuple[tuple[int, ...], ...] = (), slots: int = 6, package: Package = tiny_fp32, **config: Any
    ) -> Engine:
        runner = package_runner(package, slots=slots, context=256)
        files = PrefixFiles(tmp_path / "prefixes", package_sum(package), limit=1 << 30)
        settings = EngineConfig(**{"max_running": 2, "prefill_chunk": 32, **config})
        engine = Engine(runner, Tokenizer.load(package.folder), settings, prefix_files=files)
        engine.preload(prompts)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(20)


def ask(engine: Engine, prompt: tuple[int, ...], count: int = 6) -> tuple[list[int], int]:
    """The answer's tokens and how many of the prompt came from the cache."""
    *deltas, last = engine.generate(GenerationRequest(prompt, max_tokens=count, ignore_eos=True))
    assert isinstance(last, Finished)
    return [i for delta in deltas if isinstance(delta, Delta) for i in delta.token_ids], last.usage.cached_tokens


def test_the_next_process_knows_what_the_last_one_read(start: Start) -> None:
    first = start()
    answers = [ask(first, prompt)[0] for prompt in (LONG, OTHER)]
    first.close(20)
    second = start()
    for prompt, answer in zip((LONG, OTHER), answers, strict=True):
        assert ask(second, prompt) == (answer, len(prompt) - 2)


def test_a_conversation_that_grew_has_one_file(start: Start, tmp_path: Path) -> None:
    prompt = LONG
    for turn in range(3):
        engine = start()
        answer, cached = ask(engine, prompt)
        assert cached == (0 if turn == 0 else len(prompt) - 5)
        prompt = (*prompt, *answer, 7, 8, 9, 10)
        engine.close(20)
    assert len(list((tmp_path / "prefixes").iterdir())) == 1


def test_a_damaged_file_is_ignored_with_a_line_in_the_log(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    answer, _ = ask(engine, LONG)
    ask(engine, OTHER)
    engine.close(20)
    longer = max((tmp_path / "prefixes").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(longer.read_bytes())
    data[-100] ^= 1
    longer.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        second = start()
    assert [
        record.getMessage().count(f"{longer.name} is not used: it does not match") for record in caplog.records
    ] == [1]
    assert ask(second, LONG) == (answer, 0)
    assert ask(second, OTHER)[1] == len(OTHER) - 2
    second.close(20)
    assert ask(start(), LONG) == (answer, len(LONG) - 2)  # the good one took its place


def test_another_package_does_not_take_them(start: Start, tiny_int8: Package) -> None:
    engine = start()
    ask(engine, LONG)
    engine.close(20)
    assert ask(start(package=tiny_int8), LONG)[1] == 0


def test_what_does_not_fit_stays_on_the_disk(start: Start, tmp_path: Path) -> None:
    engine = start()
    for prompt in (LONG, OTHER):
        ask(engine, prompt)
    engine.close(20)
    small = start(kv_tokens=80)  # room for OTHER and its answer alone
    assert ask(small, OTHER)[1] == len(OTHER) - 2
    small.close(20)
    assert len(list((tmp_path / "prefixes").iterdir())) >= 2


def test_idle_times_save_and_then_give_memory_back(start: Start, tmp_path: Path) -> None:
    engine = start(save_after=0.0, release_after=0.01)
    ask(engine, LONG)
    pause = threading.Event()
    while engine._scheduler.kv_tokens:
        pause.wait(0.01)
    assert len(list((tmp_path / "prefixes").glob("*.kv"))) == 1
    assert ask(engine, LONG)[1] == 0


def test_a_folder_that_cannot_be_written_is_said_once_and_nothing_else(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prefixes").write_text("a file")
    engine = start()
    ask(engine, LONG)
    engine.close(20)
    assert len([record for record in caplog.records if "cannot be saved" in record.getMessage()]) == 1


def test_a_runner_without_memory_of_its_own_only_says_so(
    tiny_tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ScriptedRunner([5], vocab_size=512, num_slots=4)
    engine = Engine(runner, tiny_tokenizer, prefix_files=PrefixFiles(tmp_path, "a", 1000))
    engine.preload()
    engine.start()
    ask(engine, LONG)
    engine.close(20)
    assert "not kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_preloaded_prompt_stays_whatever_comes(start: Start) -> None:
    plain = ask(start(), (*LONG[:60], 9, 9))[0]
    engine = start(prompts=(LONG[:60],), kv_tokens=240)
    assert engine.context_length == 240 - 64
    for i in range(8):
        ask(engine, tuple(range(100 + i, 230 + i)))
    assert ask(engine, (*LONG[:60], 9, 9)) == (plain, 60)
    assert engine._scheduler.kv_tokens <= 240


def test_preloading_uses_what_the_files_hold(start: Start) -> None:
    engine = start()
    ask(engine, LONG)
    engine.close(20)
    engine = start(prompts=(LONG[:30],))
    assert ask(engine, (*LONG[:30], 9, 9))[1] == 30
    assert ask(engine, LONG)[1] == len(LONG) - 2  # the conversation is there as well


@pytest.mark.parametrize("size", [80, 100])
def test_prompts_that_leave_no_room_are_refused(start: Start, size: int) -> None:
    with pytest.raises(UsageError, match="prompt"):
        start(prompts=(tuple(range(size)),), kv_tokens=80)


def test_system_prompts_are_loaded_with_the_package(tiny_fp32: Package, tmp_path: Path) -> None:
    text = "You are a pirate. " * 5
    model: LoadedModel = load_model(
        tiny_fp32, ONE_THREAD, context_length=256, system_prompts=(text,), prefix_folder=tmp_path / "p"
    )
    model.engine.start()
    try:
        prompt = model.chat_template.encode([{"role": "system", "content": text}, {"role": "user", "content": "Ahoy"}])
        beginning = model.chat_template.encode([{"role": "system", "content": text}], add_generation_prompt=False)
        assert ask(model.engine, tuple(prompt), 2)[1] >= len(beginning)
    finally:
        model.engine.close(20)
    assert list((tmp_path / "p").glob("*.kv"))
