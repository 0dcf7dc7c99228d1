from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing

import pytest
from scripted import ScriptedRunner
from tiny import special_ids

from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Event, Finished, GenerationRequest
from qwenonnx.errors import InvalidRequestError
from qwenonnx.text.tokenizer import Tokenizer

REQUEST = GenerationRequest((1, 2, 3))
END = special_ids()["<|im_end|>"]


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner([65, 66, 67, END], vocab_size=512)


@pytest.fixture
def engine(runner: ScriptedRunner, tiny_tokenizer: Tokenizer) -> Iterator[Engine]:
    engine = Engine(runner, tiny_tokenizer)
    engine.start()
    yield engine
    runner.release()
    engine.close(20)


def tokens(events: list[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]


def wait_until_idle(engine: Engine) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if not (engine.num_running or engine.num_waiting):
            return
        pause.wait(0.005)
    pytest.fail("the request still runs")


def test_iterating_yields_all_events_once(engine: Engine) -> None:
    stream = engine.generate(REQUEST)
    events = list(stream)
    assert tokens(events) == [65, 66, 67]
    assert isinstance(events[-1], Finished)
    assert list(stream) == []
    stream.close()


def use_close(engine: Engine) -> None:
    stream = engine.generate(REQUEST)
    stream.close()
    assert list(stream) == []


def use_with(engine: Engine) -> None:
    with engine.generate(REQUEST):
        pass


def use_reference(engine: Engine) -> None:
    stream = engine.generate(REQUEST)
    del stream
    gc.collect()


@pytest.mark.parametrize("use", [use_close, use_with, use_reference])
def test_leaving_a_stream_cancels_the_request(
    engine: Engine, runner: ScriptedRunner, use: Callable[[Engine], None]
) -> None:
    runner.hold()
    use(engine)
    wait_until_idle(engine)
    runner.release()
    assert tokens(list(engine.generate(REQUEST))) == [65, 66, 67]


def test_async_iteration_yields_all_events(engine: Engine) -> None:
    async def main() -> list[Event]:
        async with aclosing(engine.stream(REQUEST)) as stream:
            events = [event async for event in stream]
            assert [event async for event in stream] == []
            return events

    events = asyncio.run(main())
    assert tokens(events) == [65, 66, 67]
    assert isinstance(events[-1], Finished)


def test_bad_requests_are_refused_at_the_call(engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequestError):
            engine.stream(GenerationRequest(()))

    asyncio.run(main())


async def use_aclose(engine: Engine) -> None:
    stream = engine.stream(REQUEST)
    await stream.aclose()
    assert [event async for event in stream] == []


async def use_async_with(engine: Engine) -> None:
    async with engine.stream(REQUEST):
        pass


async def use_cancelled_task(engine: Engine) -> None:
    stream = engine.stream(REQUEST)

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(wait_until_idle, engine)


async def use_lost_reference(engine: Engine) -> None:
    stream = engine.stream(REQUEST)
    del stream
    gc.collect()


@pytest.mark.parametrize("use", [use_aclose, use_async_with, use_cancelled_task, use_lost_reference])
def test_leaving_an_async_stream_cancels_the_request(
    engine: Engine, runner: ScriptedRunner, use: Callable[[Engine], Awaitable[None]]
) -> None:
    async def main() -> None:
        await use(engine)

    runner.hold()
    asyncio.run(main())
    wait_until_idle(engine)
    runner.release()
    assert tokens(list(engine.generate(REQUEST))) == [65, 66, 67]


def test_waiting_for_a_while_leaves_the_request_alone(engine: Engine, runner: ScriptedRunner) -> None:
    async def main() -> list[Event]:
        runner.hold()
        stream = engine.stream(REQUEST)
        assert await stream.next_within(0.01) is None
        assert await stream.next_within(0.01) is None
        runner.release()
        first = await stream.next_within(20)
        assert first is not None
        events = [first, *[event async for event in stream]]
        with pytest.raises(StopAsyncIteration):
            await stream.next_within(1)
        return events

    assert tokens(asyncio.run(main())) == [65, 66, 67]


def test_a_closed_event_loop_takes_only_its_own_request_along(engine: Engine, runner: ScriptedRunner) -> None:
    runner.hold()

    async def main() -> None:
        main.stream = engine.stream(REQUEST)  # type: ignore[attr-defined]

    asyncio.run(main())
    runner.release()
    wait_until_idle(engine)
    assert tokens(list(engine.generate(REQUEST))) == [65, 66, 67]
