"""Tool calls over HTTP in OpenAI's shapes, streamed or not."""

import json

import openai
import pytest

from tests.server.refusals import CHAT, H, refused

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Looks", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}}
TOOLS = [WEATHER, NOW]
TWO = '<tool_call>[{"name": "get_weather", "arguments": {"city": "é", "days": 1}}, {"name": "now", "arguments": {}}]</tool_call>'  # noqa: E501
ROUND = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "X"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42 degrees"},
]


@pytest.fixture
async def server(start_server):
    running = await start_server(max_model_len=1024, num_pages=1025)
    yield running
    await running.settle()


async def script(server, monkeypatch, text):
    """Lets the next answer to this body be `text`."""
    ids = [*text.encode(), *server.engine.tokenizer.eos_token_ids]
    submit = type(server.async_engine).submit

    async def note(prompts, params, **kwargs):
        for prompt in prompts:
            server.executor.script[tuple(prompt)] = ids
        return await submit(server.async_engine, prompts, params, **kwargs)

    monkeypatch.setattr(server.async_engine, "submit", note)


def joined(events):
    """Message and finish_reason as a client puts them together; the form of every delta is checked."""
    content, calls, reason = "", [], None
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"}
                assert set(piece["function"]) == {"name", "arguments"}
                calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
            else:
                assert piece["index"] == len(calls) - 1
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        assert reason is None, "nothing follows the finish"
        reason = choice["finish_reason"]
    return content or None, [call["function"] for call in calls], reason, [call["id"] for call in calls]


async def test_b135_b123_calls_of_a_free_answer(server, monkeypatch, scripted):
    """B135: streamed calls without index, or with changing ids. B123: finish_reason "stop" for calls in a stream."""
    await script(server, monkeypatch, TWO)
    body = H | {"tools": TOOLS, "max_tokens": 200}
    whole = (await server.chat(**body))["choices"][0]
    expected = [
        {"name": "get_weather", "arguments": '{"city": "é", "days": 1}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert [call["function"] for call in whole["message"]["tool_calls"]] == expected
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == "tool_calls"
    content, functions, reason, ids = joined(await server.events(CHAT, body))
    assert (content, functions, reason) == (None, expected, "tool_calls")
    assert len(set(ids)) == 2
    assert all(call["id"].startswith("call_") for call in whole["message"]["tool_calls"])


async def test_content_before_a_call_and_answers_without_one(server, monkeypatch, scripted):
    await script(server, monkeypatch, 'Wait.\n<tool_call>[{"name": "now"}]</tool_call>')
    body = H | {"tools": TOOLS, "max_tokens": 200}
    message = (await server.chat(**body))["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("Wait.\n", "now")
    await script(server, monkeypatch, "It is <b>warm</b>.")
    choice = (await server.chat(**body))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It is <b>warm</b>.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    content, functions, reason, _ = joined(await server.events(CHAT, body))
    assert (content, functions, reason) == ("It is <b>warm</b>.", [], "stop")


async def test_none_tells_the_model_of_no_tools_and_reads_no_calls(server, monkeypatch, scripted):
    await script(server, monkeypatch, TWO)
    choice = (await server.chat(tools=TOOLS, tool_choice="none", max_tokens=200))["choices"][0]
    assert choice["message"]["content"] == TWO
    assert choice["finish_reason"] == "stop"


async def test_the_model_is_told_of_the_tools(server):
    free = await server.chat(max_tokens=1)
    told = await server.chat(tools=TOOLS, max_tokens=1)
    assert told["usage"]["prompt_tokens"] > free["usage"]["prompt_tokens"] + len(json.dumps(SCHEMA))
    none = await server.chat(tools=TOOLS, tool_choice="none", max_tokens=1)
    assert none["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stream", [False, True])
async def test_required_and_named_are_enforced(server, seed, stream):
    for choice, names, most in (
        ("required", {"get_weather", "now"}, 99),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}, 1),
    ):
        body = H | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "temperature": 1, "seed": seed}
        if stream:
            content, functions, reason, _ = joined(await server.events(CHAT, body))
        else:
            answer = (await server.chat(**body))["choices"][0]
            content, reason = answer["message"]["content"], answer["finish_reason"]
            functions = [call["function"] for call in answer["message"]["tool_calls"]]
        assert content is None
        assert 1 <= len(functions) <= most
        assert {function["name"] for function in functions} <= names
        complete = functions if reason == "tool_calls" else functions[:-1]
        assert reason in ("tool_calls", "length")
        for function in complete:
            if function["name"] == "get_weather":
                assert set(json.loads(function["arguments"])) == {"city", "days"}


async def test_one_call_where_parallel_ones_are_not_wanted(server):
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300, "n": 4}
    answer = await server.chat(**body, temperature=1, seed=1)
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [1] * 4
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}


async def test_tools_with_a_schema_for_the_answer(server):
    body = {
        "tools": [NOW],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"ok": 1}}}},
        "max_tokens": 200,
        "temperature": 1,
        "parallel_tool_calls": False,
    }
    seen = set()
    for seed in range(8):
        message = (await server.chat(**body, seed=seed))["choices"][0]["message"]
        if message.get("tool_calls"):
            seen.add(message["tool_calls"][0]["function"]["name"])
        else:
            seen.add(json.loads(message["content"])["ok"])
    assert seen == {"now", 1}


async def test_logprobs_and_token_ids_are_all_told(server):
    body = H | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40, "seed": 1}
    body |= {"logprobs": True, "return_token_ids": True}
    whole = (await server.chat(**body))["choices"][0]
    events = await server.events(CHAT, body)
    chunks = [event["choices"][0] for event in events]
    assert [i for chunk in chunks for i in chunk.get("token_ids", ())] == whole["token_ids"]
    told = [entry["token"] for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert told == [entry["token"] for entry in whole["logprobs"]["content"]]


@pytest.mark.parametrize("content", [None, "", [], "Let me see."])
async def test_b109_b111_a_round_with_a_tool(server, content):
    """B109, B111: an assistant's message with calls and empty or no content was refused."""
    turns = [dict(turn) for turn in ROUND]
    turns[1]["content"] = content
    answer = await server.chat(messages=turns, tools=TOOLS)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    absent = await server.chat(messages=ROUND, tools=TOOLS)
    more = answer["usage"]["prompt_tokens"] - absent["usage"]["prompt_tokens"]
    assert more == (0 if not content else len("Let me see.\n"))


async def test_the_official_client_puts_a_stream_together(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        async with client.chat.completions.stream(
            model="fake",
            messages=H["messages"],
            tools=[{"type": "function", "function": {**WEATHER["function"], "strict": True}}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
        ) as stream:
            final = await stream.get_final_completion()
        call = final.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather"
        assert set(call.function.parsed_arguments) == {"city", "days"}
        assert final.choices[0].finish_reason == "tool_calls"


BAD_PARAMETERS = {"type": "function", "function": {"name": "f", "parameters": {"type": "string", "pattern": "("}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [NOW | {"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 262_144}}]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"tools": [BAD_PARAMETERS], "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "user", "tool_calls": ROUND[1]["tool_calls"]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ],
    ids=lambda v: str(v)[:60],
)  # fmt: skip
async def test_b137_a_bad_request_names_its_field(server, fields, param):
    assert (await refused(server, CHAT, H | fields))["param"] == param


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tools": None, "tool_choice": None}, {"tool_choice": "auto"}, {"tool_choice": "none"}]
)
async def test_values_that_ask_for_nothing(server, fields):
    assert "tool_calls" not in (await server.chat(**fields, parallel_tool_calls=False))["choices"][0]["message"]
