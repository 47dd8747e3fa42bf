"""GET /v1/capabilities: what is done with each field of a request, read off the tables that do it."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from jcb.server.fields import LABELS, NEUTRAL
from jcb.server.responses_schema import ResponsesBody
from jcb.server.schema import Body, ChatBody, CompletionBody
from jcb.server.service import SERVICE

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
}


async def capabilities(request: web.Request) -> web.Response:
    """Every known field of every generating path."""
    service = request.app[SERVICE]
    body = {
        "object": "capabilities",
        "model": service.model_name,
        "fields": {path: fields_of(model) for path, model in BODIES.items()},
    }
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def fields_of(model: type[Body]) -> dict[str, dict[str, Any]]:
    """Field → {status, neutral}; names in the order of the alphabet."""
    found: dict[str, dict[str, Any]] = {name: {"status": "label"} for name in LABELS}
    for name, values in NEUTRAL.items():
        found[name] = {"status": "neutral value accepted", "neutral": [*values]} if values else {"status": "refused"}
    for name in model.model_fields:
        found[name] = dict(model.narrow.get(name, {"status": "honoured"}))
    return dict(sorted(found.items()))
