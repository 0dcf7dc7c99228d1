"""The endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import qwenonnx
from qwenonnx.engine.request import Delta
from qwenonnx.errors import ModelNotFoundError
from qwenonnx.server.answers import Json
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.generation import Generation
from qwenonnx.server.prepare import Prepared, prepare_chat, prepare_completion
from qwenonnx.server.schema import ChatRequest, CompletionRequest, GenerationFields
from qwenonnx.server.served import Served
from qwenonnx.server.service import Service
from qwenonnx.server.sse import EventStream

Prepare = Callable[[bytes, Served, ServeConfig], Prepared]


def build_routes(service: Service) -> APIRouter:
    """All routes, answering from one service."""
    router = APIRouter(redirect_slashes=False)

    @router.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest), summary="Continue a conversation")
    async def chat_completions(request: Request) -> Response:
        return await _generate(service, request, prepare_chat)

    @router.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest), summary="Continue a text")
    async def completions(request: Request) -> Response:
        return await _generate(service, request, prepare_completion)

    @router.get("/v1/models", summary="List the served model")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(service.served)]}

    @router.get("/v1/models/{model_id:path}", summary="Describe the served model")
    async def model(model_id: str) -> dict[str, Any]:
        served = service.served
        if model_id not in (served.model_name, *served.aliases):
            raise ModelNotFoundError(f"The model {model_id[:200]!r} is not served here; {served.model_name!r} is.")
        return _model_object(served)

    @router.get("/health", summary="Whether requests can be served")
    async def health() -> JSONResponse:
        if service.status != "ok":
            return JSONResponse({"status": service.status}, status_code=503)
        served = service.served
        return JSONResponse(
            {
                "status": "ok",
                "model": served.model_name,
                "context_length": served.context_length,
                "in_flight": service.in_flight,
                "running": served.engine.num_running,
                "waiting": served.engine.num_waiting,
                "info": dict(served.info),
            }
        )

    @router.get("/version", summary="Version of the server")
    async def version() -> dict[str, str]:
        return {"version": qwenonnx.__version__}

    return router


async def _generate(service: Service, request: Request, prepare: Prepare) -> Response:
    served = service.served
    body = await service.read_body(request)
    prepared = await asyncio.to_thread(prepare, body, served, service.config)
    generation = service.open(prepared.request)
    if prepared.stream:
        return EventStream(
            generation,
            prepared.answer,
            include_usage=prepared.include_usage,
            keepalive=service.config.keepalive,
        )
    watcher = asyncio.create_task(generation.abort_on_disconnect(request.receive))
    try:
        with generation:
            return JSONResponse(await _collect(generation, prepared))
    finally:
        watcher.cancel()


async def _collect(generation: Generation, prepared: Prepared) -> Json:
    texts: list[str] = []
    while True:
        event = await generation.next()
        if isinstance(event, Delta):
            texts.append(event.text)
        elif event is not None:
            return prepared.answer.whole("".join(texts), event.reason, event.usage)


def _model_object(served: Served) -> dict[str, Any]:
    return {
        "id": served.model_name,
        "object": "model",
        "created": served.created,
        "owned_by": "qwenonnx",
        "max_model_len": served.context_length,
    }


def _body_schema(kind: type[GenerationFields]) -> dict[str, Any]:
    # Bodies are parsed by hand (see jsonbody), so FastAPI does not know their form.
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{kind.__name__}.{{model}}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
