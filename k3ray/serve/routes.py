"""The FastAPI app over a `Service`: OpenAI's paths, health, metrics, the page.

Handlers only translate: bytes to calls, answers to JSON or frames, errors to OpenAI's JSON.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from k3ray.errors import BadRequestError, CapacityError, K3RayError, UnknownModelError
from k3ray.serve import scaling, weights
from k3ray.serve.answers import collect, stream_frames
from k3ray.serve.api import Call, parse_chat, parse_completion
from k3ray.serve.api_errors import error_body, error_reply, error_type
from k3ray.serve.api_responses import model_object
from k3ray.serve.health import Health
from k3ray.serve.metrics_page import metrics_page
from k3ray.serve.pieces import EventId
from k3ray.serve.run_table import RunKey
from k3ray.serve.service import Answer, Service
from k3ray.serve.sse import EventStream, unless_disconnected
from k3ray.serve.web_page import page_response
from k3ray.text.strict_json import MAX_BODY_BYTES, shown

_REQUEST_ID = re.compile(r"[!-~]{1,200}")
_CLIENT_GONE = 499
_log = logging.getLogger(__name__)


def build_routes(
    service: Service,
    health: Health,
    web_dir: Path,
    *,
    beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> FastAPI:
    """The whole HTTP surface of an ingress.

    Args:
        web_dir: Folder of the web page's files.
        beside: Entered while the app serves (registration).
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(service.sweep_forever())
        try:
            async with beside():
                yield
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            await service.close()

    app = FastAPI(title="k3ray", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app, service)
    _add_api(app, service)
    _add_operations(app, service, health)
    _add_page(app, service, health, web_dir)
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    settings = service.settings

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(service, request, parse_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, parse_completion)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in settings.models]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        if name not in settings.models:
            raise UnknownModelError(
                "this model does not exist here",
                remedy=f"use one of {', '.join(settings.models)}",
                param="model",
            )
        return _model(service, name)


def _add_operations(app: FastAPI, service: Service, health: Health) -> None:
    @app.get("/health")
    async def get_health() -> JSONResponse:
        ready, document = await health.check()
        return JSONResponse(document, status_code=200 if ready else 503)

    @app.post("/scale_elastic_ep")
    async def scale_elastic_ep(request: Request) -> Response:
        try:
            call = scaling.parse_scale(await _read_body(request))
            return JSONResponse(await scaling.scale(service.router, call))
        except Exception as error:
            return _refuse(service, error)

    @app.api_route("/is_scaling_elastic_ep", methods=["GET", "POST"])
    async def is_scaling_elastic_ep() -> Response:
        try:
            return JSONResponse(await scaling.progress(service.router))
        except Exception as error:
            return _refuse(service, error)

    @app.get("/weight_info")
    async def weight_info() -> Response:
        try:
            return JSONResponse(await service.router.weight_info())
        except Exception as error:
            return _refuse(service, error)

    @app.post("/update_weights")
    async def update_weights(request: Request) -> Response:
        try:
            version = weights.parse_update(await _read_body(request))
            return JSONResponse(await weights.update(service.router, version))
        except Exception as error:
            return _refuse(service, error)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        try:
            status = await health.status()
        except K3RayError:
            status = None
        body, media_type = metrics_page(service.counters, status)
        return Response(body, media_type=media_type)


def _add_page(app: FastAPI, service: Service, health: Health, web_dir: Path) -> None:
    @app.get("/")
    async def root() -> RedirectResponse:
        return RedirectResponse("/ui/")

    @app.get("/ui")
    async def page_without_slash() -> RedirectResponse:
        return RedirectResponse("/ui/")

    @app.get("/ui/status.json")
    async def page_status() -> JSONResponse:
        document = await health.status()
        endpoint = {**service.counters.snapshot(), "model": service.settings.model}
        return JSONResponse(
            {**document, "endpoint": endpoint}, headers={"Cache-Control": "no-store"}
        )

    @app.get("/ui/")
    async def page() -> Response:
        return page_response(web_dir, "index.html")

    @app.get("/ui/{name}")
    async def page_file(name: str) -> Response:
        return page_response(web_dir, name)


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        kind = error_type(error.status_code)
        body = error_body(str(error.detail), kind=kind, param=None, code=None)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def any_error(_: Request, error: Exception) -> JSONResponse:
        return _refuse(service, error)


async def _answer(service: Service, request: Request, parse: Callable[..., Call]) -> Response:
    """Serve one call, streamed or whole."""
    try:
        call = parse(await _read_body(request), models=service.settings.models)
        key, last_event = _read_headers(request)
        version = request.headers.get("x-k3ray-version") or None
        answer = await service.open(call, key, last_event, version=version)
    except Exception as error:
        return _refuse(service, error)
    headers = {"x-k3ray-version": answer.envelope.version, "x-k3ray-seed": str(answer.entry.seed)}
    service.counters.streams += 1
    if call.stream:
        return EventStream(
            stream_frames(answer, keep_alive_s=service.settings.keep_alive_s),
            stall_s=service.settings.send_stall_timeout_s,
            on_end=lambda: _leave(service, answer),
            headers=headers,
        )
    try:
        return await _whole(service, request, answer, headers)
    finally:
        _leave(service, answer)


async def _whole(
    service: Service, request: Request, answer: Answer, headers: dict[str, str]
) -> Response:
    work = asyncio.create_task(collect(answer, idle_s=service.settings.keep_alive_s))
    try:
        if not await unless_disconnected(request.receive, work):
            return Response(status_code=_CLIENT_GONE)
        return JSONResponse(work.result(), headers=headers)
    except Exception as error:
        return _refuse(service, error)


def _leave(service: Service, answer: Answer) -> None:
    service.counters.streams -= 1
    service.leave(answer)


def _refuse(service: Service, error: Exception) -> JSONResponse:
    """The error as JSON; what is not the client's fault is counted and logged."""
    reply = error_reply(error)
    if isinstance(error, CapacityError):
        service.counters.refused_total += 1
    elif reply.status >= 500:
        service.counters.failed_total += 1
        _log.error("event=request.failed status=%d", reply.status, exc_info=error)
    return JSONResponse(dict(reply.body), status_code=reply.status, headers=dict(reply.headers))


async def _read_body(request: Request) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise BadRequestError(
            f"content-encoding: {shown(encoding)} is not taken", remedy="send plain JSON",
            param="content-encoding", code="unsupported_content_encoding", status=415,
        )  # fmt: skip
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadRequestError(
                f"the body is larger than {MAX_BODY_BYTES} bytes", remedy="send less",
                param=None, code="request_too_large", status=413,
            )  # fmt: skip
    return bytes(body)


def _read_headers(request: Request) -> tuple[RunKey, EventId | None]:
    request_id = request.headers.get("x-request-id")
    if request_id is None:
        request_id = secrets.token_hex(16)
    elif not _REQUEST_ID.fullmatch(request_id):
        raise BadRequestError(
            "x-request-id: needs 1 to 200 printable ASCII characters",
            remedy="send a UUID, or none",
            param="x-request-id",
        )
    last = request.headers.get("last-event-id")
    key = RunKey.of(request.headers.get("authorization"), request_id)
    return key, None if last is None else EventId.parse(last)


def _model(service: Service, name: str) -> dict[str, Any]:
    return model_object(name, created_s=service.started_s, context=service.settings.bounds.context)
