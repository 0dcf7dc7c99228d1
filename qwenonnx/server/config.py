"""How the HTTP server is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qwenonnx.errors import UsageError

LogLevel = Literal["debug", "info", "warning", "error"]

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of the server; all checks happen on construction.

    `temperature`, `top_p`, `top_k` and `repetition_penalty` are defaults for requests that do not say;
    `None` leaves them to the package's generation_config.

    Raises:
        UsageError: an option is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    log_level: LogLevel = "info"
    grace: float = 10.0
    """Seconds that running requests get to finish after SIGTERM."""
    keepalive: float = 15.0
    """Seconds of silence after which a stream carries a comment, so that proxies do not give up on it."""
    max_body: int = 8 * MIB
    """Largest request body in bytes."""
    body_timeout: float = 30.0
    """Seconds in which a request body must have arrived."""
    header_timeout: float = 20.0
    """Seconds in which the head of a request must have arrived on a new connection, or once its first byte has."""
    max_connections: int = 1024
    """Connections open at once, if the system allows so many; beyond them idle ones are closed."""
    max_messages: int = 2048
    """Most messages in one request."""
    requests_per_minute: int | None = None
    """POST requests that one key, or without keys one client address, may send a minute; None sets no limit."""
    last_turns: int | None = None
    """Turns that conversations are cut to, unless a request says otherwise; None refuses those that are too long."""
    max_tokens_default: int | None = None
    """Tokens of an answer where the request sets no limit; None: chat goes to the end of the context, others get 16."""
    api_keys: tuple[str, ...] = ()
    """Accepted bearer tokens; none means that no key is needed."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server; none switches CORS off."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        _check("port", self.port, 0, 65535)
        _check("grace", self.grace, 0, 3600)
        _check("keepalive", self.keepalive, 0.001, 3600)
        _check("max_body", self.max_body, 1, 1024 * MIB)
        _check("body_timeout", self.body_timeout, 0.001, 3600)
        _check("header_timeout", self.header_timeout, 0.001, 3600)
        _check("max_connections", self.max_connections, 1, 1 << 16)
        _check("max_messages", self.max_messages, 1, 1 << 20)
        _check("requests_per_minute", self.requests_per_minute, 1, 1_000_000)
        _check("last_turns", self.last_turns, 1, 1_000_000)
        _check("max_tokens_default", self.max_tokens_default, 1, 2**31 - 1)
        _check("temperature", self.temperature, 0, 2)
        _check("top_p", self.top_p, 0, 1)
        _check("top_k", self.top_k, -1, 2**31 - 1)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 10)
        if not self.host:
            raise UsageError("host is empty; use 127.0.0.1 for this machine only, or 0.0.0.0 for all interfaces.")
        if any(not key.strip() for key in self.api_keys):
            raise UsageError("An API key is empty; give a value, or leave the option out to serve without keys.")


def _check(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise UsageError(f"{name} must be between {low:g} and {high:g}, but it is {value!r}.")
