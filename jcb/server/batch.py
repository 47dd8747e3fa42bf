"""GET /v1/batch/events: the live batch as it steps, for the playground; and the knobs that may be turned meanwhile.

Events carry numbers only: slots, lengths, pages, times. Sequences go by numbers of the feed's own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from pydantic import ConfigDict

from jcb.engine.async_engine import AsyncEngine
from jcb.engine.feed import Entry, Watcher
from jcb.server.schema import Body
from jcb.server.service import SERVICE, Service
from jcb.server.sse import EventStream
from jcb.types import RequestError

POLL_SECONDS = 0.1
"""How often new steps are sent: readers get batches, and the engine's thread wakes nobody."""

STATUS_SECONDS = 1.0
MAX_STEPS = 64
"""Most steps in one event, so that a slow reader has little waiting for it."""

HOW_TO_ALLOW = "start the server with --live-knobs to change them here"


class KnobsBody(Body):
    """POST /v1/batch/knobs; what is left out stays."""

    model_config = ConfigDict(extra="forbid")

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    policy: str | None = None


async def events(request: web.Request) -> web.StreamResponse:
    """The state of the batch, then every step, for as long as the reader stays and the server runs."""
    service = request.app[SERVICE]
    engine = service.require().engine
    if request.method == "HEAD":
        return web.Response(content_type="text/event-stream", charset="utf-8")
    watcher = engine.feed.watch()
    try:
        stream = EventStream(request)
        await stream.open()
        stream.add(_state(engine, watcher))
        told = 0.0
        loop = asyncio.get_running_loop()
        while not (service.is_closing or engine.is_draining):
            if loop.time() - told >= STATUS_SECONDS:
                told = loop.time()
                stream.add(_status(service, engine))
            while _add_steps(stream, engine, watcher):
                await stream.flush()
            await stream.flush()
            await asyncio.sleep(POLL_SECONDS)
        return await stream.finish()
    finally:
        watcher.close()


async def knobs(request: web.Request) -> web.Response:
    """Every knob with its value and bounds, and whether it may be turned."""
    service = request.app[SERVICE]
    return _answer(service, service.require().engine)


async def turn_knobs(request: web.Request) -> web.Response:
    """Turns knobs between two steps, all or none; 415 unless the body is called JSON, which no form can do."""
    service = request.app[SERVICE]
    engine = service.require().engine
    if request.content_type != "application/json":
        raise RequestError("Content-Type must be application/json", status=415, code="unsupported_media_type")
    body = await KnobsBody.read(request, service)
    await engine.turn(body.model_dump(exclude={"model"}, exclude_none=True))
    return _answer(service, engine)


async def end_events(app: web.Application) -> None:
    """Lets the streams end, so that closing the server does not wait for them."""
    app[SERVICE].is_closing = True


def _add_steps(stream: EventStream, engine: AsyncEngine, watcher: Watcher) -> bool:
    """Adds what is new; whether there may be more."""
    entries = watcher.take(MAX_STEPS)
    if entries is None:
        stream.add(_state(engine, watcher))
        return True
    if entries:
        stream.add({"object": "batch.steps", "steps": [_encoded(entry) for entry in entries]})
    return len(entries) == MAX_STEPS


def _encoded(entry: Entry) -> msgspec.Raw:
    if not entry.encoded:
        entry.encoded = msgspec.json.encode({"step": entry.number} | entry.fields)
    return msgspec.Raw(entry.encoded)


def _state(engine: AsyncEngine, watcher: Watcher) -> dict[str, Any]:
    """Where a reader starts, at first and again after it lost steps."""
    limits, scheduler = engine.info.limits, engine.core.scheduler
    return {
        "object": "batch.state",
        "step": watcher.last,
        "lost": watcher.lost,
        "slots": scheduler.ceiling.max_num_seqs,
        "max_tokens": scheduler.ceiling.max_num_batched_tokens,
        "page_size": limits.page_size if limits is not None else 0,
        "pages": limits.usable_pages if limits is not None else 0,
        "sequences": engine.feed.guests(),
        "knobs": scheduler.knobs(),
    }


def _status(service: Service, engine: AsyncEngine) -> dict[str, Any]:
    metrics = engine.metrics
    return {
        "object": "batch.status",
        "model": service.model_name,
        "running": int(metrics.num_requests_running.value),
        "waiting": int(metrics.num_requests_waiting.value),
        "refused": int(metrics.admission_rejections.value),
        "compiles_after_ready": int(metrics.compiles_after_ready.value),
        "knobs": engine.core.scheduler.knobs(),
    }


def _answer(service: Service, engine: AsyncEngine) -> web.Response:
    can_change = service.config.live_knobs
    body = {
        "object": "knobs",
        "can_change": can_change,
        "hint": "" if can_change else HOW_TO_ALLOW,
        "knobs": engine.core.scheduler.knobs(),
    }
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
