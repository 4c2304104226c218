"""The page and the API: read-only, on 127.0.0.1 unless asked otherwise, and then behind a token."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from wanshim.errors import LogUnreadable, WanshimError
from wanshim.monitor import status
from wanshim.monitor.health import USUAL, Patience
from wanshim.monitor.runs import RunFolder

log = logging.getLogger("wanshim")

STATIC = Path(__file__).parent / "static"
EVERY_S = 1.0
MOST_STREAMS = 32
MOST_CONNECTIONS = 256
REQUEST_S = 10.0  # for a whole request to arrive
LONGEST_REQUEST = 16 * 2**10  # bytes of a request's headers
LEAST_TOKEN = 16
COOKIE = "wanshim_token"
FOREIGN_HOST = (
    "This page was asked for by a name that is not this machine's own, as behind a proxy, and the monitor has no "
    "token. Start it with one, of 16 characters or more: WANSHIM_MONITOR_TOKEN=... wanshim monitor DIR --serve. "
    "Then open this address with ?token=... Or have the proxy send Host: localhost.\n"
)
SOURCES = ("default-src 'self'", "img-src 'self' data:", "style-src 'self' 'unsafe-inline'", "frame-ancestors 'none'")
HEADERS = {
    "Content-Security-Policy": "; ".join(SOURCES),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def is_local(host: str) -> bool:
    """Whether an address to bind is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(
    folder: RunFolder, patience: Patience = USUAL, token: str | None = None, host: str = "127.0.0.1"
) -> Starlette:
    """The application.

    Args:
        token: asked of every request; None for everyone on this machine.
        host: the address that will be bound.

    Raises:
        WanshimError: another address than this machine's own without a token, or a token that is too short.
    """
    check_token(token, host)
    routes = [
        Route("/", _page),
        Route("/api/runs", _runs),
        Route("/api/runs/{run}/history", _history),
        Route("/api/training/status", _training_status),
        Route("/api/events", _Events()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(_Guard)], lifespan=_watch)
    app.router.redirect_slashes = False  # to an address made from the Host header
    app.state.folder, app.state.patience, app.state.token = folder, patience, token
    app.state.statuses, app.state.answer, app.state.streams = [], "{}", 0
    return app


def check_token(token: str | None, host: str) -> None:
    """Whether `token` is enough to serve on `host`.

    Raises:
        WanshimError: it is not.
    """
    if token is None and not is_local(host):
        raise WanshimError(
            f"serving on {host} without a token", expected="WANSHIM_MONITOR_TOKEN", hint="Or serve on 127.0.0.1"
        )
    if token is not None and (len(token) < LEAST_TOKEN or not token.isascii()):
        raise WanshimError(f"a token of {len(token)} characters", expected=f"{LEAST_TOKEN} or more, plain ASCII")


@asynccontextmanager
async def _watch(app: Starlette) -> AsyncIterator[None]:
    """Keep the runs up to date while the server lives."""
    await asyncio.to_thread(_update, app)
    task = asyncio.create_task(_keep_updating(app))
    yield
    task.cancel()


async def _keep_updating(app: Starlette) -> None:
    while True:
        behind = any(run["unread_bytes"] for run in app.state.statuses)
        await asyncio.sleep(0.01 if behind else EVERY_S)
        try:
            await asyncio.to_thread(_update, app)
        except Exception:
            log.exception("wanshim monitor: this look at the runs failed")


def _update(app: Starlette) -> None:
    folder: RunFolder = app.state.folder
    with suppress(LogUnreadable):  # the folder is gone for now; what was read stays, and grows old
        folder.update()
    app.state.statuses = status.of_folder(folder, app.state.patience)
    app.state.answer = _json({"runs": app.state.statuses, "runs_left_out": len(folder.left_out)})


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


