"""Connections before they are requests: how many there may be, how long a head may take, what a broken one is told.

aiohttp reads requests; this adds the bounds it does not have, so that slow, silent or broken peers cost bounded
time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from jcb.config import ServerConfig
from jcb.server.errors import error_response, raw_error, without_content
from jcb.types import RequestError

MAX_HEADERS = 100
MAX_HEADER_BYTES = 8 * 1024
LINGERING_SECONDS = 2.0
"""How long the rest of a refused body is read and dropped, so that its sender gets to read why."""

REFUSED_SECONDS = 1.0
"""How long a connection over the limit is kept to hear why; a client that sends its request first hears it then."""

logger = logging.getLogger("jcb.server.protocol")
logger.addFilter(without_content)  # aiohttp would quote the bytes of broken requests, keys among them


class ConnectionLimit:
    """Counts open connections, in all and by peer address."""

    def __init__(self, config: ServerConfig) -> None:
        self._most, self._most_of_peer = config.max_connections, config.max_connections_per_peer
        self._by_peer: Counter[str] = Counter()
        self.num_open = 0
        self.num_refused = 0

    def enter(self, peer: str) -> bool:
        """Whether one more connection of `peer` may stay; call `leave` when one that may is closed."""
        if self.num_open >= self._most or self._by_peer[peer] >= self._most_of_peer:
            self.num_refused += 1
            return False
        self.num_open += 1
        self._by_peer[peer] += 1
        return True

    def leave(self, peer: str) -> None:
        """A connection of `peer` that was let in is closed."""
        self.num_open -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]


class Connection(web.RequestHandler):
    """aiohttp's connection with bounds on heads and on slow readers, and a place in a ConnectionLimit."""

    __slots__ = ("_config", "_head_timer", "_is_refused", "_limit", "_peer", "_socket", "_write_timer")

    def __init__(self, server: web.Server, limit: ConnectionLimit, config: ServerConfig) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # ty: ignore[invalid-argument-type] (aiohttp's way to have none)
            logger=logger,
            keepalive_timeout=config.idle_seconds,
            lingering_time=LINGERING_SECONDS,
            max_headers=MAX_HEADERS,
            max_field_size=MAX_HEADER_BYTES,
            max_line_size=MAX_HEADER_BYTES,
        )
        self._limit = limit
        self._config = config
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None  # runs while written bytes wait for the reader
        self._socket: asyncio.Transport | None = None  # until it is lost; aiohttp forgets its own before that
        self._peer: str | None = None  # None: not counted
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        peer = _address(transport)
        if self._limit.enter(peer):
            self._peer = peer
            super().connection_made(transport)
            assert self._task_handler is not None
            self._task_handler.add_done_callback(self._closes)
            return
        self._is_refused = True
        self._head_timer = self._loop.call_later(REFUSED_SECONDS, self._refuse)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._socket = None
        self._stop_head_timer()
        self._stop_write_timer()
        if self._peer is not None:
            self._limit.leave(self._peer)
            self._peer = None
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._refuse()
            return
        waits = self._waits_for_head
        super().data_received(data)
        if not self._waits_for_head:
            self._stop_head_timer()
        elif waits and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._config.header_seconds, self._head_is_late)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp could not read or a handler could not finish, as our error body."""
        logger.warning("Error handling request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if isinstance(exc, LineTooLong):
            error = RequestError("a header or the request line is too long", status=431, code="header_too_large")
        elif status < 500:
            error = RequestError("the request is not valid HTTP", status=400, code="invalid_http")
        else:
            error = RequestError("internal error", status=500, code="internal_error")
        response = error_response(error)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Bodies that break off or are packed badly have been answered; they are no news."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError | HttpProcessingError):
            super().log_exception(*args, **kwargs)

    @property
    def _waits_for_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._waits_for_head and self._socket is not None:
            late = RequestError("the request's head did not arrive in time", status=408, code="header_timeout")
            self._socket.write(raw_error(late))
            self.force_close()

    def _refuse(self) -> None:
        self._stop_head_timer()
        if self._socket is not None and not self._socket.is_closing():
            error = RequestError("too many connections", status=503, code="too_many_connections", retry_after=1.0)
            self._socket.write(raw_error(error))
            self._socket.close()
            self._start_write_timer()

    def _closes(self, task: asyncio.Task[None]) -> None:
        """The last response is written; a reader that never takes it must not keep the socket."""
        self._start_write_timer()

    def _start_write_timer(self) -> None:
        if self._write_timer is None and self._socket is not None:
            self._write_timer = self._loop.call_later(self._config.stall_seconds, self._socket.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def raise_file_limit() -> int:
    """Lifts the process's soft limit on open files to its hard limit; the number that now holds."""
    try:
        import resource
    except ImportError:  # Windows
        return 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _address(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""
