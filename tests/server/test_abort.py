"""Clients that leave, and servers that stop: nothing is left behind and nobody waits for ever."""

import asyncio
import contextlib
import json
import random
import socket

import aiohttp
import pytest

from jcb.config import ServerConfig
from jcb.engine.async_engine import EngineState

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("key\n")
    return str(path)


async def leave(server, path, body, seconds):
    """Sends a request and cuts the connection after a while; True when the answer came first."""
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer key"}) as session:
        try:
            async with asyncio.timeout(seconds), session.post(server.url + path, json=body) as response:
                async for _ in response.content:
                    pass
                return True
        except TimeoutError:
            return False


async def test_200_disconnects_at_random_points_leave_nothing(start_server, key_file, caplog):
    """Queued, in prefill, between tokens; streaming and not; with a key and with metrics read meanwhile."""
    server = await start_server(server=ServerConfig(port=0, api_key_file=key_file), max_queued=256)
    server.slow_down(0.002)
    rng = random.Random(1)

    async def one(i):
        await asyncio.sleep(rng.random() * 1.5)
        body = {"prompt": [97 + i % 26] * rng.randint(1, 150), "max_tokens": 100, "ignore_eos": True}
        body |= {"stream": rng.random() < 0.5, "n": rng.choice([1, 1, 2]), "temperature": 1, "stop": ["zzz"]}
        path = COMPLETIONS
        if rng.random() < 0.3:
            body["messages"] = [{"role": "user", "content": "x" * len(body.pop("prompt")[:90])}]
            path = CHAT
        return await leave(server, path, body, rng.random() * 0.4)

    async def scrape():
        while True:
            assert (await server.get("/metrics", headers={"Authorization": "Bearer key"}))[0] == 200
            await asyncio.sleep(0.01)

    scraper = asyncio.create_task(scrape())
    finished = await asyncio.gather(*[one(i) for i in range(200)])
    scraper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await scraper
    assert sum(finished) < 100
    await server.settle(3.0)
    server.slow_down(0)
    status, answer = await server.post(
        COMPLETIONS, {"prompt": "Hi", "ignore_eos": True}, headers={"Authorization": "Bearer key"}
    )
    assert (status, answer["usage"]["completion_tokens"]) == (200, 16)
    assert [r for r in caplog.records if r.levelname in ("ERROR", "WARNING")] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_within_a_step(start_server, stream):
    server = await start_server()
    server.executor.step_seconds = 0.01
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    task = asyncio.create_task(leave(server, COMPLETIONS, body, 0.2))
    await asyncio.sleep(0.1)
    assert server.engine.core.scheduler.num_running == 1
    assert not await task
    dispatched = server.executor.num_dispatched
    await server.settle(0.2)
    assert server.executor.num_dispatched <= dispatched + 3


async def test_b045_handlers_cancelled_at_random_points(start_server, caplog):
    """The engine hears of every submission that was left, even one that it had not yet admitted."""
    server = await start_server(max_queued=2000)
    rng = random.Random(2)
    from jcb.types import SamplingParams

    async def one():
        stream = await server.async_engine.submit([[97] * 20], SamplingParams(max_tokens=60, ignore_eos=True))
        async with stream:
            async for _ in stream:
                await asyncio.sleep(0)

    tasks = []
    for _ in range(1000):
        tasks.append(asyncio.create_task(one()))
        for _ in range(rng.randint(0, 4)):
            await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.settle(2.0)
    assert len(caplog.records) == 0


