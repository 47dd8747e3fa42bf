"""GET /live, /ready, /health, /version: what the outside may ask without a key. They touch plain values only."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

import jcb
from jcb.server.errors import error_object
from jcb.server.service import SERVICE, Service
from jcb.types import RequestError


async def live(request: web.Request) -> web.Response:
    """The event loop turns."""
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """200 without a body when serving, else 503."""
    service = request.app[SERVICE]
    return web.Response() if service.is_ready else _not_ready(service)


async def ready(request: web.Request) -> web.Response:
    """As /health, and says how far loading is."""
    service = request.app[SERVICE]
    if not service.is_ready:
        return _not_ready(service)
    return web.Response(body=msgspec.json.encode(_status(service)), content_type="application/json")


async def version(request: web.Request) -> web.Response:
    """The version of jcb."""
    return web.json_response({"version": jcb.__version__})


def _status(service: Service) -> dict[str, Any]:
    status: dict[str, Any] = {"state": service.state}
    if service.served is None:
        percent = 100.0 * service.done / service.total if service.total else 0.0
        status |= {"stage": service.stage, "percent": round(min(percent, 100.0), 1)}
    return status


def _not_ready(service: Service) -> web.Response:
    word = "draining" if service.served is not None and service.served.engine.is_draining else str(service.state)
    error = RequestError(f"the server is {word}", status=503, code=word)
    body = error_object(error) | _status(service)
    headers = {"Retry-After": "2"}
    return web.Response(status=503, body=msgspec.json.encode(body), content_type="application/json", headers=headers)
