"""A stream is the same answer in pieces."""

import asyncio

import pytest

SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 12}


def joined_completion(events, index):
    """The choice of a completion that the events make up."""
    chunks = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
    logprobs = None
    if chunks[0]["logprobs"] is not None:
        logprobs = {
            name: [item for c in chunks for item in (c["logprobs"] or {}).get(name, [])]
            for name in chunks[0]["logprobs"]
        }
    whole = {
        "index": index,
        "text": "".join(c["text"] for c in chunks),
        "logprobs": logprobs,
        "finish_reason": chunks[-1]["finish_reason"],
        "stop_reason": chunks[-1]["stop_reason"],
    }
    assert all(c["finish_reason"] is None for c in chunks[:-1])
    if "token_ids" in chunks[0]:
        whole["token_ids"] = [t for c in chunks for t in c["token_ids"]]
        whole["prompt_token_ids"] = chunks[0]["prompt_token_ids"]
    return whole


def joined_chat(events, index):
    chunks = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["delta"] == {}
    assert all(c["finish_reason"] is None for c in chunks[:-1])
    entries = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": "".join(c["delta"].get("content", "") for c in chunks),
            "refusal": None,
        },
        "logprobs": {"content": entries, "refusal": None} if entries else None,
        "finish_reason": chunks[-1]["finish_reason"],
        "stop_reason": chunks[-1]["stop_reason"],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": 3},
        {"echo": True},
        {"echo": True, "logprobs": 2, "n": 2},
        {"prompt": ["one", "two"], "n": 2, "return_token_ids": True},
        {"prompt": [[104, 105], [97]], "echo": True},
        {"max_tokens": 1},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"stop": ["e", "q"], "include_stop_str_in_output": True},
        {"stop": ["e"], "logprobs": 0},
        {"prompt": "a prompt of more than one chunk " * 6, "echo": True, "logprobs": 1, "n": 2},
    ],
    ids=str,
)
async def test_completion_stream_equals_the_whole_field_by_field(server, fields):
    body = {"model": server.service.model_name, "prompt": "Hello"} | SAMPLED | fields
    whole = await server.complete(**body)
    events = await server.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert [joined_completion(events, i) for i in range(len(whole["choices"]))] == whole["choices"]
    assert events[-1]["choices"] == []
    for usage in (whole["usage"], events[-1]["usage"]):
        usage.pop("prompt_tokens_details")  # the second request finds the pages of the first
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True}, {"stop": "e"}], ids=str
)
async def test_chat_stream_equals_the_whole_field_by_field(server, fields):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | SAMPLED | fields
    whole = await server.chat(**body)
    events = await server.events("/v1/chat/completions", body)
    assert [joined_chat(events, i) for i in range(len(whole["choices"]))] == whole["choices"]


async def test_one_event_a_token(server):
    body = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
    events = await server.events("/v1/completions", body)
    assert len(events) == 20
    events = await server.events(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "ignore_eos": True}
    )
    assert len([e for e in events if "content" in e["choices"][0]["delta"]]) == 1 + 20


async def test_b121_one_id_and_created_per_response_and_the_right_object(server):
    for path, body, chunk_object, whole_object in (
        ("/v1/completions", {"prompt": "a", "n": 2}, "text_completion", "text_completion"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 4},
            "chat.completion.chunk",
            "chat.completion",
        ),
    ):
        events = await server.events(path, body | {"stream_options": {"include_usage": True}})
        assert {e["object"] for e in events} == {chunk_object}
        assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1
        assert {e["choices"][0]["index"] for e in events if e["choices"]} == {0, 1}
        _, whole = await server.post(path, body)
        assert whole["object"] == whole_object
        assert whole["id"] != events[0]["id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": ["e"]}, {"max_tokens": 1}], ids=str)
async def test_b119_usage_comes_last_and_alone_or_not_at_all(server, path, fields):
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    body |= {"max_tokens": 6} | fields
    events = await server.events(path, body | {"stream_options": {"include_usage": True}})
    assert all(e["usage"] is None for e in events[:-1])
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    plain = await server.events(path, body)
    assert all("usage" not in e and e["choices"] for e in plain)
    status, answer = await server.post(path, body | {"stream_options": {"include_usage": True}})
    assert (status, answer["error"]["param"]) == (400, "stream_options")


