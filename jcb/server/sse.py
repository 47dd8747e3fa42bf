"""Server-sent events as every client reads them: `data: {json}`, a blank line, and [DONE] at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """An open event stream. Events are gathered and written together, one `flush` a batch.

    names: an event's `type` is sent as its SSE name too.
    """

    def __init__(self, request: web.Request, *, names: bool = False) -> None:
        self._request = request
        self._names = names
        self._response = web.StreamResponse(headers=_HEADERS)
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()

    async def open(self) -> None:
        """Sends the headers; from here on an error can only be an event."""
        await self._response.prepare(self._request)

    def extend(self, events: Iterable[dict[str, Any]]) -> None:
        """Appends events to what the next `flush` writes."""
        for event in events:
            self.add(event)

    def add(self, event: dict[str, Any]) -> None:
        """Appends one event."""
        if self._names:
            self._buffer += f"event: {event['type']}\n".encode()
        self._buffer += b"data: "
        self._buffer += self._encoder.encode(event)
        self._buffer += b"\n\n"

    async def flush(self) -> None:
        """Writes what was added; ConnectionResetError when the reader is gone (`connections` cuts off slow ones)."""
        if not self._buffer:
            return
        data, self._buffer = bytes(self._buffer), bytearray()
        await self._response.write(data)

    async def finish(self, *, done: bool = True) -> web.StreamResponse:
        """Writes [DONE], if it is to be, and ends the response."""
        if done:
            self._buffer += b"data: [DONE]\n\n"
        await self.flush()
        await self._response.write_eof()
        return self._response
