"""The live batch and its knobs over HTTP: what is told, to whom, how much of it, and what cannot be changed."""

import asyncio
import contextlib
import json
import socket

import pytest

from jcb.config import ServerConfig
from jcb.engine.feed import MAX_WATCHERS, SIZE
from jcb.server.app import create_admin_app, listen

EVENTS, KNOBS = "/v1/batch/events", "/v1/batch/knobs"
LIVE = ServerConfig(port=0, live_knobs=True)


@pytest.fixture
def keys(tmp_path):
    for name in ("user", "admin"):
        (tmp_path / name).write_text(f"canary7q-{name}\n")
    return {"api_key_file": str(tmp_path / "user"), "admin_key_file": str(tmp_path / "admin")}


def bearer(name):
    return {"Authorization": f"Bearer canary7q-{name}"}


@contextlib.asynccontextmanager
async def reading(server, **kwargs):
    """The events as they come."""
    async with server.session.get(server.url + EVENTS, **kwargs) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"

        async def events():
            while raw := (await response.content.readuntil(b"\n\n")).decode():
                assert raw.startswith("data: ")
                assert raw.count("\n") == 2
                if raw == "data: [DONE]\n\n":
                    return
                yield json.loads(raw.removeprefix("data: "))

        yield events()


async def until(events, wanted):
    """Every step up to one for which `wanted` holds, and the other events."""
    steps, others = [], []
    async with asyncio.timeout(20):
        async for event in events:
            if event["object"] != "batch.steps":
                others.append(event)
            for step in event.get("steps", ()):
                steps.append(step)
                if wanted(step):
                    return steps, others
    raise AssertionError("the stream ended")


async def until_nobody_watches(server):
    async with asyncio.timeout(5):
        while server.async_engine.feed.num_watchers:
            await asyncio.sleep(0.02)


async def test_the_batch_is_told_step_by_step(server):
    async with reading(server) as events:
        state = await anext(events)
        assert state["object"] == "batch.state"
        assert (state["slots"], state["max_tokens"], state["page_size"]) == (8, 64, server.engine.info.limits.page_size)
        assert state["sequences"] == []
        status = await anext(events)
        assert (status["object"], status["running"], status["model"]) == ("batch.status", 0, server.service.model_name)
        server.slow_down(0.01)
        await asyncio.gather(*[server.complete(prompt=f"{i} Hello", max_tokens=6, ignore_eos=True) for i in range(3)])
        steps, _ = await until(events, lambda step: not step["rows"] and not step["running"])
    rows = [row for step in steps for row in step["rows"]]
    assert {row[0] for row in rows} == {1, 2, 3}
    assert {row[1] for row in rows} == {0, 1, 2}
    assert {row[4] for row in rows} == {0, 1}
    assert sum(step["tokens"] for step in steps) == 18
    assert sum(step["ended"] for step in steps) == 3
    assert sorted(number for step in steps for number in step["left"]) == [1, 2, 3]
    assert sum(len(step["ttft_ms"]) for step in steps) == 3
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))


async def test_a_second_reader_starts_with_the_state(server):
    server.slow_down(0.01)
    async with reading(server) as first:
        running = asyncio.create_task(server.complete(max_tokens=60, ignore_eos=True))
        await until(first, lambda step: step["tokens"] > 0)
        async with reading(server) as second:
            state = await anext(second)
            assert [sequence["id"] for sequence in state["sequences"]] == [1]
            assert len(state["sequences"][0]["pages"]) >= 1
            await until(second, lambda step: step["ended"] == 1)
        await running
    await until_nobody_watches(server)


async def test_a_reader_that_leaves_is_forgotten(server):
    feed = server.async_engine.feed
    for _ in range(3 * MAX_WATCHERS):
        async with reading(server) as events:
            await anext(events)
            assert feed.num_watchers >= 1
    await until_nobody_watches(server)


async def test_readers_beyond_the_limit_are_refused(server):
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_WATCHERS):
            await stack.enter_async_context(reading(server))
        async with server.session.get(server.url + EVENTS) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "5"
            assert (await response.json())["error"]["code"] == "too_many_watchers"


