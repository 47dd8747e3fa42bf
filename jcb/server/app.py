"""The aiohttp application: its routes, and what every request passes through."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from jcb.config import ServerConfig
from jcb.server import health, models, tokens
from jcb.server.auth import auth_middleware, check_bind, read_keys
from jcb.server.chat import chat_completions
from jcb.server.completions import completions
from jcb.server.connections import Connection, ConnectionLimit, raise_file_limit
from jcb.server.errors import errors_middleware
from jcb.server.fields import IGNORED, IGNORED_HEADER
from jcb.server.metrics import REGISTRY, create_registry, metrics
from jcb.server.params import LABEL, check_label
from jcb.server.service import SERVICE, Service
from jcb.types import RequestError

REQUEST_ID_HEADER = "X-Request-Id"
SHUTDOWN_SECONDS = 5.0


def create_app(service: Service) -> web.Application:
    """The application over `service`; it answers 503 until a model is attached there, and stops its engine at the end.

    Raises ValueError for an API key file without keys and for an address that others reach without one.
    """
    config = service.config
    keys = read_keys(config.api_key_file)
    check_bind(config, keys)
    app = web.Application(
        middlewares=[errors_middleware, auth_middleware(keys)],
        client_max_size=config.max_body_bytes,
    )
    app[SERVICE] = service
    app[REGISTRY] = create_registry(service)
    app.router.add_get("/live", health.live)
    app.router.add_get("/ready", health.ready)
    app.router.add_get("/health", health.health)
    app.router.add_get("/version", health.version)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{id:.+}", models.get_model)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/tokenize", tokens.tokenize)
    app.router.add_post("/detokenize", tokens.detokenize)
    app.on_response_prepare.append(_add_headers)
    app.on_cleanup.append(_stop_engine)
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
    try:
        sockets = await asyncio.get_running_loop().create_server(
            lambda: Connection(server, limit, config), config.host, config.port, backlog=1024
        )
    except BaseException:
        await runner.cleanup()
        raise
    port = sockets.sockets[0].getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return Listener(f"http://{host}:{port}", port, limit, runner, sockets)


async def _stop_engine(app: web.Application) -> None:
    served = app[SERVICE].served
    if served is not None:
        served.engine.stop()


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
