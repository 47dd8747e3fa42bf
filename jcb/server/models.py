"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jcb.server.service import SERVICE, Service


async def list_models(request: web.Request) -> web.Response:
    """The one model served."""
    service = request.app[SERVICE]
    return web.json_response({"object": "list", "data": [_card(service)]})


async def get_model(request: web.Request) -> web.Response:
    """The model by its name, or 404."""
    service = request.app[SERVICE]
    service.require()
    service.check_model(request.match_info["id"])
    return web.json_response(_card(service))


def _card(service: Service) -> dict[str, Any]:
    served = service.require()
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "jcb",
        "root": served.info.name,
        "parent": None,
        "max_model_len": served.info.max_model_len,
    }
