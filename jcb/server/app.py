"""The aiohttp application: its routes, and what every request passes through."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, replace

from aiohttp import web

from jcb.config import ServerConfig
from jcb.server import batch, page
from jcb.server.auth import Keys, auth_middleware, check_bind
from jcb.server.connections import Connection, ConnectionLimit, raise_file_limit
from jcb.server.cors import add_origin, cors_middleware, origins_of
from jcb.server.errors import errors_middleware
from jcb.server.fields import IGNORED, IGNORED_HEADER
from jcb.server.metrics import REGISTRY, create_registry
from jcb.server.openapi import DOCUMENT, make_document
from jcb.server.params import LABEL, check_label
from jcb.server.routes import Route, admin_routes, canonical, routes
from jcb.server.service import SERVICE, Service
from jcb.server.tracing import make_tracer
from jcb.types import RequestError

REQUEST_ID_HEADER = "X-Request-Id"
SHUTDOWN_SECONDS = 5.0


def create_app(service: Service) -> web.Application:
    """The application over `service`; it answers 503 until a model is attached there, and stops its engine at the end.

    Raises ValueError for an API key file without keys and for an address that others reach without one.
    """
    config = service.config
    keys = Keys.read(config)
    check_bind(config, keys)
    service.tracer = make_tracer(config.otlp_endpoint)
    app = _make_app(service, routes(config), keys)
    app.on_cleanup.append(_stop_engine)
    return app


def create_admin_app(service: Service) -> web.Application:
    """What `admin_port` offers on the loopback: there, being on this machine is the key."""
    return _make_app(service, admin_routes(service.config), Keys())


def _make_app(service: Service, served: tuple[Route, ...], keys: Keys) -> web.Application:
    origins = origins_of(service.config.cors_origins)
    access = {(route.method, canonical(route.path)): route.access for route in served}
    app = web.Application(
        middlewares=[errors_middleware, cors_middleware(origins), auth_middleware(keys, access)],
        client_max_size=service.config.max_body_bytes,
    )
    app[SERVICE] = service
    app[REGISTRY] = create_registry(service)
    app[page.FILES] = page.read_files()
    app[DOCUMENT] = make_document(served, has_keys=bool(keys.users))
    for route in served:
        app.router.add_route(route.method, route.path, route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler)
    app.on_shutdown.append(batch.end_events)
    app.on_response_prepare.append(_add_headers)
    app.on_response_prepare.append(add_origin(origins))
    return app


@dataclass(frozen=True, slots=True)
class Listener:
    """An open port."""

    url: str
    port: int
    limit: ConnectionLimit
    runner: web.AppRunner
    sockets: asyncio.Server

    async def close(self) -> None:
        """Closes the port, lets handlers write their last events, and ends the application."""
        self.sockets.close()
        await self.runner.cleanup()


async def listen_admin(service: Service) -> Listener | None:
    """Opens the admin port on the loopback, where the configuration has one."""
    config = service.config
    if not config.admin_port:
        return None
    return await listen(create_admin_app(service), replace(config, host="127.0.0.1", port=config.admin_port))


async def listen(app: web.Application, config: ServerConfig) -> Listener:
    """Opens the port; with port 0 any free one. OSError when it is taken."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # or a handler that waits is never told that its client left
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    raise_file_limit()
    limit = ConnectionLimit(config)
    app[SERVICE].connections = app[SERVICE].connections or limit  # the main port is opened first
    try:
        sockets = await asyncio.get_running_loop().create_server(
            lambda: Connection(server, limit, config), config.host, config.port, backlog=1024
        )
    except BaseException as error:
        await runner.cleanup()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            taken = f"port {config.port} of {config.host} is taken; choose another, as in --port 9000"
            raise OSError(error.errno, taken) from error
        raise
    port = sockets.sockets[0].getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return Listener(f"http://{host}:{port}", port, limit, runner, sockets)


async def _stop_engine(app: web.Application) -> None:
    served = app[SERVICE].served
    if served is not None:
        served.engine.stop()
    app[SERVICE].tracer.close()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Echoes the caller's label and names the fields that changed nothing."""
    try:
        label = check_label(REQUEST_ID_HEADER, request.headers.get(REQUEST_ID_HEADER) or request.get(LABEL))
    except RequestError:
        label = None
    if label is not None:
        response.headers[REQUEST_ID_HEADER] = label
    if ignored := request.get(IGNORED):
        response.headers[IGNORED_HEADER] = ", ".join(ignored)
