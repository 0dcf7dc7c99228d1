"""Putting the application together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import qwenonnx
from qwenonnx.errors import InvalidRequestError, QwenonnxError
from qwenonnx.server.access import ApiKeys, RateLimit
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.docs_page import build_docs_routes
from qwenonnx.server.errors import ClientDisconnectedError, error_response
from qwenonnx.server.middleware import Guard, HeadRequests, OriginForm, RequestId
from qwenonnx.server.openapi import add_openapi
from qwenonnx.server.page_routes import build_page_routes
from qwenonnx.server.routes import build_routes
from qwenonnx.server.served import Served
from qwenonnx.server.service import Service


def create_app(load: Callable[[], Served], config: ServeConfig) -> FastAPI:
    """The ASGI application; its `state.service` is the `Service`.

    `load` is called in a thread of its own when the application starts, so that /health can answer 503
    meanwhile. The application starts the engine that `load` returns, and closes it at shutdown.
    """
    service = Service(load, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="qwenonnx",
        version=qwenonnx.__version__,
        lifespan=lifespan,
        middleware=_middleware(config),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    add_openapi(app)
    app.state.service = service
    app.include_router(build_routes(service))
    app.include_router(build_page_routes())
    app.include_router(build_docs_routes(app))
    app.add_exception_handler(QwenonnxError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    return app


def _middleware(config: ServeConfig) -> list[Middleware]:
    """Outermost first: inner errors carry the request id and CORS headers; preflights need no key."""
    result = [Middleware(OriginForm), Middleware(RequestId), Middleware(HeadRequests)]
    if config.cors_origins:
        result.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    result.append(Middleware(Guard))
    if config.api_keys:
        result.append(Middleware(ApiKeys, keys=config.api_keys))
    if config.requests_per_minute is not None:
        result.append(Middleware(RateLimit, per_minute=config.requests_per_minute, by_key=bool(config.api_keys)))
    return result


async def _on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnectedError):
        return Response(status_code=499)  # nobody reads it
    return error_response(error)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    return error_response(InvalidRequestError("A parameter of the address is invalid."))
