"""The OpenAPI document: what bodies are accepted, as they are checked, and all statuses there can be."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from qwenonnx.server.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    unsupported_schema,
)

Json = dict[str, Any]

ANSWER = ("application/json", "text/event-stream")
"""Kinds of answers that come whole or as a stream."""

_BODIES: tuple[type[Body], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "A field or the JSON is wrong",
    401: "A key is needed and missing or wrong",
    404: "The model is not served here",
    408: "The body took too long",
    413: "The body is too large",
    415: "The body is not plain JSON",
    429: "Too many requests",
    500: "Generation failed",
    503: "The model is loading, or the server is shutting down",
}
_STATUSES_WITHOUT_BODY = (401, 404, 503)


def documented(body: type[Body], kinds: tuple[str, ...] = ("application/json",)) -> dict[str, Any]:
    """What a route with a JSON body says about itself, as arguments of FastAPI's decorators."""
    # Bodies are parsed by hand (see jsonbody), so FastAPI does not know their form.
    schema = {"$ref": _REF.format(model=body.__name__)}
    content: Json = {kind: {"schema": {"type": "object"}} if "json" in kind else {} for kind in kinds}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        "responses": {200: {"description": "The answer", "content": content}, **_errors(tuple(_STATUSES))},
    }


def add_openapi(app: FastAPI) -> None:
    """Makes the app's document whole; it is built when it is first asked for."""

    def build() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]  # as FastAPI's documentation has it


def _document(app: FastAPI) -> Json:
    document: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_REF)
    schemas: Json = definitions["$defs"]
    for kind in _BODIES:
        schemas[kind.__name__]["properties"] |= unsupported_schema(kind)
    schemas["Error"] = _ERROR
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Where the server has keys"}},
    }
    for path, methods in document["paths"].items():
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's own, which is never sent
            if "requestBody" not in operation and path not in ("/health", "/version"):
                responses |= {str(status): answer for status, answer in _errors(_STATUSES_WITHOUT_BODY).items()}
            if path == "/health":
                responses["503"] = {
                    "description": "The model is loading, or the server is shutting down",
                    "content": {"application/json": {"schema": {"type": "object", "required": ["status"]}}},
                }
            else:
                operation["security"] = [{}, {"key": []}]
    return document


def _errors(statuses: tuple[int, ...]) -> dict[int | str, Json]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}
