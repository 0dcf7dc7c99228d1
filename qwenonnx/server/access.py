"""Who may send requests, and how many."""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from qwenonnx.errors import AuthenticationError, UsageError
from qwenonnx.server.errors import RateLimitedError, error_response

# What a browser or a load balancer asks for without a key; none of it tells anything about requests.
OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json"})
OPEN_FOLDER = "/page/"

# Clients that are remembered; the one heard of longest ago is forgotten first.
_MOST_CLIENTS = 10_000


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that start with # are comments. No file: no keys.

    Raises:
        UsageError: the file cannot be read, is no UTF-8, or holds no key.
    """
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"The file of API keys {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UsageError(f"The file of API keys {path} is not UTF-8; write one key a line.") from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        # Serving without keys must not be what a forgotten line leads to.
        raise UsageError(f"The file of API keys {path} holds no key; write one a line, or leave the option out.")
    return keys


class ApiKeys:
    """Asks for a bearer token everywhere but at the open paths."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] != "http" or _is_open(scope["path"]) or self._allows(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.")
        await error_response(error)(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = _bearer_token(scope)
        # Every key is compared, each in constant time, so that the time taken tells nothing.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


class RateLimit:
    """Lets each client send so many POST requests a minute: at once if it likes, and then as time gives them back.

    A client is an API key where there are keys, else an address. It must stand behind the check of the keys.
    """

    def __init__(
        self, app: ASGIApp, *, per_minute: int, by_key: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._per_minute = per_minute
        self._by_key = by_key
        self._clock = clock
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # requests left, and as of when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] == "http" and scope["method"] == "POST" and (wait := self._take(scope)) > 0:
            error = RateLimitedError(
                f"The limit of {self._per_minute} requests a minute is reached; try again in {wait:.1f} seconds.",
                retry_after=wait,
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _take(self, scope: Scope) -> float:
        """Counts one request; returns 0, or the seconds until there is room for it."""
        client = _bearer_token(scope) if self._by_key else (scope.get("client") or ("",))[0].encode()
        now, rate = self._clock(), self._per_minute / 60
        left, since = self._buckets.pop(client, (float(self._per_minute), now))
        left = min(left + (now - since) * rate, float(self._per_minute))
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / rate


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _bearer_token(scope: Scope) -> bytes:
    given = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            given = token.strip() if scheme.lower() == b"bearer" else b""
    return given
