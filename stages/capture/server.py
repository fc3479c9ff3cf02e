"""The chat server of an agent host: three wires on loopback, a URL and a key for each rollout.

http://127.0.0.1:PORT/s/ROLLOUT                           for Anthropic's SDK, which appends /v1/messages
http://127.0.0.1:PORT/s/ROLLOUT/v1                        for OpenAI's: /chat/completions, /responses, /models
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from hashlib import blake2b
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from schemas.chat import ChatError, ChatRequest, Reply
from stages.agents.chat import MODEL_NAME, UNRECORDED_MODEL_NAME
from stages.capture import anthropic, models, openai_chat, openai_responses
from stages.capture.recorder import Recorder, session_closed

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
MAX_ACTIVE_REQUESTS = 64
"""Requests of one rollout that are under way at the same time."""
PATIENCE_SECONDS = 1.0
"""How long a stream waits before it starts, so that an early failure still has its own HTTP status."""
KEEP_ALIVE_SECONDS = 10.0
BODY_SECONDS = 60.0
"""Longest time that a body may take to arrive."""
MAX_SHOWN = 200
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


class CaptureServer:
    """Serves the rollouts that are open. Everything runs on the loop that called `start`."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Recorder] = {}
        self._started = int(time.time())
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(), log_level="error", access_log=False, lifespan="off", ws="none", proxy_headers=False
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    @asynccontextmanager
    async def open(self, recorder: Recorder) -> AsyncIterator[str]:
        """Serve one rollout; gives its session URL. Afterwards its key is refused and its requests are aborted."""
        name = secrets.token_urlsafe(12)
        self._rollouts[name] = recorder
        try:
            yield f"{self._url}/s/{name}"
        finally:
            del self._rollouts[name]
            await recorder.close()

    def _app(self) -> Starlette:
        def wire(path: str, codec: Any) -> Route:
            async def endpoint(request: Request) -> Response:
                return await self._answered(request, codec, self._chat)

            return Route(f"/s/{{rollout}}/v1/{path}", endpoint, methods=["POST"])

        def other(path: str, handle: Any, methods: list[str]) -> Route:
            async def endpoint(request: Request) -> Response:
                return await self._answered(request, _wire_of(request), handle)

            return Route(path, endpoint, methods=methods)

        return Starlette(
            routes=[
                wire("chat/completions", openai_chat),
                wire("responses", openai_responses),
                wire("messages", anthropic),
                other("/s/{rollout}/v1/messages/count_tokens", self._count_tokens, ["POST"]),
                other("/s/{rollout}/v1/models", self._models, ["GET"]),
                other("/s/{rollout}/v1/models/{model:path}", self._models, ["GET"]),
                other("/s/{rollout}", self._probe, ["GET", "POST"]),
                other("/{path:path}", self._nothing, METHODS),
            ],
            exception_handlers={HTTPException: self._refused},
        )

    async def _answered(self, request: Request, codec: Any, handle: Any) -> Response:
        """What `handle` gives, or the error in the shape of the wire."""
        try:
            return await handle(request, codec)
        except ChatError as failure:
            status, body = codec.error(failure)
            return JSONResponse(body, status)
        except ClientDisconnect:
            return Response(status_code=499)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            status, body = codec.error(session_closed())  # its generation was aborted
            return JSONResponse(body, status)
        except Exception:
            log.exception("a chat request failed")
            status, body = codec.error(ChatError(500, "engine", "the chat server failed on this request"))
            return JSONResponse(body, status)

    def _recorder(self, request: Request) -> Recorder:
        """The rollout that the URL names, if the key is its own. Says nothing about which of the two was wrong."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        recorder = self._rollouts.get(request.path_params["rollout"])
        expected = recorder.key if recorder else secrets.token_urlsafe(24)
        if not hmac.compare_digest(given.strip().encode(), expected.encode()) or recorder is None:
            raise ChatError(401, "authentication", "unknown or closed session, or another session's key")
        return recorder

    async def _chat(self, request: Request, codec: Any) -> Response:
        recorder = self._recorder(request)
        with ExitStack() as answering:
            answering.enter_context(_counted(recorder))
            raw = await _body(request)
            chat = codec.decode(_json(raw))
            is_retry = request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
            answer = recorder.once((codec.__name__, blake2b(raw).digest()), is_retry, chat)
            ready: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            written = asyncio.Event()
            holding = asyncio.create_task(_hold(answer, ready, written))
            answering.callback(lambda: written.is_set() or holding.cancel())
            await _ready_or_gone(ready, request, PATIENCE_SECONDS if chat.stream else None)
            if chat.stream:
                return self._stream(codec, chat, ready, written, answering)
            response = JSONResponse(codec.encode(ready.result(), chat))
            written.set()
            return response

    def _stream(
        self,
        codec: Any,
        chat: ChatRequest,
        ready: asyncio.Future[Reply],
        written: asyncio.Event,
        answering: ExitStack,
    ) -> Response:
        """Events of a whole reply. A reply that takes long is announced by its wire's sign of life."""
        if ready.done() and (failure := ready.exception()) is not None:
            raise failure

        async def events() -> AsyncIterator[str]:
            while not ready.done():
                yield codec.keep_alive()
                await asyncio.wait((ready,), timeout=KEEP_ALIVE_SECONDS)
            try:
                for event in codec.events(ready.result(), chat):
                    yield event
                written.set()
            except ChatError as failure:
                yield codec.error_event(failure)

        return _EventStream(events(), answering.pop_all())

    async def _count_tokens(self, request: Request, codec: Any) -> Response:
        recorder = self._recorder(request)
        with _counted(recorder):
            body = anthropic.decode_count(_json(await _body(request)))
            return JSONResponse(anthropic.count(recorder.count_tokens(body)))

    async def _models(self, request: Request, codec: Any) -> Response:
        self._recorder(request)
        names, is_anthropic = (MODEL_NAME, UNRECORDED_MODEL_NAME), codec is anthropic
        if (name := request.path_params.get("model")) is None:
            return JSONResponse(models.listed(names, self._started, is_anthropic))
        return JSONResponse(models.retrieved(name, names, self._started, is_anthropic))

    async def _probe(self, request: Request, codec: Any) -> Response:
        """Some clients look whether there is anything at their base URL, without a key."""
        return Response(status_code=200)

    async def _nothing(self, request: Request, codec: Any) -> Response:
        raise ChatError(404, "not_found", f"nothing at {request.url.path[:MAX_SHOWN]}")

    async def _refused(self, request: Request, failure: Exception) -> Response:
        """What routing refuses, such as a method that nobody knows."""
        assert isinstance(failure, HTTPException)
        status, body = _wire_of(request).error(ChatError(failure.status_code, "not_found", failure.detail))
        return JSONResponse(body, status)


