"""A request's events as iterators, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import queue
from types import TracebackType
from typing import Protocol, Self

from qwenonnx.engine.request import Event, Failed, Finished


class Cancellable(Protocol):
    """A submitted request, as far as its reader is concerned."""

    def cancel(self) -> None:
        """Ends the request; does nothing to one that has ended."""


class EventStream:
    """Blocking iterator over the events of one request, `Finished` or `Failed` last.

    `close`, leaving it as a context manager, an exception while waiting (such as Ctrl-C) and losing the last
    reference cancel the request unless it has ended.
    """

    def __init__(self, events: queue.SimpleQueue[Event], request: Cancellable) -> None:
        self._events = events
        self._request = request
        self._done = False

    def close(self) -> None:
        """Cancels the request unless it has ended; iteration is over."""
        if not self._done:
            self._done = True
            self._request.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._done:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:
            self.close()
            raise
        self._done = isinstance(event, Finished | Failed)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncEventStream:
    """Asynchronous iterator over the events of one request, `Finished` or `Failed` last.

    `aclose`, leaving it as a context manager, cancelling the task that waits in it, and losing the last
    reference cancel the request unless it has ended.
    """

    def __init__(self, events: asyncio.Queue[Event], request: Cancellable) -> None:
        self._events = events
        self._request = request
        self._done = False

    async def next_within(self, seconds: float) -> Event | None:
        """The next event, or None when none comes in time; the request goes on then.

        This is for keep-alive messages: `asyncio.wait_for` around `anext` would cancel the request.

        Raises:
            StopAsyncIteration: the last event was delivered before.
        """
        if self._done:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(seconds):
                event = await self._events.get()
        except TimeoutError:
            return None
        except BaseException:
            self._cancel()
            raise
        self._done = isinstance(event, Finished | Failed)
        return event

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; iteration is over."""
        self._cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._done:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except BaseException:
            self._cancel()
            raise
        self._done = isinstance(event, Finished | Failed)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if not self._done:
            self._done = True
            self._request.cancel()

    def __del__(self) -> None:
        self._cancel()
