"""The state of the server: loading, serving, stopping, and the requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Literal

from starlette.requests import Request

from qwenonnx.engine.request import GenerationRequest
from qwenonnx.errors import QwenonnxError, UnavailableError
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.errors import HttpError
from qwenonnx.server.generation import Generation
from qwenonnx.server.jsonbody import read_body
from qwenonnx.server.served import Served

logger = logging.getLogger("qwenonnx.server")

Status = Literal["loading", "ok", "failed", "stopping"]


class Service:
    """One per app. Apart from the loading thread, everything happens on the event loop.

    `on_ready` is called once, when the model is served, and `on_failure` once, when `load` has raised.
    """

    def __init__(self, load: Callable[[], Served], config: ServeConfig) -> None:
        self.config = config
        self.on_ready: Callable[[Served], None] | None = None
        self.on_failure: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self._load = load
        self._served: Served | None = None
        self._stopping = False
        self._closed = False
        self._loader: threading.Thread | None = None
        self._generations: set[Generation] = set()
        self._uploads: set[asyncio.Timeout] = set()

    @property
    def status(self) -> Status:
        """What /health reports."""
        if self.failure is not None:
            return "failed"
        if self._stopping:
            return "stopping"
        return "loading" if self._served is None else "ok"

    @property
    def served(self) -> Served:
        """The loaded model.

        Raises:
            UnavailableError: it is still loading, failed to load, or the server is stopping.
        """
        if self.failure is not None:
            raise UnavailableError("The model could not be loaded; see the server's log.")
        if self._stopping:
            raise UnavailableError("The server is shutting down; send the request to another one, or again later.")
        if self._served is None:
            raise UnavailableError("The model is still loading; send the request again in a moment.")
        return self._served

    @property
    def in_flight(self) -> int:
        """Requests that have been admitted and not been answered yet."""
        return len(self._generations)

    @property
    def is_loading(self) -> bool:
        """Whether the loading thread is at work, which nothing can interrupt."""
        return self._loader is not None and self._loader.is_alive()

    def start(self) -> None:
        """Starts loading in a thread of its own, so that /health can answer meanwhile."""
        loop = asyncio.get_running_loop()
        # A daemon: a load in progress must not keep the process from leaving.
        self._loader = threading.Thread(target=self._run_load, args=(loop,), name="qwenonnx-load", daemon=True)
        self._loader.start()

    def open(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Hands the choices of one HTTP request to the engine; use the result as a context manager.

        Raises:
            QwenonnxError: it is refused (not serving, queue full, too long, invalid).
        """
        generation = Generation(self.served.engine, requests, self._generations.discard)
        self._generations.add(generation)
        return generation

    async def read_body(self, request: Request) -> bytes:
        """The body of a request within the configured limits of size and time.

        Raises:
            HttpError: a limit is exceeded (413, 408), or the body is not plain JSON by its headers (415).
            UnavailableError: the server stopped while the body was still arriving.
            ClientDisconnectedError: the client went away.
        """
        try:
            async with asyncio.timeout(self.config.body_timeout) as timeout:
                with self._upload(timeout):
                    return await read_body(request, self.config.max_body)
        except TimeoutError:
            if self._stopping:
                raise UnavailableError("The server is shutting down.") from None
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body did not arrive within {self.config.body_timeout:g} seconds.",
                close=True,
            ) from None

    def drain(self) -> None:
        """Takes no further requests; those in flight go on."""
        self._stopping = True

    def stop(self) -> None:
        """Ends the requests in flight with an error."""
        self.drain()
        for generation in tuple(self._generations):
            generation.abort(UnavailableError("The server is shutting down, so the answer was cut short."))
        now = asyncio.get_running_loop().time()
        for timeout in tuple(self._uploads):
            with contextlib.suppress(RuntimeError):  # it has expired just now
                timeout.reschedule(now)

    async def close(self) -> None:
        """Stops, and closes the engine. A load in progress is left behind; its engine is closed when done."""
        self.stop()
        self._closed = True
        if self._served is not None:
            await asyncio.to_thread(self._served.engine.close)

    @contextlib.contextmanager
    def _upload(self, timeout: asyncio.Timeout) -> Iterator[None]:
        self._uploads.add(timeout)
        try:
            yield
        finally:
            self._uploads.discard(timeout)

    def _run_load(self, loop: asyncio.AbstractEventLoop) -> None:
        # RuntimeError: the loop is closed because the server has stopped meanwhile.
        try:
            served = self._load()
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_failed, error)
            return
        try:
            loop.call_soon_threadsafe(self._on_loaded, served)
        except RuntimeError:
            served.engine.close()

    def _on_loaded(self, served: Served) -> None:
        if self._closed:
            served.engine.close()
            return
        served.engine.start()
        self._served = served
        if self.on_ready is not None:
            self.on_ready(served)

    def _on_failed(self, error: BaseException) -> None:
        self.failure = error
        expected = isinstance(error, QwenonnxError)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        debug = logger.isEnabledFor(logging.DEBUG)
        logger.error("The model could not be loaded: %s", text, exc_info=error if debug else None)
        if self.on_failure is not None:
            self.on_failure()
