"""An engine's stream as an HTTP response: events one a token, or one body at the end.

What a body looks like is a Shape's business; order, errors, usage and the end are the same for all.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from aiohttp import web

from jcb.engine.choice import Choice
from jcb.engine.output import RequestOutput
from jcb.engine.stream import OutputStream
from jcb.server.errors import error_object, internal_error
from jcb.server.schema import StreamOptions
from jcb.server.sse import EventStream
from jcb.server.usage import UsageCounter
from jcb.types import RequestError


class Shape(Protocol):
    """How one endpoint writes its choices."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self) -> list[dict[str, Any]]:
        """Chunk fields of events before the first token."""
        ...

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Chunk fields of the events of one output."""
        ...

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        ...

    def extras(self, choices: list[Choice]) -> dict[str, Any]:
        """Fields of the whole body beside the choices."""
        ...


Adjust = Callable[[RequestOutput], RequestOutput]


async def collect_reply(
    stream: OutputStream, shape: Shape, usage: UsageCounter, model: str, adjust: Adjust
) -> web.Response:
    """Reads to the end and answers with one body; a failed choice fails the response."""
    choices: dict[int, Choice] = {}
    async for outputs in stream:
        for output in map(adjust, outputs):
            if output.error is not None:
                raise output.error
            usage.add(output)
            choices.setdefault(output.index, Choice(index=output.index)).absorb(output)
    ordered = [choices[index] for index in sorted(choices)]
    body = {
        **_head(shape.id_prefix, shape.object, model),
        "choices": [shape.choice(choice) for choice in ordered],
        "usage": usage.usage(),
        **shape.extras(ordered),
    }
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def stream_reply(
    request: web.Request,
    stream: OutputStream,
    shape: Shape,
    usage: UsageCounter,
    model: str,
    adjust: Adjust,
    options: StreamOptions | None,
) -> web.StreamResponse:
    """One event a token. The headers wait for the first output, so that a refusal still has its status."""
    first = await anext(stream)
    if first[0].error is not None:
        raise first[0].error
    events = EventStream(request)
    head = _head(shape.id_prefix, shape.chunk_object, model)
    await events.open()
    try:
        await _write_events(events, stream, first, shape, usage, head, adjust, options or StreamOptions())
    except RequestError as error:
        events.add(error_object(error))
    except ConnectionResetError:
        raise
    except Exception as error:
        events.add(error_object(internal_error(error)))
    return await events.finish()


async def _write_events(
    events: EventStream,
    stream: OutputStream,
    outputs: list[RequestOutput],
    shape: Shape,
    usage: UsageCounter,
    head: dict[str, Any],
    adjust: Adjust,
    options: StreamOptions,
) -> None:
    def chunk(fields: dict[str, Any]) -> dict[str, Any]:
        if options.continuous_usage_stats:
            return head | fields | {"usage": usage.usage()}
        return head | fields | ({"usage": None} if options.include_usage else {})

    for fields in shape.opening():
        events.add(chunk(fields))
    while outputs:
        for output in map(adjust, outputs):
            if output.error is not None:
                raise output.error
            usage.add(output)
            for fields in shape.chunks(output):
                events.add(chunk(fields))
        await events.flush()
        outputs = await anext(stream, [])
    if options.include_usage:
        events.add(head | {"choices": [], "usage": usage.usage()})


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
