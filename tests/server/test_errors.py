"""Refusals of a server that is full, broken or asked for what is not there; and the server as before afterwards."""

import asyncio
import io
import json
import struct
import time

import pytest

from tests.server.refusals import CHAT, COMPLETIONS, C, check_error, refused


@pytest.mark.usefixtures("scripted")
async def test_b101_b103_too_long_says_the_numbers(server):
    limit = server.engine.info.max_model_len
    prompt = [97] * (limit - 1)
    assert (await server.complete(prompt=prompt, max_tokens=1))["usage"]["completion_tokens"] == 1
    assert (await server.complete(prompt=prompt, max_tokens=None))["usage"]["completion_tokens"] == 1
    for ids, max_tokens in ((prompt, 2), ([97] * limit, 1), ([97] * (limit + 1), None), ([97], limit), ([97], 10**9)):
        error = await refused(server, COMPLETIONS, {"prompt": ids, "max_tokens": max_tokens})
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"]
        assert str(len(ids)) in error["message"]
        assert "-" not in error["message"]
    text = "a" * limit
    await refused(server, COMPLETIONS, {"prompt": text})
    await refused(server, COMPLETIONS, {"prompt": ["a", text, "b"]})
    await refused(server, CHAT, {"messages": [{"role": "user", "content": text}]})
    answer = await server.chat(max_tokens=None, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == limit


async def test_b115_framework_errors_have_the_same_body(server):
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
        ("DELETE", "/v1/models", 405),
    ):
        async with server.session.request(method, server.url + path) as response:
            assert response.status == status
            check_error(await response.json())
    error = await refused(server, COMPLETIONS, C | {"model": "other"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    async with server.session.post(server.url + COMPLETIONS, data=io.BytesIO(b" " * (4 * 1024 * 1024 + 1))) as response:
        assert response.status == 413
        check_error(await response.json())


async def test_a_full_queue_is_429_with_retry_after(start_server):
    server = await start_server(max_num_seqs=1, max_queued=2)
    server.executor.step_seconds = 0.2  # longer than a refusal may take

    async def ask():
        body = C | {"max_tokens": 8, "ignore_eos": True}
        async with server.session.post(server.url + COMPLETIONS, json=body) as response:
            return response.status, response.headers.get("Retry-After"), await response.json()

    running = []
    for _ in range(3):  # one in the slot, two behind it
        running.append(asyncio.create_task(ask()))
        await asyncio.sleep(0.25)
    began = time.monotonic()
    late = await asyncio.gather(*[ask() for _ in range(9)])
    assert time.monotonic() - began < 0.15
    answers = await asyncio.gather(*running) + late
    refused_ones = [a for a in answers if a[0] == 429]
    assert len(refused_ones) == 9
    for _, retry_after, answer in refused_ones:
        assert int(retry_after) >= 1
        assert check_error(answer)["code"] == "queue_full"
    await server.settle()
    assert server.async_engine.metrics.admission_rejections.value == len(refused_ones)


async def test_a_refusal_takes_less_than_50_ms_while_a_step_takes_300(start_server):
    server = await start_server(max_num_seqs=1, max_queued=1)
    server.executor.step_seconds = 0.3
    body = C | {"max_tokens": 8, "ignore_eos": True}
    running = []
    for _ in range(2):
        running.append(asyncio.create_task(server.post(COMPLETIONS, body)))
        await asyncio.sleep(0.35)
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        status, _answer = await server.post(COMPLETIONS, body)
        seconds.append(time.monotonic() - began)
        assert status == 429
    assert sorted(seconds)[2] < 0.05, seconds  # one may meet a pause of the machine
    assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]


async def _fill(server, prompts):
    """Starts completions of `prompts`, one after another, each longer than a test."""
    running = []
    for prompt in prompts:
        body = C | {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        running.append(asyncio.create_task(server.post(COMPLETIONS, body)))
        await asyncio.sleep(0.25)
    return running


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, "/v1/responses"])
async def test_a_full_queue_makes_nothing_of_a_body_but_holds_its_limits(start_server, route):
    server = await start_server(max_num_seqs=1, max_queued=1)
    server.executor.step_seconds = 0.2
    running = await _fill(server, ["a", "b"])
    label = {"X-Request-Id": "mine"}
    async with server.session.post(server.url + route, data=b"{not JSON", headers=label) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert response.headers["X-Request-Id"] == "mine"
        assert check_error(await response.json())["code"] == "queue_full"
    async with server.session.post(server.url + route, data=io.BytesIO(b" " * (4 * 1024 * 1024 + 1))) as response:
        assert response.status == 413
    assert server.async_engine.metrics.admission_rejections.value == 1
    assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
    async with server.session.post(server.url + route, data=b"{not JSON") as response:
        assert response.status == 400
    await server.settle()