class _Guard:
    """Lets a request in, and puts HEADERS on every answer. ASGI, not starlette's BaseHTTPMiddleware: a stream must
    learn that its page is closed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = _answer_at_the_door(Request(scope)) or self.app
        await answer(scope, receive, send_with_headers)


def _answer_at_the_door(request: Request) -> Response | None:
    """The response for a request that is not let in; None: it is."""
    token = request.app.state.token
    if token is None:
        # A page of elsewhere whose name resolves to this machine must not read the logs.
        if is_local(_host_of(request)):
            return None
        return PlainTextResponse(FOREIGN_HOST, 400)
    if not _carries(request, token):
        return PlainTextResponse(
            "A token is needed: open the page's address with ?token=... or send Authorization: Bearer ...", 401
        )
    if "token" not in request.query_params:
        return None
    # Out of the address bar, into a cookie. Relative to the folder of the page: a path that begins with // would
    # name another server.
    response = RedirectResponse("./" + request.scope["path"].rpartition("/")[2])
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
    return response


def _host_of(request: Request) -> str:
    """The host of the Host header, without the port; empty where it names none. Not by `request.url`: starlette before
    1.3 builds that from header and path without checking either."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _carries(request: Request, token: str) -> bool:
    given = (
        request.headers.get("authorization", "").removeprefix("Bearer "),
        request.cookies.get(COOKIE, ""),
        request.query_params.get("token", ""),
    )
    return any(hmac.compare_digest(value.encode(), token.encode()) for value in given)


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


async def _runs(request: Request) -> Response:
    return Response(request.app.state.answer, media_type="application/json")


async def _training_status(request: Request) -> Response:
    """The run that wrote last, or the one that `?run=` names, flat as front ends expect it."""
    wanted = request.query_params.get("run")
    for run in request.app.state.statuses:
        if wanted in (None, run["id"]):
            return JSONResponse(run)
    return JSONResponse({"error": "no such run" if wanted else "no run yet"}, 404)


async def _history(request: Request) -> Response:
    folder: RunFolder = request.app.state.folder
    run = folder.runs.get(request.path_params["run"])  # a name of ours; nothing of the request becomes a path
    if run is None:
        return JSONResponse({"error": "no such run"}, 404)

    def look() -> dict[str, Any]:
        with folder.lock:
            return status.history(run)

    return JSONResponse(await asyncio.to_thread(look))


class _Events:
    """Server-sent events, one a second: the status of every run, and the points of its curves since the last.

    Counted before the answer begins, on the event loop: requests that come at once cannot pass the limit together.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        if state.streams >= MOST_STREAMS:
            await PlainTextResponse(f"{MOST_STREAMS} pages are open already", 503)(scope, receive, send)
            return
        state.streams += 1
        try:
            stream = _stream(Request(scope, receive))
            # nginx collects an answer before it passes it on, unless the answer forbids it
            answer = StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
            await answer(scope, receive, send)
        finally:
            state.streams -= 1


async def _stream(request: Request) -> AsyncIterator[str]:
    state = request.app.state
    last: dict[str, float] = {}
    while not await request.is_disconnected():
        tails = await asyncio.to_thread(_tails, state.folder, last)
        yield f'data: {state.answer[:-1]},"tails":{_json(tails)}}}\n\n'
        await asyncio.sleep(EVERY_S)


def _tails(folder: RunFolder, last: dict[str, float]) -> dict[str, Any]:
    """New points of each run's curves; `last` holds the x up to which they were sent, and moves on."""
    tails = {}
    with folder.lock:
        for run_id, run in folder.runs.items():
            end = run.first.curve.last_x if run.first else -1.0
            if run_id in last and end > last[run_id]:
                tails[run_id] = status.history(run, most=400, after=last[run_id])
            last[run_id] = end
    return tails


class _PromptRequests(H11Protocol):
    """Closes a connection whose request has not arrived whole after REQUEST_S: uvicorn itself waits for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _await_request(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before its address is printed.

    Raises:
        WanshimError: the address is unavailable, because another server has the port for example.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise WanshimError(
            f"cannot listen on port {port} of {host}: {error.strerror or error}",
            expected="a free port of this machine",
            hint="Name another with --port",
        ) from None


def config_of(app: Starlette) -> uvicorn.Config:
    """The configuration with which uvicorn serves the application: with limits on what a client may hold."""
    return uvicorn.Config(
        app,
        http=_PromptRequests,
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=LONGEST_REQUEST,
        timeout_graceful_shutdown=1,
        log_level="warning",
    )


def serve(folder: RunFolder, host: str, listening: socket.socket, patience: Patience, token: str | None) -> None:
    """Serve on a socket of `host` until interrupted."""
    uvicorn.Server(config_of(make_app(folder, patience, token, host))).run(sockets=[listening])
