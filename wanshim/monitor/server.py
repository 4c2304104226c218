"""The page and the API: read-only, on 127.0.0.1 unless told otherwise, and then behind a token."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
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

from wanshim.errors import MonitorInvalid
from wanshim.monitor import status
from wanshim.monitor.health import USUAL, Patience
from wanshim.monitor.runs import RunFolder

STATIC = Path(__file__).parent / "static"
EVERY_S = 1.0
MOST_STREAMS = 32
LEAST_TOKEN = 16
COOKIE = "wanshim_token"
SOURCES = ("default-src 'self'", "img-src 'self' data:", "style-src 'self' 'unsafe-inline'", "frame-ancestors 'none'")
HEADERS = {
    "Content-Security-Policy": "; ".join(SOURCES),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Handler = Callable[[Request], Awaitable[Response]]


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
        MonitorInvalid: another address than this machine's own without a token, or a token that is too short.
    """
    if token is None and not is_local(host):
        raise MonitorInvalid(
            f"serving on {host} without a token", expected="WANSHIM_MONITOR_TOKEN", hint="Or serve on 127.0.0.1"
        )
    if token is not None and (len(token) < LEAST_TOKEN or not token.isascii()):
        raise MonitorInvalid(f"a token of {len(token)} characters", expected=f"{LEAST_TOKEN} or more, plain ASCII")
    # A page of elsewhere whose name resolves to 127.0.0.1 must not read the logs.
    hosts = ["127.0.0.1", "localhost", "[::1]"] if token is None else ["*"]
    known_host = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    guard = Middleware(BaseHTTPMiddleware, dispatch=_guard)
    app = Starlette(routes=_routes(), middleware=[known_host, guard], lifespan=_watch)
    app.state.folder, app.state.patience, app.state.token = folder, patience, token
    app.state.statuses, app.state.streams = [], 0
    return app


def _routes() -> list[Any]:
    return [
        Route("/", _page),
        Route("/api/runs", _runs),
        Route("/api/runs/{run}/history", _history),
        Route("/api/training/status", _training_status),
        Route("/api/events", _events),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]


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
        await asyncio.to_thread(_update, app)


def _update(app: Starlette) -> None:
    folder: RunFolder = app.state.folder
    try:
        folder.update()
    except OSError:
        return  # the folder is gone for now; what was read stays
    app.state.statuses = status.of_folder(folder, app.state.patience)


async def _guard(request: Request, call_next: Handler) -> Response:
    token = request.app.state.token
    if token is not None and not _carries(request, token):
        return PlainTextResponse("A token is needed: open /?token=... or send Authorization: Bearer ...", 401)
    if token is not None and "token" in request.query_params:  # out of the address bar, into a cookie
        response: Response = RedirectResponse(request.url.path)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
    else:
        response = await call_next(request)
    response.headers.update(HEADERS)
    return response


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
    return JSONResponse({"runs": request.app.state.statuses})


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


async def _events(request: Request) -> Response:
    """Server-sent events, one a second: the status of every run, and the points of its curves since the last."""
    state = request.app.state
    if state.streams >= MOST_STREAMS:
        return PlainTextResponse(f"{MOST_STREAMS} pages are open already", 503)
    return StreamingResponse(_stream(request), media_type="text/event-stream")


async def _stream(request: Request) -> AsyncIterator[str]:
    state = request.app.state
    state.streams += 1
    last: dict[str, float] = {}
    try:
        while not await request.is_disconnected():
            tails = await asyncio.to_thread(_tails, state.folder, last)
            yield f"data: {json.dumps({'runs': state.statuses, 'tails': tails}, allow_nan=False)}\n\n"
            await asyncio.sleep(EVERY_S)
    finally:
        state.streams -= 1


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


def serve(folder: RunFolder, host: str, port: int, patience: Patience, token: str | None) -> None:
    """Serve until interrupted."""
    import uvicorn

    uvicorn.run(make_app(folder, patience, token, host), host=host, port=port, log_level="warning")
