"""API keys: deny by default on every route, keys from a file, compared in constant time."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from jcb.config import ServerConfig
from jcb.types import RequestError

PUBLIC_ROUTES = frozenset({"/live", "/ready", "/health"})
TENANT = web.RequestKey("tenant", str)


def read_keys(path: str) -> tuple[bytes, ...]:
    """One key a line, blank lines and # comments aside; ValueError when there is none or no such file."""
    if not path:
        return ()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"api_key_file={path!r} cannot be read as text: {type(error).__name__}") from None
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line.encode() for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"api_key_file={path!r} holds no key: write one a line, or leave the option out")
    return keys


def check_bind(config: ServerConfig, keys: tuple[bytes, ...]) -> None:
    """ValueError for an address others can reach with no key to keep them out."""
    if keys or config.insecure or _is_loopback(config.host):
        return
    raise ValueError(
        f"host={config.host!r} can be reached from outside and no API key is set: "
        "give --api-key-file, bind to 127.0.0.1, or say --insecure"
    )


def auth_middleware(keys: tuple[bytes, ...]) -> Middleware:
    """Lets a request through when its resolved route is public or its bearer token is one of `keys`."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if not keys or (resource is not None and resource.canonical in PUBLIC_ROUTES):
            request[TENANT] = ""
            return await handler(request)
        index = _find(keys, request.headers.get("Authorization", ""))
        if index is None:
            raise RequestError(
                "a valid API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )
        request[TENANT] = str(index)
        return await handler(request)

    return middleware


def _find(keys: tuple[bytes, ...], header: str) -> int | None:
    scheme, _, token = header.partition(" ")
    presented = token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
    found = None
    for index, key in enumerate(keys):  # all of them: the time must not tell which one is near
        if hmac.compare_digest(key, presented):
            found = index
    return found


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
