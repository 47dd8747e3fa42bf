"""A client for load that costs next to nothing: what it spends on this machine the server cannot.

HTTP/1.1 with answers that state their length, one at a time a connection; connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import re
from typing import Self, cast
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class _Connection(asyncio.Protocol):
    """One connection; `answer` is set while a request waits on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's have the methods, not the class

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, rest = self._got.partition(b"\r\n\r\n")
        if not end or self.answer is None:
            return
        length = _LENGTH.search(head + b"\r\n")
        if length is None:
            self._settle(ValueError("an answer without Content-Length"))
        elif len(rest) >= int(length[1]):
            self._got = b""
            self._settle((int(head[9:12]), rest))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._settle(ConnectionResetError("the server closed the connection"))

    def _settle(self, result: tuple[int, bytes] | Exception) -> None:
        answer, self.answer = self.answer, None
        if answer is None or answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


class PlainClient:
    """Asks one server; close it, or use it in `async with`."""

    def __init__(self, url: str) -> None:
        """url: of the server, without a path."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a JSON body; ConnectionError when the connection breaks."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return await self._ask(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        return await self._ask(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        connection = None
        while self._idle and connection is None:
            connection = self._idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                connection = None
        if connection is None:
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        if connection.transport is None:
            raise ConnectionResetError("the server closed the connection")
        connection.answer = loop.create_future()
        connection.transport.write(request)
        try:
            answer = await connection.answer
        except BaseException:
            if connection.transport is not None:
                connection.transport.abort()
            raise
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Closes what is open."""
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.sleep(0)
