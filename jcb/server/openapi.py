"""GET /openapi.json: the document that describes every route, made from the models that validate."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import jcb
from jcb.server.access import Access
from jcb.server.answers import Error
from jcb.server.fields import LABELS, MAX_LABEL_CHARS, NEUTRAL
from jcb.server.schema import Body

if TYPE_CHECKING:
    from jcb.server.routes import Route

_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_REF = "#/components/schemas/{model}"


async def openapi(request: web.Request) -> web.Response:
    """The document; made when the application is."""
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


def make_document(routes: tuple[Route, ...], *, has_keys: bool) -> bytes:
    """The OpenAPI 3.1 document of `routes`, as JSON."""
    models: list[type[BaseModel]] = [Error]
    models += [model for route in routes for model in (route.body, route.answer) if model is not None]
    _, definitions = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=_REF)
    schemas = definitions["$defs"]
    for body in dict.fromkeys(route.body for route in routes):
        if body is not None:
            _complete(schemas[body.__name__], body, with_extra=any(r.streams for r in routes if r.body is body))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jcb", "version": jcb.__version__},
        "paths": {},
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        document["paths"].setdefault(path, {})[route.method.lower()] = _operation(route, path, has_keys)
    return msgspec.json.encode(document)


def _operation(route: Route, path: str, has_keys: bool) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "It worked"}
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": _ref(route.answer)}
    if route.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    if content:
        good["content"] = content
    error = {"description": "It did not", "content": {"application/json": {"schema": _ref(Error)}}}
    operation: dict[str, Any] = {"summary": route.summary, "responses": {"200": good, "default": error}}
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(route.body)}}}
    if has_keys and route.access is not Access.PUBLIC:
        operation["security"] = [{"key": []}]
    return operation


def _complete(schema: dict[str, Any], model: type[Body], *, with_extra: bool) -> None:
    """Adds what pydantic does not know: null is not given, and the fields that `jcb.server.fields` looks after."""
    required = schema.get("required", [])
    properties = schema["properties"]
    for name, found in properties.items():
        if name not in required:
            properties[name] = {"anyOf": [found, {"type": "null"}]}
    if not with_extra:
        return
    for name, values in NEUTRAL.items():
        if name not in model.model_fields:
            properties[name] = {"enum": [*values, None]}
    for name in LABELS - model.model_fields.keys() - {"metadata"}:  # any printable text, which no pattern can say
        properties[name] = {"type": ["string", "null"], "maxLength": MAX_LABEL_CHARS}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


DOCUMENT = web.AppKey("openapi", bytes)
