"""A running server for the tests of this folder.

The model is a fake one unless JCB_TEST_MODEL names a real one ("default", a file or a folder): then the same tests
run against it, but for those that script the answers (they ask for `scripted`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from jcb.config import ServeConfig, ServerConfig
from jcb.engine.async_engine import AsyncEngine
from jcb.metrics import EngineMetrics
from jcb.server.app import Listener, create_app, listen
from jcb.server.service import Served, Service
from tests.fake_model import ScriptedExecutor, fake_engine

MODEL = os.environ.get("JCB_TEST_MODEL", "")
REAL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "num_pages": 129,
    "page_size": 16,
    "max_queued": 2000,
}
"""The one engine of all tests with a real model; a test that asks for other settings than a long queue is skipped."""


@dataclass
class RunningServer:
    """A server on a free port of the loopback, with one client session."""

    engine: Any
    async_engine: AsyncEngine
    service: Service
    listener: Listener
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.listener.url

    @property
    def executor(self) -> ScriptedExecutor:
        if MODEL:
            pytest.skip("needs a device that can be told what to do")
        return self.engine.executor

    @property
    def is_exact(self) -> bool:
        """Whether programs of different shapes give the same numbers, so that sampled tokens agree between them."""
        return not MODEL

    def slow_down(self, seconds: float) -> None:
        """Makes a step take so long; a real model needs no help."""
        if not MODEL:
            self.engine.executor.step_seconds = seconds

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, str]:
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.text()

    async def complete(self, **fields: Any) -> Any:
        """The body of a completion that must succeed."""
        body = {"model": self.service.model_name, "prompt": "Hello", "max_tokens": 8, "temperature": 0} | fields
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    async def chat(self, **fields: Any) -> Any:
        body = {"model": self.service.model_name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        status, answer = await self.post("/v1/chat/completions", body | {"temperature": 0} | fields)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, which must end with [DONE]; the raw framing is checked too."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            raw = (await response.read()).decode()
        assert "\r" not in raw
        parts = raw.split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") and "\n" not in part for part in parts)
        assert parts.pop() == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts]

    async def until_tokens(self, count: int) -> None:
        """Waits until so many tokens have been generated."""
        async with asyncio.timeout(60):
            while self.async_engine.metrics.generation_tokens.value < count:
                await asyncio.sleep(0.005)

    async def settle(self, seconds: float = 5.0) -> None:
        """Waits until nothing runs, then checks that nothing was lost."""
        deadline = asyncio.get_running_loop().time() + seconds
        scheduler = self.engine.core.scheduler
        while self.engine.core.has_work or self.async_engine.num_open:
            assert asyncio.get_running_loop().time() < deadline, (scheduler.stats(), self.async_engine.num_open)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        stats = scheduler.stats()
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert stats["pages_used"] == 0
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
        scheduler.check_integrity()
        assert len(self.async_engine._processor) == 0
        assert getattr(self.engine.executor, "violations", []) == []


StartServer = Callable[..., Awaitable[RunningServer]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts servers: `await start_server(server=ServerConfig(...), max_num_seqs=2, ...)`; engine: one of your own."""
    running: list[RunningServer] = []

    async def start(
        *,
        server: ServerConfig | None = None,
        engine_options: dict[str, Any] | None = None,
        engine: Any = None,
        **options: Any,
    ) -> RunningServer:
        if (
            MODEL
            and engine is None
            and (options.keys() - {"max_queued"} or options.get("max_queued", REAL["max_queued"]) < 100)
        ):
            pytest.skip("needs an engine of its own")
        if engine is None:
            engine = _real_engine() if MODEL else fake_engine(**options)
        service = Service(config=server or ServerConfig(port=0))
        listener = await listen(create_app(service), service.config)
        async_engine = AsyncEngine(
            engine.core,
            engine.tokenizer,
            engine.info,
            metrics=EngineMetrics(max_num_seqs=8),
            scheduler=engine.config.scheduler,
            **(engine_options or {}),
        )
        service.attach(
            Served(
                engine=async_engine, tokenizer=engine.tokenizer, chat_template=engine.chat_template, info=engine.info
            )
        )
        connector = aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))
        running.append(RunningServer(engine, async_engine, service, listener, session))
        return running[-1]

    yield start
    for server in running:
        await server.session.close()
        await server.listener.close()


@pytest.fixture
async def server(start_server: StartServer) -> AsyncIterator[RunningServer]:
    """A server with nothing special; after the test nothing may be left in it."""
    running = await start_server()
    yield running
    await running.settle()
    assert (await running.get("/health"))[0] == 200


@pytest.fixture
def scripted() -> None:
    """For tests that need answers written by hand."""
    if MODEL:
        pytest.skip("the model's answers cannot be scripted")


@functools.cache
def _real_engine() -> Any:
    """One engine for all tests: compiling is dear, and an idle engine is as good as new."""
    from jcb.engine.build import load_engine
    from jcb.engine.llm import override

    return load_engine(override(ServeConfig(model=MODEL), REAL))
