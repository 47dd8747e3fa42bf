"""Every refusal: its status, its body, its field; and the server as before afterwards."""

import asyncio
import io
import json
import struct
import time

import pytest
from pydantic import ValidationError

from jcb.config import ServerConfig
from jcb.server.schema import ChatBody, CompletionBody

C = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
H = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def check_error(answer):
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert answer["error"]["type"]
    return answer["error"]


async def refused(server, path, body, status=400):
    got, answer = await server.post(path, body)
    error = check_error(answer)
    assert got == status, error
    return error


HUGE = 99999999999999999999
BAD_COMPLETION_FIELDS = [
    ("priority", HUGE),
    ("priority", 1),  # the policy is first come, first served
    ("user", 7),
    ("user", "x" * 129),
    ("seed", -9223372036854775809),
    ("seed", 2**63),
    ("seed", "7"),
    ("n", 0),
    ("n", True),
    ("n", 17),
    ("n", 2**63),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "8"),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("temperature", -0.1),
    ("temperature", 10.1),
    ("temperature", True),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 10.5),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", ["a" * 257]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1] * 65),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [10**6]),
    ("allowed_token_ids", [-1]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1000000": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "a"}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [1]),
    ("logprobs", "x"),
    ("logprobs", -1),
    ("logprobs", 1000),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("ignore_eos", 1),
    ("echo", "yes"),
    ("stream", "true"),
    ("stream_options", {"include_usage": 1}),
    ("cache_salt", "a" * 129),
    ("cache_salt", "a b"),
    ("request_id", "x" * 129),
    ("prompt", None),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", ["a", 1]),
    ("prompt", [["a"]]),
    ("prompt", [-1]),
    ("prompt", [10**6]),
    ("prompt", [2**63]),
    ("prompt", ["a"] * 33),
]


@pytest.mark.parametrize(("field", "value"), BAD_COMPLETION_FIELDS, ids=lambda v: str(v)[:40])
async def test_b013_b073_b091_a_bad_value_is_a_400_that_names_its_field(server, field, value):
    error = await refused(server, COMPLETIONS, C | {field: value})
    assert error["param"].partition("[")[0].partition(".")[0] == field
    assert len(error["message"]) <= 1024


async def test_b073_chat_logprobs(server):
    assert (await refused(server, CHAT, H | {"logprobs": True, "top_logprobs": 21}))["param"] == "top_logprobs"
    assert (await refused(server, CHAT, H | {"logprobs": True, "top_logprobs": -1}))["param"] == "top_logprobs"
    assert (await refused(server, CHAT, H | {"top_logprobs": 2}))["param"] == "top_logprobs"
    assert (await refused(server, CHAT, H | {"logprobs": 3}))["param"] == "logprobs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
    ids=str,
)
async def test_bad_messages(server, messages, param):
    assert (await refused(server, CHAT, H | {"messages": messages}))["param"] == param


async def test_null_means_not_given(server):
    fields = ("logprobs", "stop", "max_tokens", "temperature", "n", "seed", "stream", "stream_options", "tools", "user")
    assert (await server.complete(**dict.fromkeys(fields)))["choices"][0]["text"]
    assert (await server.chat(**dict.fromkeys((*fields, "top_logprobs", "max_completion_tokens"))))["choices"]
    body = {"stream_options": {"include_usage": None}, "prompt": "x"}
    assert await server.events(COMPLETIONS, body)


FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_b087_numbers_that_are_none(server, literal):
    for field in FLOATS:
        raw = f'{{"prompt": "x", "{field}": {literal}}}'
        async with server.session.post(server.url + COMPLETIONS, data=raw) as response:
            assert response.status == 400, field
            check_error(await response.json())
    raw = f'{{"prompt": "x", "logit_bias": {{"1": {literal}}}}}'
    async with server.session.post(server.url + COMPLETIONS, data=raw) as response:
        assert response.status == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b'{"prompt": "\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt": "x"}',
        b'{"prompt": "x"} y',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "a": ' + b"[" * 65 + b"]" * 65 + b"}",
        b"[" * 100_000,
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:24]),
)
async def test_b063_b117_bodies_that_are_not_what_they_should_be(server, raw):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        async with server.session.post(server.url + path, data=raw) as response:
            assert response.status == 400
            check_error(await response.json())


