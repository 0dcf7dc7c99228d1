"""The answer to bytes that are no HTTP request, for which no application is ever asked."""

from __future__ import annotations

import uuid
from http import HTTPStatus

import h11

from qwenonnx.server.errors import HttpError, error_response


def malformed_response() -> tuple[h11.Response, h11.Data, h11.EndOfMessage]:
    """Status, body and end, for h11 to write."""
    error = HttpError(HTTPStatus.BAD_REQUEST, "This is no valid HTTP request.", close=True)
    response = error_response(error)
    headers = [*response.raw_headers, (b"x-request-id", f"req_{uuid.uuid4().hex}".encode())]
    status = response.status_code
    return (
        h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()),
        h11.Data(data=bytes(response.body)),
        h11.EndOfMessage(),
    )
