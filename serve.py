"""The whole server, wired in one place: arguments → config → engine → aiohttp app.

    python serve.py [--model PATH] [--port 8000] ...        the same as `jcb serve`

The port answers at once: /live says 200 while the model loads and compiles, /ready says 503 until it can be used.
SIGTERM or Ctrl-C lets running requests finish; a second one ends everything now.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from typing import NoReturn

from jcb.cli import serve_main
from jcb.config import ServeConfig


def run(config: ServeConfig) -> int:
    """Serves until a signal; the exit status."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(config))


async def serve(config: ServeConfig) -> int:
    """Listens, loads, answers, drains."""
    from jcb.engine.async_engine import AsyncEngine
    from jcb.engine.build import load_engine
    from jcb.engine.profile import DeviceProfiler
    from jcb.server.app import create_app, listen, listen_admin
    from jcb.server.auth import Keys
    from jcb.server.service import Served, Service
    from jcb.terminal import load_progress

    stop = _stop_event()
    service = Service(config=config.server)
    listener = await listen(create_app(service), config.server)
    admin = await listen_admin(service)
    print(f"jcb listens on {listener.url} and loads {config.model!r} ...", file=sys.stderr, flush=True)

    with load_progress() as show:

        def progress(stage: str, done: int, total: int) -> None:
            service.progress(stage, done, total)
            show(stage, done, total)

        loading = asyncio.create_task(asyncio.to_thread(load_engine, config, progress=progress))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        os._exit(0)  # told to stop while loading: nothing to drain, and the thread cannot be interrupted
    engine = await loading

    async_engine = AsyncEngine(
        engine.core,
        engine.tokenizer,
        engine.info,
        metrics=engine.metrics,
        seed=config.engine.seed,
        scheduler=config.scheduler,
    )
    service.attach(
        Served(
            engine=async_engine,
            tokenizer=engine.tokenizer,
            chat_template=engine.chat_template,
            info=engine.info,
            defaults=engine.generation_defaults,
            profiler=DeviceProfiler(),
        )
    )
    print(_welcome(listener.url, service.model_name, bool(Keys.read(config.server).users)), flush=True)

    broken = asyncio.create_task(async_engine.until_broken())
    await asyncio.wait({stopped, broken}, return_when=asyncio.FIRST_COMPLETED)
    if broken.done():
        _leave_broken(broken.result())
    broken.cancel()
    print("stopping: running requests may finish ...", file=sys.stderr, flush=True)
    await async_engine.drain(config.server.drain_seconds)
    await listener.close()
    if admin is not None:
        await admin.close()
    return 0


def _leave_broken(state: str) -> NoReturn:
    """Says where every thread stands and ends the process, for whoever watches it to start a new one."""
    print(f"the engine is {state}; ending", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def _stop_event() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


def _welcome(url: str, model: str, has_key: bool) -> str:
    header = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"\njcb is ready: {url}\n\n"
        f"  curl -N {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\\n    -d '{body}'\n"
    )


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed (it has no Windows build)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(serve_main())
