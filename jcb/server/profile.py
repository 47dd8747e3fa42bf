"""POST /start_profile and /stop_profile: an admin's look at what the device does. There only with a profile folder."""

from __future__ import annotations

import asyncio

from aiohttp import web

from jcb.server.service import SERVICE
from jcb.types import RequestError


async def start(request: web.Request) -> web.Response:
    """Begins to record; 409 when it is being done."""
    service = request.app[SERVICE]
    profiler = service.require().profiler
    if profiler is None:
        raise RequestError("this engine has no profiler", status=501, code="no_profiler")
    if service.is_profiling:
        raise RequestError("a profile is being recorded", status=409, code="profiling")
    service.is_profiling = True
    try:
        await asyncio.to_thread(profiler.start, service.config.profile_folder)
    except BaseException:
        service.is_profiling = False
        raise
    return web.json_response({"status": "started"})


async def stop(request: web.Request) -> web.Response:
    """Ends the recording and writes it; 409 when there is none."""
    service = request.app[SERVICE]
    profiler = service.require().profiler
    if profiler is None or not service.is_profiling:
        raise RequestError("no profile is being recorded", status=409, code="not_profiling")
    service.is_profiling = False
    await asyncio.to_thread(profiler.stop)
    return web.json_response({"status": "stopped"})
