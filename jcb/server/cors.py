"""Cross-origin requests: which web pages of other origins may read answers. None unless the operator names them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-Id",
    "Access-Control-Max-Age": "600",
}


def origins_of(text: str) -> frozenset[str]:
    """The origins that a setting lists, with commas between."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def cors_middleware(origins: frozenset[str]) -> Middleware:
    """Answers what browsers ask before a request; `add_origin` puts the header on the request's own answer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if asks and _allowed(request, origins):
            return web.Response(status=204, headers=_PREFLIGHT)
        return await handler(request)

    return middleware


def add_origin(origins: frozenset[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal handler for `on_response_prepare`."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        if _allowed(request, origins):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, x-jcb-ignored-fields, Retry-After"
            response.headers.add("Vary", "Origin")

    return add


def _allowed(request: web.Request, origins: frozenset[str]) -> bool:
    origin = request.headers.get("Origin")
    return origin is not None and (origin in origins or "*" in origins)
