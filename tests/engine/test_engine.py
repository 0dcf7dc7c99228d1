from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scripted import Fault, Script, ScriptedRunner
from tiny import special_ids

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Event, Failed, Finished, GenerationRequest
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.engine.ticket import Ticket
from qwenonnx.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    NumericalError,
    QueueFullError,
    UnavailableError,
)
from qwenonnx.text.tokenizer import Tokenizer

IM_END = special_ids()["<|im_end|>"]
TEXT_END = special_ids()["<|endoftext|>"]
PROMPT = tuple(range(40, 50))


class Inbox:
    """A sink that remembers, and lets a test wait for the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ended = threading.Event()
        self.first_delta = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Delta):
            self.first_delta.set()
        else:
            self._ended.set()

    def wait(self) -> Event:
        assert self._ended.wait(20)
        return self.events[-1]


def outcome(events: list[Event]) -> tuple[str, list[int], Finished | Failed]:
    """Text, tokens and last event; checks that the events are well-formed."""
    *deltas, last = events
    assert isinstance(last, Finished | Failed)
    text = ""
    ids: list[int] = []
    for delta in deltas:
        assert isinstance(delta, Delta)
        assert delta.text or delta.token_ids
        text += delta.text
        ids += delta.token_ids
    return text, ids, last


class Setup:
    """An engine over a scripted runner, closed in the end."""

    def __init__(self, tokenizer: Tokenizer, engine: Engine, runner: ScriptedRunner) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self.runner = runner

    def run(self, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> tuple[str, list[int], Finished]:
        text, ids, last = outcome(list(self.engine.generate(GenerationRequest(prompt, **fields))))
        assert isinstance(last, Finished), last
        return text, ids, last

    def submit(self, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> tuple[Ticket, Inbox]:
        inbox = Inbox()
        return self.engine.submit(GenerationRequest(prompt, **fields), inbox), inbox


Make = Callable[..., Setup]


@pytest.fixture
def make(tiny_tokenizer: Tokenizer) -> Iterator[Make]:
    """Starts engines whose model says `script`: text, ids, or a function from the prompt."""
    engines: list[tuple[Engine, ScriptedRunner]] = []

    def start(
        script: str | Script,
        *,
        faults: dict[int, Fault] | None = None,
        context_length: int = 128,
        started: bool = True,
        **config: Any,
    ) -> Setup:
        ids = tiny_tokenizer.encode(script) if isinstance(script, str) else script
        runner = ScriptedRunner(ids, vocab_size=512, context_length=context_length, faults=faults)
        engine = Engine(runner, tiny_tokenizer, EngineConfig(**config))
        if started:
            engine.start()
        engines.append((engine, runner))
        return Setup(tiny_tokenizer, engine, runner)

    yield start
    for engine, runner in engines:
        runner.release()
        engine.close(20)
        assert not engine.is_alive


@contextmanager
def held(runner: ScriptedRunner) -> Iterator[None]:
    runner.hold()
    yield
    runner.release()


@pytest.mark.parametrize("end", [IM_END, TEXT_END])
def test_either_end_token_stops_and_stays_out_of_text_and_usage(make: Make, end: int) -> None:
    setup = make([*make("").tokenizer.encode("hi"), end, 5, 5])
    text, ids, last = setup.run()
    assert (text, last.reason) == ("hi", "stop")
    assert last.usage.completion_tokens == len(ids) == len(setup.tokenizer.encode("hi"))
    assert last.usage.prompt_tokens == len(PROMPT)
    assert min(last.timings.queue, last.timings.prefill, last.timings.decode) >= 0


@pytest.mark.parametrize(
    ("script", "stop", "expected", "reason"),
    [
        ("The quick brown fox jumps", ("own fox",), "The quick br", "stop"),
        ("abc own f<|im_end|>", ("own fox",), "abc own f", "stop"),
        ("aaab<|im_end|>", ("aab",), "a", "stop"),
        ("END<|im_end|>", ("ENDING", "ND"), "E", "stop"),
        ("abc own f<|im_end|>", ("",), "abc own f", "stop"),
        ("xyz<|im_end|>", ("x",), "", "stop"),
    ],
)
def test_stop_strings(make: Make, script: str, stop: tuple[str, ...], expected: str, reason: str) -> None:
    text, ids, last = make(script).run(stop=stop)
    assert (text, last.reason) == (expected, reason)
    assert last.usage.completion_tokens == len(ids)


def test_the_held_tail_comes_out_at_the_length_limit(make: Make) -> None:
    setup = make("abc own f")
    length = len(setup.tokenizer.encode("abc own f"))
    text, ids, last = setup.run(stop=("own fox",), max_tokens=length)
    assert (text, len(ids), last.reason) == ("abc own f", length, "length")


def test_text_and_tokens_of_every_character(make: Make) -> None:
    words = "    . 👨‍👩‍👧‍👦 🇫🇷 赋 สวัสดี\n\n\tit 's"
    setup = make(words + "<|im_end|>")
    text, ids, _ = setup.run()
    assert text == words == setup.tokenizer.decode(ids)


def test_a_character_cut_by_the_limit_gives_one_replacement(make: Make) -> None:
    text, ids, last = make("😀").run(max_tokens=1)
    assert (text, len(ids), last.reason) == ("\ufffd", 1, "length")


def test_max_tokens_are_exact_and_clamped_to_the_context(make: Make) -> None:
    setup = make([65], context_length=32)
    assert len(setup.run(max_tokens=3)[1]) == 3
    for max_tokens in (None, 10**12):
        _, ids, last = setup.run(max_tokens=max_tokens)
        assert (len(ids), last.reason) == (32 - len(PROMPT), "length")
    assert setup.runner.decode_calls[-1][1] == (30,)  # the last token needs no place


def test_ignore_eos_goes_on_and_counts_end_tokens(make: Make) -> None:
    text, ids, last = make([65, IM_END]).run(ignore_eos=True, max_tokens=5)
    assert ids == [65, IM_END, IM_END, IM_END, IM_END]
    assert text == make("").tokenizer.decode([65])
    assert (last.reason, last.usage.completion_tokens) == ("length", 5)


def test_min_tokens_puts_off_the_end(make: Make) -> None:
    _, ids, last = make([IM_END]).run(min_tokens=3)
    assert (len(ids), last.reason) == (3, "stop")
    assert IM_END not in ids


def test_ids_without_a_token_are_not_produced(make: Make) -> None:
    setup = make([500, 65, IM_END])
    _, ids, _ = setup.run()
    assert max(ids) < setup.tokenizer.num_tokens


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("index", [0, 2])
def test_unusable_logits_fail_the_request_alone(make: Make, value: Any, index: int) -> None:
    setup = make([65, 66, 67, IM_END], faults={index: value})
    _, ids, last = outcome(list(setup.engine.generate(GenerationRequest(PROMPT))))
    assert ids == [65, 66, 67][:index]
    assert isinstance(last, Failed)
    assert isinstance(last.error, NumericalError)
    setup.runner.faults.clear()
    assert setup.run()[1] == [65, 66, 67]


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("fault", [EngineError("broken"), ZeroDivisionError("surprise")])
def test_a_failing_runner_fails_the_request_alone(
    make: Make, caplog: pytest.LogCaptureFixture, fault: Exception, index: int
) -> None:
    setup = make([65, 66, 67, IM_END], faults={index: fault})
    last = list(setup.engine.generate(GenerationRequest(PROMPT, request_id="r1")))[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, EngineError)
    assert str(fault) in str(last.error)
    unexpected = not isinstance(fault, EngineError)
    assert ("Traceback" in caplog.text and "r1" in caplog.text) == unexpected
    setup.runner.faults.clear()
    _, ids, finished = setup.run()
    assert ids == [65, 66, 67]
    # The failed call's tokens are not trusted: of a failed prefill nothing, of a failed decode the prompt.
    assert finished.usage.cached_tokens == (0 if index == 0 else len(PROMPT) - 2)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"prompt_ids": ()}, InvalidRequestError, "prompt"),
        ({"prompt_ids": (1, -1)}, InvalidRequestError, "prompt"),
        ({"prompt_ids": (1, 512)}, InvalidRequestError, "prompt"),
        ({"prompt_ids": (1,) * 128}, ContextLengthError, "messages"),
        ({"prompt_ids": (1,), "max_tokens": 0}, InvalidRequestError, "max_tokens"),
        ({"prompt_ids": (1,), "stop": ("x" * 20_000,)}, InvalidRequestError, "stop"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_queued(
    make: Make, fields: dict[str, Any], error: type[InvalidRequestError], param: str
) -> None:
    setup = make("x")
    for call in (setup.engine.generate, lambda request: setup.engine.submit(request, Inbox())):
        with pytest.raises(error) as caught:
            call(GenerationRequest(**fields))
        assert caught.value.param == param
    assert not setup.runner.prefill_calls
    assert setup.run((1,) * 127)[1] != []


def test_prompts_run_in_chunks(make: Make) -> None:
    setup = make([65, IM_END], prefill_chunk=4)
    assert setup.run()[1] == [65]
    assert [(len(ids), start) for _, ids, start in setup.runner.prefill_calls] == [(4, 0), (4, 4), (2, 8)]


@pytest.mark.parametrize("chunk", [2, 3, 5, 9, 10])
@pytest.mark.parametrize("first", [(1,), PROMPT, PROMPT[:-1], PROMPT[:-2]])
def test_no_chunk_is_a_single_token(make: Make, chunk: int, first: tuple[int, ...]) -> None:
    """It would take another attention kernel, and int8 rounding would make the difference visible."""
    setup = make([65, IM_END], prefill_chunk=chunk)
    setup.run(first)
    setup.runner.prefill_calls.clear()
    setup.run(PROMPT)
    calls = setup.runner.prefill_calls
    assert min(len(ids) for _, ids, _ in calls) >= 2
    assert [token for _, ids, _ in calls for token in ids] == list(PROMPT[calls[0][2] :])


@pytest.mark.parametrize("chunk", [3, 256])
def test_reusing_a_prefix_changes_nothing_but_the_work(make: Make, chunk: int) -> None:
    def script(prompt: tuple[int, ...]) -> list[int]:
        return [sum(prompt) % 300, len(prompt), prompt[0], prompt[-1], IM_END]

    setup = make(script, prefill_chunk=chunk)
    reuse = []
    for prompt in (PROMPT, PROMPT, (*PROMPT, 77), PROMPT[:-1], (9, *PROMPT[1:]), PROMPT):
        fresh = make(script, prefill_chunk=chunk)
        text, ids, last = setup.run(prompt)
        expected_text, expected_ids, expected_last = fresh.run(prompt)
        assert (text, ids, last.reason) == (expected_text, expected_ids, expected_last.reason)
        assert expected_last.usage.cached_tokens == 0
        reuse.append(last.usage.cached_tokens)
    assert reuse == [0, 8, 9, 7, 0, 0]


def test_the_next_turn_reuses_the_answer_too(make: Make) -> None:
    setup = make([65, 66, IM_END])
    setup.run()
    # The last token's keys and values were computed when the end token was sampled after it.
    assert setup.run((*PROMPT, 65, 66, 7, 8))[2].usage.cached_tokens == len(PROMPT) + 2


def test_equal_seeds_give_equal_text_whatever_ran_before(make: Make) -> None:
    setup = make([65])
    sampling = SamplingParams(temperature=8.0, seed=5)
    first = setup.run(sampling=sampling, max_tokens=20)
    setup.run(sampling=SamplingParams(temperature=8.0), max_tokens=7)
    assert setup.run(sampling=sampling, max_tokens=20)[:2] == first[:2]
    assert setup.run(sampling=SamplingParams(temperature=8.0, seed=6), max_tokens=20)[1] != first[1]


def test_requests_wait_in_order_and_the_queue_is_bounded(make: Make) -> None:
    setup = make([65, IM_END], max_queue=2)
    with held(setup.runner):
        _, first = setup.submit((1,))
        assert setup.runner.entered.wait(20)
        waiting = [setup.submit((n,))[1] for n in (2, 3)]
        assert (setup.engine.num_running, setup.engine.num_waiting) == (1, 2)
        with pytest.raises(QueueFullError) as caught:
            setup.submit((4,))
        assert caught.value.retry_after > 0
    for inbox in (first, *waiting):
        assert isinstance(inbox.wait(), Finished)
    assert [ids for _, ids, _ in setup.runner.prefill_calls] == [(1,), (2,), (3,)]
    assert setup.run((5,))[1] == [65]


def test_cancelling_a_prefill_interrupts_it_and_keeps_what_was_computed(make: Make) -> None:
    setup = make([65, IM_END], prefill_chunk=4)
    ticket, warm_up = setup.submit(PROMPT[:4])
    warm_up.wait()
    ticket.cancel()  # has ended: nothing happens
    setup.runner.hold()
    ticket, inbox = setup.submit()
    assert setup.runner.entered.wait(20)
    ticket.cancel()
    ticket.cancel()
    last = inbox.wait()  # although the runner is still held
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    setup.runner.release()
    _, ids, finished = setup.run()
    assert (ids, finished.usage.cached_tokens) == ([65], 4)


def test_cancelling_between_chunks_runs_no_further_chunk(make: Make) -> None:
    setup = make([65, IM_END], prefill_chunk=4)
    with held(setup.runner):
        _, inbox = setup.submit()
        assert setup.runner.entered.wait(20)
        setup.engine._scheduler._prefilling[0].cancel_requested = True  # without the interruption
    assert isinstance(inbox.wait(), Finished)
    assert len(setup.runner.prefill_calls) == 1


def test_cancelling_while_decoding_ends_after_the_step(make: Make) -> None:
    setup = make([65])
    ticket, inbox = setup.submit(max_tokens=100)
    assert inbox.first_delta.wait(20)
    with held(setup.runner):
        ticket.cancel()
        seen = len(inbox.events)
    last = inbox.wait()
    assert isinstance(last, Finished)
    if last.reason == "cancelled":  # else it was done before
        assert len(inbox.events) <= seen + 2
        assert last.usage.completion_tokens == len(inbox.events) - 1


def test_cancelled_ones_leave_the_others_alone(make: Make) -> None:
    setup = make([65, 66, 67, IM_END])
    solo = setup.run()[:2]
    for _ in range(20):
        with held(setup.runner):
            _, running = setup.submit()
            assert setup.runner.entered.wait(20)
            ticket, waiting = setup.submit((1, 2, 3))
            _, third = setup.submit()
            ticket.cancel()
            assert setup.engine.num_waiting == 1
        assert isinstance(waiting.wait(), Finished)
        assert outcome(waiting.events)[:2] == ("", [])
        for inbox in (running, third):
            inbox.wait()
            assert outcome(inbox.events)[:2] == solo
    assert not any(ids[:2] == (1, 2) for _, ids, _ in setup.runner.prefill_calls)
    assert (setup.engine.num_running, setup.engine.num_waiting) == (0, 0)


@pytest.mark.parametrize("at", [0, 2])
def test_a_raising_sink_cancels_its_request_and_is_left_alone(
    make: Make, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    setup = make([65])
    calls: list[Event] = []

    def sink(event: Event) -> None:
        calls.append(event)
        if len(calls) > at:
            raise RuntimeError("Event loop is closed")

    setup.engine.submit(GenerationRequest(PROMPT, request_id="r7"), sink)
    assert setup.run((1, 2), max_tokens=2)[1] == [65, 65]
    assert len(calls) == at + 1
    assert "r7" in caplog.text


def test_close_ends_running_and_waiting_requests(make: Make) -> None:
    setup = make([65])
    setup.runner.hold()
    _, running = setup.submit()
    assert setup.runner.entered.wait(20)
    _, waiting = setup.submit()
    setup.engine.close(20)
    setup.engine.close(20)
    assert not setup.engine.is_alive
    last = running.wait()
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    failed = waiting.wait()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, UnavailableError)
    with pytest.raises(UnavailableError):
        setup.submit()
    with pytest.raises(UnavailableError):
        setup.engine.start()


def test_closing_an_engine_that_never_started_answers_those_who_wait(make: Make) -> None:
    setup = make([65], started=False)
    _, waiting = setup.submit()
    ticket, cancelled = setup.submit()
    ticket.cancel()
    setup.engine.close()
    assert isinstance(waiting.wait(), Failed)
    assert isinstance(cancelled.wait(), Finished)


def test_requests_before_the_start_are_served_after_it(make: Make) -> None:
    setup = make([65, IM_END], started=False)
    _, inbox = setup.submit()
    setup.engine.start()
    setup.engine.start()
    assert isinstance(inbox.wait(), Finished)


def test_close_from_a_sink_does_not_wait_for_itself(make: Make) -> None:
    setup = make([65])
    inbox = Inbox()

    def sink(event: Event) -> None:
        inbox(event)
        setup.engine.close()

    setup.engine.submit(GenerationRequest(PROMPT), sink)
    last = inbox.wait()
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"


def test_a_fault_of_the_engine_itself_leaves_nobody_waiting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    setup = make([65])
    monkeypatch.setattr(setup.engine._scheduler, "schedule", lambda: 1 / 0)
    _, inbox = setup.submit()
    assert isinstance(inbox.wait(), Failed)
    with pytest.raises(UnavailableError):
        setup.submit()
    setup.engine.close(20)
    assert [hook.exc_type for hook in caught] == [ZeroDivisionError]


def test_a_request_whose_time_is_over_fails_and_the_next_is_served(make: Make) -> None:
    setup = make([65])
    with held(setup.runner):
        _, late = setup.submit(timeout=0.01)
        _, waiting = setup.submit(timeout=0.01)
        assert setup.runner.entered.wait(20)
        threading.Event().wait(0.02)
    for inbox in (late, waiting):
        last = inbox.wait()
        assert isinstance(last, Failed)
        assert isinstance(last.error, DeadlineError)
        assert "0.01 seconds are over" in str(last.error)
    assert setup.run(max_tokens=2, timeout=1000.0)[1] == [65, 65]
    assert (setup.engine.num_running, setup.engine.num_waiting) == (0, 0)


def test_the_engines_time_limit_holds_for_requests_without_their_own(make: Make) -> None:
    setup = make([65], timeout=1e-9)
    assert isinstance(outcome(list(setup.engine.generate(GenerationRequest(PROMPT))))[2], Failed)
    setup.run(max_tokens=1, timeout=1000.0)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_time_limit_must_be_positive(make: Make, timeout: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout must be more than 0"):
        make([65]).submit(timeout=timeout)


def test_a_higher_priority_is_served_first(make: Make) -> None:
    setup = make([65], max_running=1)
    with held(setup.runner):
        setup.submit(max_tokens=1)
        assert setup.runner.entered.wait(20)
        inboxes = [setup.submit((n,) * 5, max_tokens=1, priority=p)[1] for n, p in ((1, 0), (2, 0), (3, 7))]
    for inbox in inboxes:
        inbox.wait()
    assert [ids[0] for _, ids, _ in setup.runner.prefill_calls[1:]] == [3, 1, 2]
