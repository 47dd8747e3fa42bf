"""The outputs of one caller's request on their way from the engine's thread to the caller's coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from jcb.engine.output import RequestOutput


class OutputStream:
    """Batches of outputs of all choices of one request, ended by each choice's finish_reason.

    Lives in the event loop's thread: `put` appends and then wakes, the reader takes the whole list and
    looks again, so a spurious or late wake-up does no harm. The end is an item like any other. Leaving the
    `async with` before the end aborts what is unfinished.
    """

    def __init__(self, request_ids: list[str], abort: Callable[[list[str]], None]) -> None:
        self._unfinished = set(request_ids)  # by what was put
        self._unread = len(request_ids)  # ends that the reader has not seen
        self._items: list[RequestOutput] = []
        self._wake = asyncio.Event()
        self._abort = abort
        self._closed = False

    @property
    def finished(self) -> bool:
        """True when every choice has ended, read or not."""
        return not self._unfinished

    def put(self, output: RequestOutput) -> None:
        """Appends one output; dropped when the reader has left or the choice has already ended."""
        if output.request_id not in self._unfinished:
            return
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        if self._closed:
            return
        self._items.append(output)
        self._wake.set()

    def close(self) -> None:
        """Says that nobody reads any more."""
        if self._closed:
            return
        self._closed = True
        if self._unfinished:
            self._abort(list(self._unfinished))

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        if not self._unread:
            raise StopAsyncIteration
        while not self._items:
            self._wake.clear()
            await self._wake.wait()
        items, self._items = self._items, []
        self._unread -= sum(item.finish_reason is not None for item in items)
        return items

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
