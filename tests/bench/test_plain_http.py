"""The plain client against a server that it does not know."""

import asyncio

import pytest
from aiohttp import web

from jcb.bench.plain_http import PlainClient


@pytest.fixture
async def url(aiohttp_server):
    peers = []

    async def echo(request):
        peers.append(request.transport)
        return web.Response(body=await request.read(), status=429 if request.method == "POST" else 200)

    async def drop(request):
        request.transport.abort()
        return web.Response()

    async def stream(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        return response

    app = web.Application()
    app.router.add_route("*", "/", echo)
    app.router.add_get("/drop", drop)
    app.router.add_get("/stream", stream)
    server = await aiohttp_server(app)
    return f"http://127.0.0.1:{server.port}", peers


async def test_answers_come_whole_and_connections_are_used_again(url):
    address, peers = url
    body = b"\r\n\r\n" + bytes(range(256)) * 1000  # more than one read
    async with PlainClient(address) as client:
        for _ in range(3):
            assert await client.post("/", body) == (429, body)
        assert await client.get("/") == (200, b"")
        assert len(set(map(id, peers))) == 1
        answers = await asyncio.gather(*[client.post("/", b"%d" % i) for i in range(20)])
        assert answers == [(429, b"%d" % i) for i in range(20)]


async def test_a_broken_connection_and_an_endless_answer_are_errors(url):
    async with PlainClient(url[0]) as client:
        with pytest.raises(ConnectionResetError):
            await client.get("/drop")
        with pytest.raises(ValueError, match="Content-Length"):
            await client.get("/stream")
        assert await client.post("/", b"still well") == (429, b"still well")


def test_uvloop_runs_it_too():
    uvloop = pytest.importorskip("uvloop")

    async def echo(request):
        return web.Response(body=await request.read())

    async def ask():
        app = web.Application()
        app.router.add_post("/", echo)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with PlainClient("http://{}:{}".format(*runner.addresses[0])) as client:
            answer = await client.post("/", b"hello")
        await runner.cleanup()
        return answer

    assert asyncio.run(ask(), loop_factory=uvloop.Loop) == (200, b"hello")
