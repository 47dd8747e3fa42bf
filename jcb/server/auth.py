"""API keys: deny by default on every route, keys from a file or the environment, compared in constant time."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from jcb.config import ServerConfig
from jcb.server.access import Access
from jcb.types import RequestError

TENANT = web.RequestKey("tenant", str)
KEYS_VARIABLE = "JCB_API_KEYS"
"""Environment variable with keys, one a line, beside those of the file."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of users and of admins; an admin's serve a user's routes too."""

    users: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, config: ServerConfig, environment: Mapping[str, str] = os.environ) -> Keys:
        """The keys an operator gave; ValueError for a file without any."""
        own = tuple(_lines(environment.get(KEYS_VARIABLE, "")))
        users = read_keys("api_key_file", config.api_key_file) + own
        admins = read_keys("admin_key_file", config.admin_key_file)
        if admins and not users:
            raise ValueError("admin_key_file is set but api_key_file is not: users would need no key at all")
        return cls(users, admins)

    def tenant(self, header: str) -> str | None:
        """Whose key an Authorization header presents: "0", "1" … for users, "admin0" … for admins; None: nobody's."""
        scheme, _, token = header.partition(" ")
        presented = token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        found = None
        for prefix, keys in (("", self.users), ("admin", self.admins)):
            for index, key in enumerate(keys):  # all of them: the time must not tell which one is near
                if hmac.compare_digest(key, presented):
                    found = f"{prefix}{index}"
        return found


def read_keys(name: str, path: str) -> tuple[bytes, ...]:
    """One key a line, blank lines and # comments aside; ValueError when there is none or no such file."""
    if not path:
        return ()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{name}={path!r} cannot be read as text: {type(error).__name__}") from None
    keys = tuple(_lines(text))
    if not keys:
        raise ValueError(f"{name}={path!r} holds no key: write one a line, or leave the option out")
    return keys


def check_bind(config: ServerConfig, keys: Keys) -> None:
    """ValueError for an address others can reach with no key to keep them out."""
    if keys.users or config.insecure or _is_loopback(config.host):
        return
    raise ValueError(
        f"host={config.host!r} can be reached from outside and no API key is set: "
        "give --api-key-file, bind to 127.0.0.1, or say --insecure"
    )


def auth_middleware(keys: Keys, access: Mapping[tuple[str, str], Access]) -> Middleware:
    """Lets a request through when its caller may use the resolved route. access: by its method and canonical path."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        needed = access.get((method, resource.canonical), Access.USER) if resource is not None else Access.USER
        request[TENANT] = ""
        if needed is Access.PUBLIC:
            return await handler(request)
        if keys.users:
            tenant = keys.tenant(request.headers.get("Authorization", ""))
            if tenant is None:
                raise RequestError(
                    "a valid API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key"
                )
            request[TENANT] = tenant
        if needed is Access.ADMIN or (needed is Access.WATCHER and len(keys.users) > 1):
            _check_admin(request, keys)
        return await handler(request)

    return middleware


def _check_admin(request: web.Request, keys: Keys) -> None:
    """With keys only an admin's will do; without any, only this machine, and no page of another web site on it."""
    if keys.users:
        allowed = request[TENANT].startswith("admin")
    else:
        allowed = _is_loopback(request.remote or "") and _is_own_page(request)
    if not allowed:
        raise RequestError("only an admin may do this", status=403, code="admin_only")


def _is_own_page(request: web.Request) -> bool:
    """False for a browser's request from elsewhere, or to a name that only pretends to be this machine."""
    origin = request.headers.get("Origin")
    try:
        if not _is_loopback(request.url.host or ""):
            return False
        return origin is None or urlsplit(origin).netloc == request.host
    except ValueError:  # no address at all
        return False


def _lines(text: str) -> list[bytes]:
    lines = (line.strip() for line in text.splitlines())
    return [line.encode() for line in lines if line and not line.startswith("#")]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
