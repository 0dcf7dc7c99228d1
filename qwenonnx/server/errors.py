"""From exceptions to HTTP: status, headers and the OpenAI error object. Nothing else builds error answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from qwenonnx.errors import (
    AuthenticationError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    NumericalError,
    QueueFullError,
    QwenonnxError,
    UnavailableError,
)

LOADING_RETRY_AFTER = 1


class ClientDisconnectedError(QwenonnxError):
    """The client has gone; there is nobody to answer."""


class HttpError(InvalidRequestError):
    """A request is refused by a rule of HTTP rather than for a field of its body."""

    def __init__(self, status: HTTPStatus, message: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.close = close


class RateLimitedError(HttpError):
    """A client sends requests faster than it may."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, message)
        self.retry_after = retry_after


def error_object(error: BaseException) -> dict[str, Any]:
    """The OpenAI form `{"error": {message, type, param, code}}`; unknown exceptions keep their text."""
    kind, param, code = "server_error", None, None
    match error:
        case AuthenticationError():
            kind, code = "invalid_request_error", "invalid_api_key"
        case ModelNotFoundError():
            kind, param, code = "invalid_request_error", "model", "model_not_found"
        case RateLimitedError():
            kind, code = "rate_limit_error", "rate_limit_exceeded"
        case InvalidRequestError():
            kind, param, code = "invalid_request_error", error.param, error.code
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else kind
        case QueueFullError():
            kind, code = "rate_limit_error", "rate_limit_exceeded"
        case UnavailableError():
            code = "unavailable"
        case DeadlineError():
            code = "deadline_exceeded"
        case _:
            pass
    return {"error": {"message": _message(error), "type": kind, "param": param, "code": code}}


def error_status(error: BaseException) -> int:
    """The HTTP status that goes with an exception."""
    match error:
        case HttpError():
            return int(error.status)
        case AuthenticationError():
            return HTTPStatus.UNAUTHORIZED
        case ModelNotFoundError():
            return HTTPStatus.NOT_FOUND
        case InvalidRequestError():
            return HTTPStatus.BAD_REQUEST
        case HTTPException():
            return error.status_code
        case QueueFullError():
            return HTTPStatus.TOO_MANY_REQUESTS
        case UnavailableError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case DeadlineError():
            return HTTPStatus.GATEWAY_TIMEOUT
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def error_response(error: BaseException) -> JSONResponse:
    """The whole HTTP answer for an exception."""
    return JSONResponse(error_object(error), status_code=error_status(error), headers=_headers(error))


def _message(error: BaseException) -> str:
    if isinstance(error, HTTPException):
        match error.status_code:
            case HTTPStatus.NOT_FOUND:
                return "There is nothing at this path; see /v1/models, /v1/chat/completions and /v1/completions."
            case HTTPStatus.METHOD_NOT_ALLOWED:
                allowed = (error.headers or {}).get("Allow", "another method")
                return f"This method is not allowed here; use {allowed}."
            case _:
                return str(error.detail)
    # A bare EngineError wraps what a library raised; that text is for the log.
    if isinstance(error, QwenonnxError) and type(error) is not EngineError:
        return str(error)
    return "The server failed on this request; its log says more under the request id."


def _headers(error: BaseException) -> Mapping[str, str]:
    match error:
        case HTTPException():
            return error.headers or {}
        case HttpError() if error.close:
            return {"connection": "close"}
        case AuthenticationError():
            return {"www-authenticate": "Bearer"}
        case QueueFullError() | RateLimitedError():
            seconds = max(error.retry_after, 0.0)
            return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        case UnavailableError():
            return {"retry-after": str(LOADING_RETRY_AFTER)}
        case NumericalError() | DeadlineError():
            # The same request would fail again; clients that retry on 5xx should not.
            return {"x-should-retry": "false"}
        case _:
            return {}
