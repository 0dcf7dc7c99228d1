"""How many connections are open, and how long one may stay without a request.

The server has one descriptor for each connection, and the system gives it only so many. A listener that runs out of
them cannot accept anybody, so idle connections give way to new ones before that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import time
import weakref
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from qwenonnx.server.malformed import malformed_response

logger = logging.getLogger("qwenonnx.server")

# Descriptors for what is no connection: files of the model being loaded, pipes of libraries, a log.
_RESERVED = 32
_FEWEST = 8
_MOST_DESCRIPTORS = 1 << 16
_SECONDS_BETWEEN_LINES = 10.0


def connection_limit(wanted: int) -> int:
    """Raises the process's soft limit of descriptors, and returns how many connections fit, at most `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    best = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < best:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
            soft = best
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(_FEWEST, min(wanted, soft - _open_descriptors() - _RESERVED))


def _open_descriptors() -> int:
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        return _RESERVED


class Listener(socket.socket):
    """A listening socket that never has more than `limit` connections open.

    At the limit, the connection that has been idle longest is closed to make room; where all are at work, the new
    one is closed. asyncio accepts from it as from any other non-blocking socket.
    """

    def __init__(self, family: int, limit: int) -> None:
        # Named TCP, because asyncio switches Nagle's algorithm off (40 ms an answer) only where it sees that.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.limit = limit
        self._open: weakref.WeakSet[_Accepted] = weakref.WeakSet()
        self._known: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._turned_away = 0
        self._silent_until = 0.0

    @property
    def num_open(self) -> int:
        """Connections that are open, those included that asyncio has not yet taken over."""
        return len(self._open)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection.

        Raises:
            BlockingIOError: there is none, or room is being made for it.
        """
        if self.num_open >= self.limit and (self.num_open > len(self._known) or self._make_room()):
            # In the next round of the event loop, which comes back here, asyncio has taken over what was accepted, so
            # that it is known whether it is idle; and what was closed to make room is gone.
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._turn_away()
            raise BlockingIOError from error
        if self.num_open >= self.limit:
            connection.close()
            self._note()
            raise BlockingIOError
        accepted = _Accepted(connection.family, connection.type, connection.proto, fileno=connection.detach())
        accepted.closed_in(self._open)
        return accepted, address

    def close(self) -> None:
        """Stops listening."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()

    def add(self, connection: Connection) -> None:
        """Notes that a connection has been taken over."""
        self._known.add(connection)

    def remove(self, connection: Connection) -> None:
        """Notes that a connection is closed."""
        self._known.discard(connection)
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection, idle: bool) -> None:
        """Notes whether a connection waits for a request, and since when."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection not in self._idle:
            self._idle[connection] = None

    def _make_room(self) -> bool:
        """Closes the connection that has been idle longest; False where there is none."""
        # Where an answer is still on its way, the client is not done.
        connection = next((each for each in self._idle if not each.transport.get_write_buffer_size()), None)
        if connection is None:
            return False
        del self._idle[connection]
        connection.transport.abort()
        self._note()
        return True

    def _turn_away(self) -> None:
        """Closes the next connection with the descriptor kept for that, since others have used up all the rest."""
        self._make_room()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        self._note()

    def _note(self) -> None:
        self._turned_away += 1
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _SECONDS_BETWEEN_LINES
            logger.warning(
                "%d connections are open, which is the limit; idle ones are closed for new ones (%d closed since this "
                "was last said)",
                self.limit,
                self._turned_away,
            )
            self._turned_away = 0


class _Accepted(socket.socket):
    """A connection that is counted until it is closed."""

    _counted: weakref.WeakSet[_Accepted] | None = None

    def closed_in(self, counted: weakref.WeakSet[_Accepted]) -> None:
        counted.add(self)
        self._counted = counted

    def close(self) -> None:
        if self._counted is not None:
            self._counted.discard(self)
            self._counted = None
        super().close()


class Connection(H11Protocol):
    """uvicorn's protocol with a deadline for the head of a request, and with nothing logged that a client can cause."""

    listener: Listener
    header_timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.listener.add(self)
        self._update()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        super().on_response_complete()
        self.listener.set_idle(self, self._is_waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.listener.remove(self)
        self._cancel_deadline()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Closes the connection even where the client does not take the rest of the answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP with an error object, as everything else that is wrong."""
        try:
            for event in malformed_response():
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is on its way already
        self.transport.close()

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is at work."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, whatever its type says
        return (cycle is None or cycle.response_complete) and not self.transport.is_closing()

    def _update(self) -> None:
        """After something has arrived: a request is now at work, or its head must be whole before long."""
        waiting = self._is_waiting
        self.listener.set_idle(self, waiting)
        if not waiting:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._is_waiting:
            self.timeout_keep_alive_handler()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a request to upgrade may be ignored, and the request itself is answered."""


def connection_class(accepting: Listener, timeout: float) -> type[Connection]:
    """The protocol of the connections that a listener accepts; uvicorn wants a class."""

    class ListenersConnection(Connection):
        listener = accepting
        header_timeout = timeout

    return ListenersConnection
