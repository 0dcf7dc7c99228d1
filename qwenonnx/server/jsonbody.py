"""Request bodies: bytes from the wire to a JSON object that is safe to work with."""

from __future__ import annotations

import asyncio
import json
import math
from http import HTTPStatus
from typing import Any

from starlette.requests import Request

from qwenonnx.errors import InvalidRequestError
from qwenonnx.server.errors import ClientDisconnectedError, HttpError

MAX_DEPTH = 128

# A client that is still sending does not read: swallowing a moderate surplus lets it see the 413.
_DRAIN_FACTOR = 8
_DRAIN_SECONDS = 5.0


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, of at most `limit` bytes, enforced while reading.

    Raises:
        HttpError: it is too large (413), or not plain JSON by its headers (415).
        ClientDisconnectedError: the client went away before it was complete.
    """
    _check_headers(request)
    declared = request.headers.get("content-length", "")
    length = int(declared) if declared.isascii() and declared.isdigit() else 0
    if length > limit:
        if length <= limit * _DRAIN_FACTOR and "100-continue" not in request.headers.get("expect", "").lower():
            await _drain(request, limit * _DRAIN_FACTOR)
        raise _too_large(limit)
    body = bytearray()
    more = True
    while more:
        chunk, more = await _receive(request)
        if len(body) + len(chunk) > limit:
            if more:
                await _drain(request, limit * _DRAIN_FACTOR)
            raise _too_large(limit)
        body += chunk
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object of finite numbers and valid Unicode, at most `MAX_DEPTH` levels deep.

    Raises:
        InvalidRequestError: it is none; `param` names the field at fault where there is one.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8: byte {error.start} is invalid.") from None
    value = parse_value(text, "The body")
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The body must be a JSON object, but it is {json_type(value)}.")
    for name, field in value.items():
        check_text(name, "The body", None)
        check_value(field, name, name)
    return value


def parse_value(text: str, what: str, param: str | None = None) -> Any:
    """Any JSON value; `what` starts the sentence of an error.

    Raises:
        InvalidRequestError: the text is not JSON, or nested too deeply.
    """
    if not text.strip():
        raise InvalidRequestError(f"{what} is empty; a JSON object is needed.", param=param)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"{what} is not valid JSON: {error.msg} at character {error.pos}.", param=param
        ) from None
    except RecursionError:
        raise _too_deep(what, param) from None
    except ValueError:
        raise InvalidRequestError(f"{what} is not valid JSON: an integer is too long.", param=param) from None


def check_value(value: Any, path: str, param: str) -> None:
    """Refuses what JSON libraries let through: NaN and infinities, lone surrogates, extreme nesting.

    Raises:
        InvalidRequestError: with `param`, and in the text the path of the value at fault.
    """
    stack = [(value, path, 1)]
    while stack:
        item, where, depth = stack.pop()
        if isinstance(item, str):
            check_text(item, where, param)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidRequestError(f"{where} must be a finite number.", param=param)
        elif isinstance(item, dict | list):
            if depth >= MAX_DEPTH:
                raise _too_deep(path, param)
            if isinstance(item, dict):
                for key, child in item.items():
                    check_text(key, where, param)
                    stack.append((child, f"{where}.{key}", depth + 1))
            else:
                stack.extend((child, f"{where}[{index}]", depth + 1) for index, child in enumerate(item))


def check_text(text: str, where: str, param: str | None) -> None:
    """Refuses half of a UTF-16 surrogate pair, which JSON can spell and no encoding can carry.

    Raises:
        InvalidRequestError: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{where} holds half of a surrogate pair at position {error.start}; send whole characters.",
            param=param,
        ) from None


def json_type(value: Any) -> str:
    """The name of a value's type in JSON's terms, with an article."""
    names = {
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _check_headers(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "Compressed request bodies are not supported; send plain JSON.",
            close=True,
        )
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "The body must be sent with Content-Type: application/json.",
            close=True,
        )


async def _receive(request: Request) -> tuple[bytes, bool]:
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnectedError("The client disconnected while sending its request.")
    return message.get("body", b""), message.get("more_body", False)


async def _drain(request: Request, limit: int) -> None:
    taken, more = 0, True
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while more and taken < limit:
                chunk, more = await _receive(request)
                taken += len(chunk)
    except TimeoutError:
        pass


def _too_large(limit: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is larger than the limit of {limit} bytes.",
        close=True,
    )


def _too_deep(what: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError(f"{what} is nested more than {MAX_DEPTH} levels deep.", param=param)
