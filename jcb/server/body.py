"""A request's body as a JSON object: bounded in bytes, time and depth, and nothing but valid JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from jcb.types import RequestError

MAX_DEPTH = 64


async def read_body(request: web.Request, seconds: float) -> bytes:
    """The body's bytes, `seconds` to arrive; RequestError 408 or 400, HTTPException 413."""
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise RequestError("the body did not arrive in time", status=408, code="body_timeout") from None
    except web.RequestPayloadError:
        raise RequestError("the body is not encoded as its headers say", code="invalid_encoding") from None


def decode_object(raw: bytes) -> dict[str, Any]:
    """`raw` as a JSON object. Top-level nulls are left out: null means not given."""
    body = decode(raw)
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return {name: value for name, value in body.items() if value is not None}


def decode(raw: bytes) -> object:
    """`raw` as JSON, or RequestError 400. NaN and Infinity are not JSON, nor are lone surrogates."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        reason = str(error) if raw else "it is empty"
        raise RequestError(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise _too_deep()


def _children(node: object) -> list[object]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in children if isinstance(child, dict | list)]


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