async def test_continuous_usage_counts_up(server):
    body = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
    events = await server.events(
        "/v1/completions", body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 4, 5, 5]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("stream", [False, True])
async def test_b057_b059_stop_strings_over_token_borders(server, stream):
    tokenizer = server.engine.tokenizer
    cases = [
        ("p1", ["brown", " f", "ox", " jumps"], ["own fox"], "br", "stop", "own fox"),
        ("p2", [" Al", "ice", "!", "x"], ["\n", "Alice:"], " Alice!x", "length", None),
        ("p3", [" Alice", "!"], ["\n", "Alice:"], " Alice!", "length", None),
        ("p4", ["ab", "ab", "ac"], ["abac"], "ab", "stop", "abac"),
    ]
    for prompt, pieces, stop, text, reason, stop_reason in cases:
        script = [i for piece in pieces for i in tokenizer.encode(piece)]
        server.executor.script[tuple(tokenizer.encode(prompt))] = script
        body = {"prompt": prompt, "stop": stop, "max_tokens": len(script)}
        if stream:
            events = await server.events("/v1/completions", body)
            assert "".join(e["choices"][0]["text"] for e in events) == text
            choice = events[-1]["choices"][0]
        else:
            choice = (await server.complete(**body))["choices"][0]
            assert choice["text"] == text
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)


@pytest.mark.usefixtures("scripted")
async def test_b055_characters_split_over_tokens_come_whole(server):
    text = "a😀é\u4e2d"
    server.executor.script[tuple(b"emoji")] = list(text.encode())
    body = {"prompt": list(b"emoji"), "max_tokens": len(text.encode())}
    events = await server.events("/v1/completions", body)
    assert len(events) == len(text.encode())
    assert [e["choices"][0]["text"] for e in events if e["choices"][0]["text"]] == list(text)
    assert (await server.complete(**body))["choices"][0]["text"] == text
    chat = await server.chat(logprobs=True, max_tokens=1)
    assert bytes(chat["choices"][0]["logprobs"]["content"][0]["bytes"]).decode()


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("stream", [False, True])
async def test_b123_each_ending_has_its_reason(server, stream):
    end = server.engine.tokenizer.eos_token_ids[0]
    server.executor.script[tuple(b"end")] = [97, 98, end]
    base = {"prompt": list(b"end"), "max_tokens": 6, "temperature": 0}
    table = [
        ({}, "ab", "stop", None, 3),
        ({"max_tokens": 2}, "ab", "length", None, 2),
        ({"max_tokens": 3}, "ab", "stop", None, 3),
        ({"stop": ["b"]}, "a", "stop", "b", 2),
        ({"stop_token_ids": [98]}, "a", "stop", 98, 2),
        ({"stop_token_ids": [98], "include_stop_str_in_output": True}, "ab", "stop", 98, 2),
        ({"ignore_eos": True, "max_tokens": 3}, "ab", "length", None, 3),
        ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 3}, "ab<|im_end|>", "length", None, 3),
    ]
    for fields, text, reason, stop_reason, count in table:
        body = base | fields
        if stream:
            events = await server.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
            choice, usage = joined_completion(events, 0), events[-1]["usage"]
        else:
            answer = await server.complete(**body)
            choice, usage = answer["choices"][0], answer["usage"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop_reason), fields
        assert usage["completion_tokens"] == count, fields


async def test_b065_a_slow_reader_gets_every_token(server):
    body = {"prompt": "slow", "max_tokens": 50, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with server.session.post(server.url + "/v1/completions", json=body) as response:
        raw = b""
        async for data in response.content.iter_chunked(256):
            raw += data
            await asyncio.sleep(0.005)
    assert raw.count(b'"text"') == 50
    assert b'"completion_tokens":50' in raw


async def test_b067_many_streams_on_one_loop(start_server):
    server = await start_server(max_num_seqs=64, max_num_batched_tokens=512, num_pages=2048, max_queued=256)

    async def read(i):
        body = {"prompt": f"{i}", "max_tokens": 60, "ignore_eos": True}
        events = await server.events("/v1/completions", body)
        return len(events)

    assert await asyncio.gather(*[read(i) for i in range(128)]) == [60] * 128
    await server.settle()
