"""Raw sockets: peers that are slow, silent, greedy or wrong cost bounded time and memory, and hurt nobody."""

import asyncio
import contextlib
import json
import socket
import time

import aiohttp
import pytest
import uvloop

from jcb.config import ServerConfig
from jcb.server.app import create_app, listen
from jcb.server.connections import ConnectionLimit, raise_file_limit
from jcb.server.service import Service

BODY = b'{"prompt": "x", "max_tokens": 2, "temperature": 0}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
QUICK = {"header_seconds": 0.3, "body_seconds": 0.3, "idle_seconds": 0.5, "stall_seconds": 0.3}


async def talk(port, *parts, pause=0.0, seconds=5.0):
    """Everything the server answers to `parts`, sent with pauses, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(seconds):
            sending = asyncio.create_task(send(writer, parts, pause))
            answer = await reader.read()
            sending.cancel()
            return answer
    finally:
        writer.close()


async def send(writer, parts, pause):
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause)


def error_of(answer):
    """Status and code of the one response in `answer`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head, answer
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


async def gone(server, seconds=3.0):
    """Waits until only the client session's own connections are left."""
    async with asyncio.timeout(seconds):
        while server.listener.limit.num_open > 1:
            await asyncio.sleep(0.02)


@pytest.fixture
async def quick(start_server):
    server = await start_server(server=ServerConfig(port=0, **QUICK))
    yield server
    await gone(server)
    await server.settle()
    assert (await server.get("/health"))[0] == 200


async def test_a_slow_head_is_cut_off_however_steady(quick):
    for pause, head in ((0.0, [HEAD[:9]]), (0.02, [bytes([byte]) for byte in HEAD * 3])):
        began = time.monotonic()
        answer = await talk(quick.listener.port, *head, pause=pause)
        assert error_of(answer) == (408, "header_timeout")
        assert 0.2 < time.monotonic() - began < 1.0