@pytest.mark.usefixtures("scripted")
async def test_a_reader_that_stands_still_is_cut_off_and_hurts_nobody(start_server):
    config = ServerConfig(port=0, stall_seconds=0.3)
    server = await start_server(server=config, max_model_len=1024, num_pages=4096, max_num_seqs=32)
    body = {"prompt": "x", "n": 16, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
    raw = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.listener.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        other = await server.complete(prompt="other", max_tokens=50, ignore_eos=True)
        assert other["usage"]["completion_tokens"] == 50
        await server.settle(8.0)
        await asyncio.sleep(0.5)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(2**16):
                received += data
    assert b"200 OK" in received
    assert b"[DONE]" not in received


@pytest.mark.parametrize("stream", [False, True])
async def test_drain_lets_requests_finish_and_refuses_new_ones(start_server, stream):
    server = await start_server()
    server.slow_down(0.005)
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
    running = asyncio.create_task(
        server.events(COMPLETIONS, body) if stream else server.complete(**body, temperature=1)
    )
    await server.until_tokens(2)
    draining = asyncio.create_task(server.async_engine.drain(60.0))
    await asyncio.sleep(0.02)
    assert (await server.get("/ready"))[0] == 503
    assert (await server.get("/health"))[0] == 503
    assert (await server.get("/live"))[0] == 200
    async with server.session.post(server.url + COMPLETIONS, json=body) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
    answer = await running
    assert len(answer) == 60 if stream else answer["usage"]["completion_tokens"] == 60
    await asyncio.wait_for(draining, 1.0)


async def test_drain_ends_the_rest_with_an_error(start_server):
    server = await start_server()
    server.slow_down(0.01)
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    whole = asyncio.create_task(server.post(COMPLETIONS, body))
    stream = asyncio.create_task(server.events(COMPLETIONS, body))
    await server.until_tokens(4)
    await server.async_engine.drain(0.1)
    status, answer = await whole
    assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert (await stream)[-1]["error"]["code"] == "shutting_down"
    await server.settle()


async def test_an_engine_that_dies_ends_every_request(start_server, caplog):
    server = await start_server()
    server.executor.step_seconds = 0.01
    body = {"prompt": "canary prompt", "max_tokens": 200, "ignore_eos": True}
    whole = asyncio.create_task(server.post(COMPLETIONS, body))
    stream = asyncio.create_task(server.events(COMPLETIONS, body))
    await asyncio.sleep(0.1)

    def broken(*args):
        raise AssertionError(body["prompt"])

    server.engine.core.scheduler.schedule = broken
    status, answer = await asyncio.wait_for(whole, 2)
    assert (status, answer["error"]["code"]) == (503, "engine_lost")
    assert (await asyncio.wait_for(stream, 2))[-1]["error"]["code"] == "engine_lost"
    assert server.async_engine.state is EngineState.DEAD
    assert (await server.get("/health"))[0] == 503
    assert (await server.post(COMPLETIONS, body))[0] == 503
    assert "AssertionError" in caplog.text
    assert "canary" not in caplog.text


async def test_a_stalled_engine_is_not_healthy(start_server):
    server = await start_server(engine_options={"watchdog_seconds": 0.2})
    server.executor.step_seconds = 0.6
    task = asyncio.create_task(server.complete(max_tokens=1))
    await asyncio.sleep(0.1)
    assert (await server.get("/health"))[0] == 200
    await asyncio.sleep(0.3)
    assert (await server.get("/health"))[0] == 503
    assert server.async_engine.state is EngineState.STALLED
    await task
    await server.settle()
    assert (await server.get("/health"))[0] == 200


async def test_a_queue_timeout_has_a_status_of_its_own(start_server):
    server = await start_server(max_num_seqs=1, queue_timeout=0.1)
    server.executor.step_seconds = 0.01
    first = asyncio.create_task(server.complete(max_tokens=60, ignore_eos=True))
    await asyncio.sleep(0.05)
    for stream in (False, True):
        status, answer = await server.post(COMPLETIONS, {"prompt": "late", "stream": stream})
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
    await first


async def test_b105_500_at_once_in_a_tiny_pool(start_server):
    """Least lengths in a pool that holds a few of them: estimates of what is left must not run it dry."""
    server = await start_server(
        server=ServerConfig(port=0, max_connections_per_peer=1000),
        num_pages=9, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=16,
        max_queued=1000, max_queued_tokens=10_000,
    )  # fmt: skip
    fields = ({"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 2, "min_tokens": 2})
    bodies = [{"prompt": [97 + i % 26] * (1 + i % 9), "ignore_eos": True, **fields[i % 3]} for i in range(500)]
    answers = await asyncio.gather(*[server.complete(**body) for body in bodies])
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["usage"]["completion_tokens"] == body["max_tokens"]
    await server.settle()