async def test_a_body_that_is_not_packed_as_it_says(server):
    for encoding in ("gzip", "deflate"):
        headers = {"Content-Encoding": encoding}
        async with server.session.post(
            server.url + COMPLETIONS, data=b"\x1f\x8bnot packed", headers=headers
        ) as response:
            assert response.status == 400
            assert check_error(await response.json())["code"] == "invalid_encoding"


async def test_a_million_bad_items_cost_no_more_than_one(server):
    """The event loop serves everybody: listing every fault of a large body would hold them up for seconds."""
    for path, field in ((COMPLETIONS, "stop_token_ids"), (COMPLETIONS, "stop"), (CHAT, "messages")):
        values = C | H | {field: [None] * 700_000}
        model = CompletionBody if path == COMPLETIONS else ChatBody
        with pytest.raises(ValidationError) as caught:
            model.model_validate(values)
        assert caught.value.error_count() <= 2  # the text branch of `stop`, and the first item
    assert (await refused(server, COMPLETIONS, C | {"stop": ["a", 1, 2]}))["param"] == "stop"


async def test_nesting_of_64_levels_is_read(server):
    deep = json.loads("[" * 63 + "]" * 63)
    assert (await server.complete(unknown_thing=deep))["choices"]


@pytest.mark.parametrize("value", [None, True, 3, 1.5, "x", [], {}, [1], {"a": 1}], ids=str)
async def test_b117_every_field_with_every_json_type(server, value):
    from jcb.server.schema import ChatBody, CompletionBody

    for path, body, model in ((COMPLETIONS, C, CompletionBody), (CHAT, H, ChatBody)):
        for field in model.model_fields:
            async with server.session.post(server.url + path, json=body | {field: value}) as response:
                assert response.status in (200, 400, 404), (field, await response.text())
                if response.status != 200:
                    check_error(await response.json())


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


@pytest.mark.parametrize(
    ("path", "field", "bad", "neutral"),
    [
        (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}], []),
        (CHAT, "tool_choice", "required", "auto"),
        (CHAT, "response_format", {"type": "json_object"}, {"type": "text"}),
        (CHAT, "echo", True, False),
        (CHAT, "modalities", ["audio"], ["text"]),
        (COMPLETIONS, "best_of", 2, 1),
        (COMPLETIONS, "suffix", "end", ""),
        (COMPLETIONS, "bad_words", ["x"], []),
        (COMPLETIONS, "structured_outputs", {"regex": "a"}, {}),
        (COMPLETIONS, "guided_json", {}, None),
        (COMPLETIONS, "truncate_prompt_tokens", 1, None),
    ],
)
async def test_known_fields_are_honoured_or_refused(server, path, field, bad, neutral):
    base = C if path == COMPLETIONS else H
    error = await refused(server, path, base | {field: bad})
    assert error["param"] == field
    status, _ = await server.post(path, base | {field: neutral})
    assert status == 200


async def test_unknown_fields_are_named_in_the_answer_and_once_in_the_log(server, caplog):
    body = C | {"temprature": 1, "user": "me", "bad\nname": 1}
    for _ in range(2):
        async with server.session.post(server.url + COMPLETIONS, json=body) as response:
            assert response.status == 200
            assert response.headers["x-jcb-ignored-fields"] == "temprature, user, bad_name"
    assert caplog.text.count("temprature") == 1
    async with server.session.post(server.url + COMPLETIONS, json=C) as response:
        assert "x-jcb-ignored-fields" not in response.headers
    body = C | {"stream": True, "stream_options": {"inclde_usage": True}}
    async with server.session.post(server.url + COMPLETIONS, json=body) as response:
        assert response.headers["x-jcb-ignored-fields"] == "stream_options.inclde_usage"


async def test_strict_fields_say_what_was_meant(start_server):
    server = await start_server(server=ServerConfig(port=0, strict_fields=True))
    error = await refused(server, COMPLETIONS, C | {"temprature": 1})
    assert (error["param"], error["code"]) == ("temprature", "unknown_field")
    assert "did you mean temperature?" in error["message"]
    assert (await server.complete(user="me"))["choices"]


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
