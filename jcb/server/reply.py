"""An engine's stream as an HTTP response: events as they come, or one body at the end.

What an answer looks like is a Shape's business; order, errors, usage and the end are the same for all.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from aiohttp import web

from jcb.engine.choice import Choice
from jcb.engine.output import RequestOutput
from jcb.engine.stream import OutputStream
from jcb.server.errors import internal_error
from jcb.server.gather import Gatherer
from jcb.server.service import SERVICE
from jcb.server.sse import EventStream
from jcb.server.tracing import Trace
from jcb.server.usage import UsageCounter
from jcb.types import RequestError

Event = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes an answer. `usage` counts what was given so far; `interval`: tokens an event."""

    names_events: bool  # whether an event's `type` is also its SSE name
    ends_with_done: bool
    interval: int
    usage: UsageCounter

    def adjust(self, output: RequestOutput) -> RequestOutput:
        """What of an output counts."""
        ...

    def opening(self) -> list[Event]:
        """Events before the first token."""
        ...

    def events(self, output: RequestOutput) -> list[Event]:
        """The events of one output."""
        ...

    def closing(self) -> list[Event]:
        """Events after the last token."""
        ...

    def failure(self, error: RequestError) -> Event:
        """The event that tells of an error."""
        ...

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...


async def reply(request: web.Request, stream: OutputStream, shape: Shape, *, streams: bool) -> web.StreamResponse:
    """Answers `request` with what `stream` gives, and tells the tracer what became of it."""
    trace = request.app[SERVICE].tracer.begin(request)
    try:
        async with stream:
            return await (_stream(request, stream, shape, trace) if streams else _collect(stream, shape, trace))
    except BaseException as error:
        trace.fail(error)
        raise
    finally:
        trace.end(shape.usage)


async def _collect(stream: OutputStream, shape: Shape, trace: Trace) -> web.Response:
    """Reads to the end and answers with one body; a failed choice fails the response."""
    choices: dict[int, Choice] = {}
    async for outputs in stream:
        for output in map(shape.adjust, outputs):
            if output.error is not None:
                raise output.error
            shape.usage.add(output)
            trace.add(output)
            choices.setdefault(output.index, Choice(index=output.index)).absorb(output)
    body = shape.whole([choices[index] for index in sorted(choices)])
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _stream(request: web.Request, stream: OutputStream, shape: Shape, trace: Trace) -> web.StreamResponse:
    """One event a token. The headers wait for the first output, so that a refusal still has its status."""
    first = await anext(stream)
    if first[0].error is not None:
        raise first[0].error
    events = EventStream(request, names=shape.names_events)
    await events.open()
    try:
        await _write_events(events, stream, first, shape, trace)
    except RequestError as error:
        trace.fail(error)
        events.add(shape.failure(error))
    except ConnectionResetError:
        raise
    except Exception as error:
        trace.fail(error)
        events.add(shape.failure(internal_error(error)))
    return await events.finish(done=shape.ends_with_done)


async def _write_events(
    events: EventStream, stream: OutputStream, outputs: list[RequestOutput], shape: Shape, trace: Trace
) -> None:
    gatherer = Gatherer(shape.interval)
    events.extend(shape.opening())
    while outputs:
        for output in gatherer.take(map(shape.adjust, outputs)):
            if output.error is not None:
                raise output.error
            shape.usage.add(output)
            trace.add(output)
            events.extend(shape.events(output))
        await events.flush()
        outputs = await anext(stream, [])
    events.extend(shape.closing())
