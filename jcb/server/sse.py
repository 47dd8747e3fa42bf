"""Server-sent events as every client reads them: `data: {json}`, a blank line, and [DONE] at the end."""

from __future__ import annotations

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """An open event stream. Events are gathered and written together, one `flush` a batch."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()

    async def open(self) -> None:
        """Sends the headers; from here on an error can only be an event."""
        await self._response.prepare(self._request)

    def add(self, event: object) -> None:
        """Appends one event to what the next `flush` writes."""
        self._buffer += b"data: "
        self._buffer += self._encoder.encode(event)
        self._buffer += b"\n\n"

    async def flush(self) -> None:
        """Writes what was added; ConnectionResetError when the reader is gone (`connections` cuts off slow ones)."""
        if not self._buffer:
            return
        data, self._buffer = bytes(self._buffer), bytearray()
        await self._response.write(data)

    async def finish(self) -> web.StreamResponse:
        """Writes [DONE] and ends the response."""
        self._buffer += b"data: [DONE]\n\n"
        await self.flush()
        await self._response.write_eof()
        return self._response