async def test_a_reader_that_never_reads_loses_steps_and_is_cut_off(start_server):
    """It sends its request and takes nothing: the server holds a bounded ring, and its socket ends."""
    server = await start_server(server=ServerConfig(port=0, stall_seconds=0.5))
    feed = server.async_engine.feed
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    silent.connect(("127.0.0.1", server.listener.port))
    silent.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    async with asyncio.timeout(60):
        while not feed.num_watchers:
            await asyncio.sleep(0.01)
        while feed.num_watchers:  # more events than the socket's buffers hold
            for number in range(100):
                feed._append({"rows": [[number, slot, 0, 1, 1] for slot in range(500)]})
            await asyncio.sleep(0.02)
    assert len(feed._ring) == SIZE
    silent.close()
    await server.settle()


async def test_only_the_head_is_sent_where_it_is_asked_for(server):
    async with server.session.head(server.url + EVENTS) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert server.async_engine.feed.num_watchers == 0


async def test_a_drain_ends_the_events(server):
    async with reading(server) as events:
        await anext(events)
        await server.async_engine.drain(0.1)
        async with asyncio.timeout(5):
            rest = [event async for event in events]
    assert all(event["object"].startswith("batch.") for event in rest)
    server.async_engine._draining = False  # for the fixture's last look


async def test_events_and_knobs_need_a_key_and_the_page_none(start_server, keys):
    server = await start_server(server=ServerConfig(port=0, live_knobs=True, **keys))
    for path in (EVENTS, KNOBS):
        for headers, status in ((None, 401), (bearer("wrong"), 401), (bearer("user"), 200), (bearer("admin"), 200)):
            async with server.session.get(server.url + path, headers=headers) as response:
                assert response.status == status, (path, headers)
    for headers, status in ((None, 401), (bearer("user"), 403), (bearer("admin"), 200)):
        assert (await server.post(KNOBS, {"max_num_seqs": 2}, headers=headers))[0] == status
    assert (await server.get("/"))[0] == 200


async def test_nothing_private_is_in_the_events(start_server, keys):
    server = await start_server(server=ServerConfig(port=0, **keys))
    canary = "canary7q"
    fields = {"user": canary, "request_id": canary, "cache_salt": canary, "stop": [canary + "!"]}
    async with reading(server, headers=bearer("user")) as events:
        answers = []
        for path, body in (
            ("/v1/completions", {"prompt": canary * 3, "max_tokens": 6, **fields}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": canary}], "max_tokens": 6, **fields}),
        ):
            status, answer = await server.post(path, body, headers=bearer("user"))
            assert status == 200, answer
            answers.append(answer["id"])
        steps, others = await until(events, lambda step: step["step"] > 8 and not step["rows"])
    told = json.dumps([steps, others])
    assert canary not in told
    assert not any(answer.partition("-")[2] in told for answer in answers)
    known = {"step", "t", "host_ms", "device_ms", "size", "rows", "joined", "pages", "left", "preempted", "tokens",
             "ttft_ms", "itl_ms", "ended", "running", "waiting", "used", "cached", "hit_tokens", "queried_tokens",
             "cached_map"}  # fmt: skip
    assert {name for step in steps for name in step} == known


async def test_knobs_stay_as_they_are_unless_the_operator_allows_it(server):
    status, text = await server.get(KNOBS)
    knobs = json.loads(text)
    assert status == 200
    assert knobs["can_change"] is False
    assert "--live-knobs" in knobs["hint"]
    async with server.session.post(server.url + KNOBS, json={"max_num_seqs": 1}) as response:
        assert response.status == 405
    assert json.loads((await server.get(KNOBS))[1]) == knobs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_num_seqs": 9}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_num_seqs": "4"}, "max_num_seqs"),
        ({"max_num_seqs": 2.5}, "max_num_seqs"),
        ({"max_num_seqs": 2**63}, "max_num_seqs"),
        ({"max_num_batched_tokens": 65}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"policy": "lifo"}, "policy"),
        ({"policy": ["fcfs"]}, "policy"),
        ({"page_size": 16}, "page_size"),
        ({"max_num_seqs": 4, "policy": "lifo"}, "policy"),  # all or none
    ],
    ids=str,
)
async def test_a_knob_outside_its_bounds_is_refused_and_nothing_moves(start_server, body, param):
    server = await start_server(server=LIVE)
    before = await server.get(KNOBS)
    status, answer = await server.post(KNOBS, body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]
    if answer["error"]["code"] == "knob_out_of_range" and param != "policy":
        bounds = json.loads(before[1])["knobs"][param]
        assert f"from {bounds['minimum']} to {bounds['maximum']}" in answer["error"]["message"]
        assert str(body[param]) in answer["error"]["message"]
    assert await server.get(KNOBS) == before