async def test_a_slow_second_head_is_cut_off_too(quick):
    answer = await talk(quick.listener.port, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /li", pause=0.1)
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert error_of(b"HTTP/1.1 " + second) == (408, "header_timeout")


async def test_a_silent_connection_is_closed(quick):
    assert await talk(quick.listener.port) == b""


async def test_a_slow_body_is_a_408(quick):
    for parts in (
        [HEAD + LENGTH],
        [HEAD + LENGTH, *[b" "] * 20],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n"],
    ):
        began = time.monotonic()
        answer = await talk(quick.listener.port, *parts, pause=0.05)
        assert error_of(answer) == (408, "body_timeout")
        assert time.monotonic() - began < 3.0


async def test_a_half_closed_connection_is_let_go(quick):
    for part in (HEAD + LENGTH + BODY, HEAD + LENGTH, HEAD, b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", quick.listener.port)
        writer.write(part)
        writer.write_eof()
        async with asyncio.timeout(3):
            await reader.read()
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"X" * 9000 + b": a\r\n\r\n", 431),
        (b"".join(b"X-%d: a\r\n" % i for i in range(101)) + b"\r\n", 400),
        (b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"Content-Length: -1\r\n\r\n", 400),
        (b"Content-Length: +5\r\n\r\nabcde", 400),
        (b"Content-Length: 1e9\r\n\r\n", 400),
        (b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400),
        (b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"bad header\r\n\r\n", 400),
        (b"X: a\x00b\r\n\r\n", 400),
        (b" folded: a\r\n\r\n", 400),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
async def test_heads_that_must_not_pass(quick, head, status):
    answer = await talk(quick.listener.port, HEAD + head)
    assert error_of(answer)[0] == status


async def test_a_request_line_of_8_kib_is_the_most(quick):
    answer = await talk(quick.listener.port, b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert error_of(answer) == (431, "header_too_large")
    answer = await talk(quick.listener.port, b"NONSENSE\r\n\r\n")
    assert error_of(answer) == (400, "invalid_http")


async def test_pipelined_requests_are_answered_in_order(quick):
    bodies = [b'{"prompt": "%d", "max_tokens": 1, "echo": true, "temperature": 0}' % i for i in range(40)]
    requests = [HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies]
    answer = await talk(quick.listener.port, b"".join(requests))
    texts = [
        json.loads(part.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for part in answer.split(b"HTTP/1.1 200")[1:]
    ]
    assert [text[: len(str(i))] for i, text in enumerate(texts)] == [str(i) for i in range(40)]


async def test_a_flood_of_pipelined_requests_that_nobody_reads_is_bounded(quick):
    """10,000 unread answers: reading pauses, then the connection is cut."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", quick.listener.port))
        client.setblocking(False)
        flood = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000
        sent, deadline = 0, time.monotonic() + 8.0
        while sent < len(flood) and time.monotonic() < deadline:
            try:
                sent += client.send(flood[sent : sent + 65536])
            except BlockingIOError:
                await asyncio.sleep(0.02)
            except ConnectionError:
                break
            await asyncio.sleep(0)
        await gone(quick, 10.0)


@pytest.mark.usefixtures("scripted")
async def test_a_reader_of_a_trickle_is_cut_off(start_server):
    """A large answer, streamed or whole, read one byte at a time."""
    server = await start_server(server=ServerConfig(port=0, **QUICK), max_model_len=1024, num_pages=4096)
    for stream in (True, False):
        body = {"prompt": "x", "n": 16, "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "stream": stream}
        raw = json.dumps(body).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.listener.port))
            client.setblocking(False)
            client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
            await asyncio.sleep(0.05)
            async with asyncio.timeout(15):
                while server.listener.limit.num_open:
                    with contextlib.suppress(BlockingIOError):
                        client.recv(1)
                    await asyncio.sleep(0.02)
        await gone(server)
        await server.settle()


async def test_connections_over_the_limit_hear_why_and_the_others_go_on(start_server):
    server = await start_server(server=ServerConfig(port=0, max_connections=3, **QUICK | {"idle_seconds": 30}))
    assert (await server.get("/live"))[0] == 200  # the session keeps this one
    held = [await asyncio.open_connection("127.0.0.1", server.listener.port) for _ in range(2)]
    answer = await talk(server.listener.port, HEAD + LENGTH + BODY)
    assert error_of(answer) == (503, "too_many_connections")
    assert b"Retry-After: 1" in answer
    assert error_of(await talk(server.listener.port)) == (503, "too_many_connections")  # silent: told after a second
    assert (await server.complete())["choices"]
    for _, writer in held:
        writer.close()
    await gone(server)
    assert server.listener.limit.num_refused == 2
    assert b"200 OK" in await talk(server.listener.port, b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")


def test_one_peer_leaves_room_for_others():
    limit = ConnectionLimit(ServerConfig(max_connections=4, max_connections_per_peer=2))
    assert [limit.enter(peer) for peer in ("a", "a", "a", "b", "c", "d")] == [True, True, False, True, True, False]
    limit.leave("a")
    assert limit.enter("a")
    for peer in ("a", "a", "b", "c"):
        limit.leave(peer)
    assert (limit.num_open, limit.num_refused) == (0, 2)
    assert not limit._by_peer


def test_uvloop_behaves_the_same():
    """The loop that `serve.py` uses."""

    async def run():
        config = ServerConfig(port=0, max_connections=1, **QUICK)
        listener = await listen(create_app(Service(config=config)), config)
        assert error_of(await talk(listener.port, HEAD[:9])) == (408, "header_timeout")
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        await asyncio.sleep(0.05)
        assert error_of(await talk(listener.port, HEAD)) == (503, "too_many_connections")
        writer.close()
        await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session, session.get(listener.url + "/live") as response:
            assert response.status == 200
        await listener.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_there_are_files_for_all_connections():
    assert raise_file_limit() >= 1024