class _EventStream(StreamingResponse):
    """Server-sent events; `answering` is closed on every way out, also where the client went before the first."""

    def __init__(self, events: AsyncIterator[str], answering: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answering:
            await super().__call__(scope, receive, send)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that hosts the server."""
        yield


@contextlib.contextmanager
def _counted(recorder: Recorder) -> Iterator[None]:
    if recorder.num_active >= MAX_ACTIVE_REQUESTS:
        raise ChatError(429, "overloaded", f"this session has {MAX_ACTIVE_REQUESTS} requests under way; wait for one")
    recorder.num_active += 1
    try:
        yield
    finally:
        recorder.num_active -= 1


async def _ready_or_gone(ready: asyncio.Future[Reply], request: Request, seconds: float | None) -> None:
    """Wait for a reply, at most so long. Raises ClientDisconnect at once when the client goes: its next try may be here
    before the reply is."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(gone())
    try:
        await asyncio.wait((ready, watching), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and not ready.done():
            raise ClientDisconnect
    finally:
        watching.cancel()


async def _hold(answer: Any, ready: asyncio.Future[Reply], written: asyncio.Event) -> None:
    """Holds a reply until it is written whole; cancelled, it tells that it was not."""
    try:
        async with answer as reply:
            ready.set_result(reply)
            await written.wait()
    except Exception as failure:
        if not ready.done():
            ready.set_exception(failure)
            ready.exception()  # retrieved: the client may be gone
    except asyncio.CancelledError:
        if not ready.done():
            ready.set_exception(session_closed())
            ready.exception()
        raise


def _wire_of(request: Request) -> Any:
    """The wire whose errors a client of this request reads."""
    is_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
    return anthropic if is_anthropic else openai_chat


async def _body(request: Request) -> bytes:
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > MAX_BODY_BYTES:
                    raise ChatError(413, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise ChatError(408, "invalid_request", f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return bytes(raw)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise ChatError(400, "invalid_request", f"the body is not JSON: {problem}") from None
