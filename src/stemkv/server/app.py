"""The routes. One request: decode, tokenize, queue, wait for the lookup, answer whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stemkv.pool import Pool
from stemkv.server import cache_status
from stemkv.server.auth import TRUSTED, Guard
from stemkv.server.channel import CLIENT_GONE, Channel
from stemkv.server.errors import ApiError, server_error
from stemkv.server.health import Probe
from stemkv.server.jobs import Delta, Ended, Event, Finished, Started
from stemkv.server.metrics import CONTENT_TYPE, ServerMetrics
from stemkv.server.openai_api import ChatRequest, CompletionRequest, RequestT, decode
from stemkv.server.prompts import Prompts
from stemkv.server.responses import Answer, ChatFormat, Format, TextFormat
from stemkv.server.threads import in_thread
from stemkv.server.worker import Worker

log = logging.getLogger("stemkv.server")

MAX_BODY_BYTES = 16 << 20
"""Larger bodies are refused: four bytes a character, a million tokens fit."""


class Gateway:
    """The endpoints over one worker. ``model`` is the name that requests use."""

    def __init__(self, *, model: str, worker: Worker, prompts: Prompts, pool: Pool) -> None:
        self._model = model
        self._worker = worker
        self._prompts = prompts
        self._probe = Probe(pool)
        self._created = int(time.time())
        self.metrics = ServerMetrics(pool, worker)

    # -- completions -----------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await self._decode(request, ChatRequest)
        return await self._answer(request, body, ChatFormat(self._model, logprobs=body.logprobs))

    async def completion(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await self._decode(request, CompletionRequest)
        return await self._answer(request, body, TextFormat(self._model, logprobs=body.logprobs is not None))

    async def _decode(self, request: Request, kind: type[RequestT]) -> RequestT:
        # A web page can send other content types across origins without asking; JSON it cannot.
        sent = request.headers.get("content-type", "")
        if sent.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                415, f"Content-Type is {sent[:60]!r}; send 'application/json'.", code="unsupported_media_type"
            )
        body = decode(await _read(request), kind)
        if body.model is not None:
            self._check_model(body.model)
        return body

    def _check_model(self, name: str) -> None:
        if name != self._model:
            message = f"The model {name[:100]!r} does not exist here; this server has {self._model!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _answer(self, request: Request, body: ChatRequest | CompletionRequest, format_: Format) -> Response:
        self._worker.check_room()  # before the work of tokenizing a prompt that would only be refused
        job = await in_thread(lambda: self._prompts.job(body), "stemkv-tokenize")
        channel = Channel(job, request, self.metrics)
        try:
            self._worker.submit(job)
            if not body.stream:
                return await _whole(channel, format_)
            first = await channel.next()
            if isinstance(first, Finished):
                raise first.error or server_error("The model gave no answer.")
            usage = body.stream_options is not None and body.stream_options.include_usage
            stream = _stream(channel, first, format_, usage=usage)
            headers = {**_headers(channel), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(stream, headers=headers, media_type="text/event-stream")
        except BaseException:
            channel.close()
            raise

    # -- the rest --------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return _json({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        self._check_model(request.path_params["id"])
        return _json(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        length = self._worker.engine.context_length
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "stemkv",
                "context_length": length}  # fmt: skip

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 when requests are served from a store that works, else 503 saying what does not."""
        health = await self._probe.check()
        if not self._worker.healthy:
            health = msgspec.structs.replace(health, status="failed", message="The server is stopping.")
        status = 503 if health.status == "failed" else 200
        if not request.scope[TRUSTED]:
            return _json({"status": health.status}, status)
        return _json(msgspec.to_builtins(health), status)

    async def exposition(self, request: Request) -> Response:
        """``GET /metrics``."""
        text = await in_thread(self.metrics.expose, "stemkv-metrics")
        return Response(text, headers={"content-type": CONTENT_TYPE})