async def test_a_connection_goes_on_after_a_refusal(start_server):
    server = await start_server(max_num_seqs=1, max_queued=1)
    server.executor.step_seconds = 0.2
    running = await _fill(server, ["a", "b"])
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
    body = json.dumps(C | {"max_tokens": 1}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def answer():
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        assert "connection: close" not in lines
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
        return lines[0].split()[1], json.loads(await reader.readexactly(length))

    for pieces in ([head + body], [head, body[:9], body[9:]], [head + body + head, body]):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.02)
        for _ in range(sum(piece.count(b"POST") for piece in pieces)):
            status, refused_one = await answer()
            assert (status, refused_one["error"]["code"]) == ("429", "queue_full")
    await asyncio.gather(*running)
    writer.write(head + body)
    assert (await answer())[0] == "200"
    writer.close()
    await server.settle()


async def test_a_queue_full_of_tokens_refuses_within_50_ms_while_a_step_takes_300(start_server):
    server = await start_server(max_num_seqs=1, max_queued=9, max_queued_tokens=40)
    server.executor.step_seconds = 0.3
    running = await _fill(server, ["a", "b" * 30])
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        status, answer = await server.post(COMPLETIONS, C | {"prompt": "c" * 11, "max_tokens": 1})
        seconds.append(time.monotonic() - began)
        assert status == 429
        assert "1 requests with 30 prompt tokens" in answer["error"]["message"]
    assert sorted(seconds)[2] < 0.05, seconds  # one may meet a pause of the machine
    running += await _fill(server, ["c" * 10])
    assert [status for status, _ in await asyncio.gather(*running)] == [200, 200, 200]
    await server.settle()


async def test_a_prompt_that_never_fits_is_refused_with_the_numbers(start_server):
    server = await start_server(num_pages=9, max_model_len=256)
    error = await refused(server, COMPLETIONS, {"prompt": [97] * 100, "max_tokens": 1})
    assert "pages" in error["message"]
    assert "8" in error["message"]


async def test_what_an_empty_queue_cannot_take_is_refused_for_good(start_server):
    server = await start_server(max_num_seqs=1, max_queued=8)
    error = await refused(server, COMPLETIONS, C | {"prompt": ["a", "b", "c"], "n": 3})
    assert (error["param"], error["code"]) == ("n", "queue_capacity_exceeded")
    assert "9 choices" in error["message"]
    server = await start_server(max_num_seqs=1, max_queued_tokens=20)
    error = await refused(server, COMPLETIONS, C | {"prompt": [[97] * 11, [97] * 10]})
    assert (error["param"], error["code"]) == ("prompt", "queue_capacity_exceeded")
    assert "21 prompt tokens" in error["message"]


async def test_a_step_that_fails_ends_only_its_requests(start_server):
    server = await start_server()
    executor = server.executor
    bad = tuple(b"bad")
    executor.fails_dispatch = lambda plan: any(row.sequence.request.prompt_token_ids == bad for row in plan.rows)
    good = [server.complete(prompt=f"good{i}", max_tokens=10) for i in range(4)]
    results = await asyncio.gather(server.post(COMPLETIONS, {"prompt": list(bad)}), *good)
    status, answer = results[0]
    assert status == 500
    check_error(answer)
    assert all(len(r["choices"][0]["text"]) == 10 for r in results[1:])
    await server.settle()


async def test_an_error_on_the_way_is_an_event_and_then_done(start_server):
    server = await start_server()
    server.executor.not_finite = lambda row: row.num_output == 3
    body = {"prompt": "x", "max_tokens": 10, "stream": True, "ignore_eos": True}
    async with server.session.post(server.url + COMPLETIONS, json=body) as response:
        assert response.status == 200
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert check_error(json.loads(events[-3].removeprefix("data: ")))["code"] == "non_finite_logits"
    assert len(events) == 3 + 3
    await server.settle()


async def test_a_head_that_is_not_http_does_no_harm(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
    writer.write(b"NONSENSE\r\n\r\n")
    assert b"400" in (await reader.read())[:20]
    writer.close()
    _, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
    writer.write(struct.pack("16s", b"\x16\x03\x01"))
    writer.close()
