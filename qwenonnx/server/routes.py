"""The endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import qwenonnx
from qwenonnx.engine.request import Finished
from qwenonnx.errors import ModelNotFoundError
from qwenonnx.server.answers import Json
from qwenonnx.server.choices import FinishedChoice
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.generation import Generation
from qwenonnx.server.openapi import ANSWER, documented
from qwenonnx.server.prepare import prepare_chat, prepare_completion
from qwenonnx.server.prepared import Prepared
from qwenonnx.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from qwenonnx.server.served import Served
from qwenonnx.server.service import Service
from qwenonnx.server.sse import EventStream
from qwenonnx.server.tokens import count_input, detokenize, tokenize

Prepare = Callable[[bytes, Served, ServeConfig], Prepared]
Tell = Callable[[bytes, Served, ServeConfig], Json]


def build_routes(service: Service) -> APIRouter:
    """All routes, answering from one service."""
    router = APIRouter(redirect_slashes=False)

    @router.post("/v1/chat/completions", **documented(ChatRequest, ANSWER), summary="Continue a conversation")
    async def chat_completions(request: Request) -> Response:
        return await _generate(service, request, prepare_chat)

    @router.post("/v1/completions", **documented(CompletionRequest, ANSWER), summary="Continue a text")
    async def completions(request: Request) -> Response:
        return await _generate(service, request, prepare_completion)

    @router.post(
        "/v1/chat/completions/input_tokens", **documented(ChatRequest), summary="Count the tokens of a conversation"
    )
    async def input_tokens(request: Request) -> Response:
        return await _tell(service, request, count_input)

    @router.post("/tokenize", **documented(TokenizeRequest), summary="Turn a text or a conversation into tokens")
    async def tokens(request: Request) -> Response:
        return await _tell(service, request, tokenize)

    @router.post("/detokenize", **documented(DetokenizeRequest), summary="Turn tokens into a text")
    async def text(request: Request) -> Response:
        return await _tell(service, request, detokenize)

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
    generation = service.open(prepared.requests)
    if prepared.stream:
        return EventStream(generation, prepared, keepalive=service.config.keepalive)
    watcher = asyncio.create_task(generation.abort_on_disconnect(request.receive))
    try:
        with generation:
            return JSONResponse(await _collect(generation, prepared))
    finally:
        watcher.cancel()


async def _collect(generation: Generation, prepared: Prepared) -> Json:
    choices, totals = prepared.choices(), prepared.totals()
    done: dict[int, FinishedChoice] = {}
    while len(done) < len(choices):
        answered = await generation.next()
        if answered is None:
            continue
        index, event = answered
        choices[index].feed(event)
        if isinstance(event, Finished):
            totals.add(index, event)
            done[index] = choices[index].whole(event.reason)
    answer = prepared.answer.whole([done[index] for index in range(len(choices))], totals.usage)
    return {**answer, "timings": totals.timings_object()} if prepared.timings else answer


async def _tell(service: Service, request: Request, tell: Tell) -> Response:
    served = service.served
    body = await service.read_body(request)
    return JSONResponse(await asyncio.to_thread(tell, body, served, service.config))


def _model_object(served: Served) -> dict[str, Any]:
    return {
        "id": served.model_name,
        "object": "model",
        "created": served.created,
        "owned_by": "qwenonnx",
        "max_model_len": served.context_length,
    }