async def test_no_other_web_site_turns_a_knob(start_server):
    server = await start_server(server=LIVE)
    own = server.url.removeprefix("http://")
    body = b'{"max_num_seqs": 3}'
    json_type = {"Content-Type": "application/json"}
    for headers, status in (
        ({"Content-Type": "text/plain"}, 415),  # what a form of another site can send unasked
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (json_type | {"Origin": "http://evil.example"}, 403),
        (json_type | {"Origin": "null"}, 403),
        (json_type | {"Host": "evil.example"}, 403),
        (json_type | {"Host": "127.0.0.1.evil.example"}, 403),
        (json_type | {"Host": "127.0.0.1:99999999"}, 403),
        (json_type | {"Host": "localhost:x"}, 403),
        (json_type | {"Origin": "http://[::1"}, 403),
        (json_type | {"Origin": ""}, 403),
        (json_type | {"Origin": f"http://{own}"}, 200),
    ):
        async with server.session.post(server.url + KNOBS, data=body, headers=headers) as response:
            assert response.status == status, headers
    assert json.loads((await server.get(KNOBS))[1])["knobs"]["max_num_seqs"]["value"] == 3


async def test_knobs_turn_between_steps_and_no_answer_changes(start_server):
    """Prompts of different lengths run while the knobs go up and down; each gives the tokens that it gives alone."""
    server = await start_server(server=LIVE, num_pages=1025)
    bodies = [{"prompt": f"{index} " * (3 + 5 * index), "max_tokens": 120, "ignore_eos": True} for index in range(8)]
    alone = [(await server.complete(**body))["choices"][0]["text"] for body in bodies]
    server.slow_down(0.004)
    async with reading(server) as events:
        answers = asyncio.gather(*[server.complete(**body) for body in bodies])
        turns = [{"max_num_seqs": 2}, {"max_num_batched_tokens": 9}, {"max_num_seqs": 8}, {"policy": "priority"},
                 {"max_num_seqs": 3, "max_num_batched_tokens": 64, "policy": "fcfs"}]  # fmt: skip
        for turn in turns:
            steps, _ = await until(events, lambda step: step["step"] % 12 == 0)
            status, answer = await server.post(KNOBS, turn)
            assert status == 200
            assert {name: answer["knobs"][name]["value"] for name in turn} == turn
        assert [answer["choices"][0]["text"] for answer in await answers] == alone
        steps, _ = await until(events, lambda step: not step["rows"])
    sizes = [len(step["rows"]) for step in steps if step["rows"]]
    assert max(sizes[-10:]) <= 3
    assert server.async_engine.metrics.num_preemptions.value > 0
    await server.settle()


async def test_a_request_at_a_policy_it_needs(start_server):
    server = await start_server(server=LIVE)
    body = {"prompt": "Hi", "max_tokens": 2, "priority": 1}
    assert (await server.post("/v1/completions", body))[0] == 400
    assert (await server.post(KNOBS, {"policy": "priority"}))[0] == 200
    assert (await server.post("/v1/completions", body))[0] == 200


async def test_a_turn_after_the_engine_died_is_answered(start_server):
    server = await start_server(server=LIVE)

    def dies(*args):
        raise RuntimeError

    server.engine.core.scheduler.turn = dies
    assert (await server.post(KNOBS, {"max_num_seqs": 2}))[0] == 503
    assert (await server.post(KNOBS, {"max_num_seqs": 2}))[0] == 503


async def test_without_a_playground_there_is_none(start_server):
    server = await start_server(server=ServerConfig(port=0, playground=False, live_knobs=True))
    for path in ("/", "/playground/app.js", EVENTS, KNOBS):
        assert (await server.get(path))[0] == 404
    assert (await server.post(KNOBS, {"max_num_seqs": 1}))[0] == 404


async def test_an_admin_port_takes_the_knobs(start_server):
    server = await start_server(server=ServerConfig(port=0, live_knobs=True, admin_port=1))
    assert (await server.post(KNOBS, {"max_num_seqs": 3}))[0] == 405
    admin = await listen(create_admin_app(server.service), ServerConfig(port=0))
    async with server.session.post(admin.url + KNOBS, json={"max_num_seqs": 3}) as response:
        assert response.status == 200
    async with server.session.get(admin.url + EVENTS) as response:
        assert response.status == 404
    await admin.close()
