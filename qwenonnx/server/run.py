"""Running the server as a process: socket, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from qwenonnx.errors import QwenonnxError, UsageError
from qwenonnx.server.app import create_app
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.connections import Listener, connection_class, connection_limit
from qwenonnx.server.served import Served
from qwenonnx.server.service import Service

logger = logging.getLogger("qwenonnx.server")

# Connections of well-behaved clients stay open between requests longer than those of proxies in front (60 s).
_KEEP_ALIVE_SECONDS = 75

# What ending streams, closing the engine and leaving may take after the grace period.
_MARGIN_SECONDS = 1.5


def serve(load: Callable[[], Served], config: ServeConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code: 0, or 1 when the model could not be loaded.

    After the first signal no connection is accepted, requests in flight have `config.grace` seconds to
    finish, and those that do not are ended with an error. What hangs even then is cut off `_MARGIN_SECONDS`
    later. A load in progress is not waited for. A second signal ends the process at once. All of these exit
    with 0.

    Raises:
        QwenonnxError: the address cannot be listened on; the text says why.
    """
    with _logging(config), listen(config.host, config.port, config.max_connections) as listener:
        app = create_app(load, config)
        service: Service = app.state.service
        server = _Server(
            uvicorn.Config(
                app,
                http=connection_class(listener, config.header_timeout),
                loop="asyncio",  # the one that accepts through the listener's own method
                lifespan="on",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="error",  # its warnings are about what clients send
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(config.grace + _MARGIN_SECONDS),
            ),
            service,
        )
        address = _url(listener)

        def announce(served: Served) -> None:
            context = served.context_length
            for line in served.summary:
                logger.info("%s", line)
            for line in served.warnings:
                logger.warning("%s", line)
            logger.info("Ready: serving %s at %s/v1 (context %s tokens)", served.model_name, address, f"{context:,}")

        service.on_ready = announce
        service.on_failure = server.leave
        logger.info("Listening on %s, loading the model", address)
        server.run(sockets=[listener])
        server.disarm()
        if service.failure is not None:
            return 1
        logger.info("Stopped")
        if service.is_loading:
            # A thread inside native code cannot be ended, and finalizing the interpreter around it may crash.
            os._exit(0)
        return 0


class _Server(uvicorn.Server):
    """uvicorn with a bounded shutdown that tells streams, and exit code 0 after a signal."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._watchdog: threading.Timer | None = None

    def leave(self) -> None:
        """Shuts down as after a signal."""
        self.should_exit = True

    def disarm(self) -> None:
        """Takes back the promise to end the process."""
        if self._watchdog is not None:
            self._watchdog.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: shut down. Second: end."""
        # Unlike uvicorn's handler, this does not have the signal raised again in the end: the exit code is 0.
        if self.should_exit:
            os._exit(0)
        self.should_exit = True
        self._watchdog = threading.Timer(self._service.config.grace + _MARGIN_SECONDS, os._exit, (0,))
        self._watchdog.daemon = True
        self._watchdog.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for the requests in flight, but not longer than the grace period."""
        grace, service = self._service.config.grace, self._service
        service.drain()
        if service.in_flight:
            logger.info("Shutting down; %d requests have %g seconds to finish", service.in_flight, grace)
        else:
            logger.info("Shutting down")
        timer = asyncio.get_running_loop().call_later(grace, service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


@contextlib.contextmanager
def listen(host: str, port: int, max_connections: int) -> Iterator[Listener]:
    """A listening TCP socket, closed in the end; port 0 takes a free one.

    It has at most `max_connections` open, fewer where the process may not have so many descriptors.

    Raises:
        QwenonnxError: the port is taken or may not be used.
        UsageError: the host is no address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        raise UsageError(f"The host {host!r} has no address; use 127.0.0.1 or 0.0.0.0.") from None
    with Listener(family, connection_limit(max_connections)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise QwenonnxError(_bind_message(host, port, error)) from None
        yield listener


def _bind_message(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"Port {port} on {host} is in use by another program; stop that one or choose another port."
        case errno.EACCES:
            return f"Port {port} on {host} needs privileges; choose a port above 1023."
        case errno.EADDRNOTAVAIL:
            return f"The address {host} does not belong to this machine; use 127.0.0.1 or 0.0.0.0."
        case _:
            return f"Port {port} on {host} cannot be listened on: {error.strerror}."


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _logging(config: ServeConfig) -> Iterator[None]:
    """Lets the product's log go to stderr, unless whoever called has set up handlers."""
    root = logging.getLogger("qwenonnx")
    before = root.level
    root.setLevel(config.log_level.upper())
    handler = None
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(before)
        if handler is not None:
            root.removeHandler(handler)