def build_app(gateway: Gateway, *, keys: Sequence[str] = ()) -> Starlette:
    """The ASGI application; with ``keys`` callers must show one."""
    routes = [
        Route("/v1/chat/completions", _guarded(gateway.chat), methods=["POST"]),
        Route("/v1/completions", _guarded(gateway.completion), methods=["POST"]),
        Route("/v1/models", _guarded(gateway.models)),
        Route("/v1/models/{id:path}", _guarded(gateway.model)),
        Route("/health", _guarded(gateway.health)),
        Route("/metrics", _guarded(gateway.exposition)),
    ]
    known = {route.path for route in routes}
    middleware = [Middleware(_Measure, gateway.metrics, known), Middleware(Guard, keys)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return app


# -- one answer ----------------------------------------------------------------------------------------------


async def _whole(channel: Channel, format_: Format) -> Response:
    answers = [Answer(logprobs=[]) for _ in range(channel.job.choices)]
    pieces: list[list[str]] = [[] for _ in answers]
    async for event in channel.events():
        if isinstance(event, Delta):
            pieces[event.index].append(event.text)
            answers[event.index].logprobs.extend(event.logprobs)
        elif isinstance(event, Ended):
            answers[event.index].reason = event.reason
    for answer, texts in zip(answers, pieces, strict=True):
        answer.text = "".join(texts)
    return _json(format_.body(answers, channel.usage), headers=_headers(channel))


async def _stream(channel: Channel, first: Event, format_: Format, *, usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events; an error after the first byte is an event of its own, as OpenAI's clients expect."""
    try:
        for chunk in _chunks(first, format_):
            yield _sse(chunk)
        async for event in channel.events():
            for chunk in _chunks(event, format_):
                yield _sse(chunk)
        if usage:
            yield _sse(format_.usage(channel.usage))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield _sse(error.body())
    finally:
        channel.close()


def _chunks(event: Event, format_: Format) -> list[dict[str, Any]]:
    if isinstance(event, Started):
        opening = format_.opening(event.index)
        return [] if opening is None else [opening]
    if isinstance(event, Delta):
        return [format_.delta(event.index, event.text, event.logprobs)]
    if isinstance(event, Ended):
        return [format_.closing(event.index, event.reason)]
    return []


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _headers(channel: Channel) -> dict[str, str]:
    return {} if channel.lookup is None else {"Cache-Status": cache_status.header(channel.lookup)}


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _read(request: Request) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    chunks, size = [], 0
    announced = request.headers.get("content-length", "0")
    size_known = int(announced) if announced.isdecimal() else 0
    if size_known <= MAX_BODY_BYTES:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                break
            chunks.append(chunk)
    if max(size, size_known) > MAX_BODY_BYTES:
        message = f"The body has more than {MAX_BODY_BYTES} bytes, the most this server takes; shorten the prompt."
        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
    return b"".join(chunks)


# -- around every request ------------------------------------------------------------------------------------

Endpoint = Callable[[Request], Awaitable[Response]]


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Turn every error of an endpoint into an answer."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ApiError as error:
            return error.response()
        except ClientDisconnect:
            return CLIENT_GONE.response()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s failed", request.url.path)
            return server_error("The server failed on this request; see its log.").response()

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 405:
        message = f"{request.method} is not allowed on {request.url.path}."
        headers = dict(getattr(error, "headers", None) or {})
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()
    path = request.url.path[:100]
    return ApiError(404, f"There is no {path}; the API is under /v1.", code="not_found").response()


class _Measure:
    """ASGI middleware: counts and times requests. Unknown paths share one label, so that labels stay few."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, known: set[str]) -> None:
        self._app, self._metrics, self._known = app, metrics, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, code = time.perf_counter(), 499

        async def note(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            endpoint = self._endpoint(scope["path"])
            self._metrics.requests.labels(endpoint, str(code)).inc()
            if endpoint.endswith("completions"):
                self._metrics.duration.labels(endpoint).observe(time.perf_counter() - began)

    def _endpoint(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{id}"
        return path if path in self._known else "other"
