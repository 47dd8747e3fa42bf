"""The text subset of OpenAI's Responses API."""

import asyncio
import json

import openai
import pytest

from tests.server.refusals import refused

PATH = "/v1/responses"
TURNS = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}], "id": "msg_1"},
    {"role": "user", "content": "Again"},
]


async def ask(server, **fields):
    status, answer = await server.post(PATH, {"input": "Hi", "max_output_tokens": 8, "temperature": 0} | fields)
    assert status == 200, answer
    return answer


async def events_of(server, **fields):
    body = {"input": "Hi", "max_output_tokens": 8, "temperature": 0, "stream": True} | fields
    async with server.session.post(server.url + PATH, json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = (await response.read()).decode()
    assert raw.endswith("\n\n")
    events = []
    for part in raw.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_response_is_the_chat_answer_in_another_form(server):
    answer = await ask(server)
    chat = await server.chat()
    text = answer["output"][0]["content"][0]["text"]
    assert text == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == 8
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 8
    assert (answer["object"], answer["status"]) == ("response", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["store"] is False


@pytest.mark.usefixtures("scripted")
async def test_turns_instructions_and_a_natural_end(server):
    chat_turns = [{"role": "system", "content": "Rule."}, {"role": "system", "content": "Be brief."}]
    chat_turns += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chat_turns += [{"role": "user", "content": "Again"}]
    chat = await server.chat(messages=chat_turns, return_token_ids=True)
    server.executor.script[tuple(chat["prompt_token_ids"])] = [*b"yes", server.engine.tokenizer.eos_token_ids[0]]
    answer = await ask(server, input=TURNS, instructions="Rule.", metadata={"a": "b"})
    assert answer["output"][0]["content"][0]["text"] == "yes"
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["metadata"] == {"a": "b"}
    events = await events_of(server, input=TURNS, instructions="Rule.")
    assert events[-1]["type"] == "response.completed"


async def test_the_stream_builds_up_the_same_response(server):
    events = await events_of(server)
    kinds = [event["type"] for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 8,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event["delta"] for event in events if "delta" in event)
    whole = await ask(server)
    last = events[-1]["response"]
    assert text == last["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
    assert last["id"] == events[0]["response"]["id"]
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x" * 65, "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"style": "short"}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 11}, "temperature"),
        ({"user": "x" * 129}, "user"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused(server, fields, param):
    assert (await refused(server, PATH, {"input": "Hi", "max_output_tokens": 2} | fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [TURNS[1], {"role": "user", "content": 5}], "instructions": "Hi"}, "input[1].content"),
        ({"input": "x" * 300}, "input"),
        ({"input": "x", "max_output_tokens": 255}, "max_output_tokens"),
    ],
)
async def test_an_error_names_the_field_that_the_caller_wrote(server, fields, param):
    error = await refused(server, PATH, fields)
    assert error["param"] == param
    assert error["code"]
    assert "messages" not in error["message"]


async def test_the_answer_has_the_form_that_was_asked_for(server):
    form = {"type": "json_schema", "name": "seven", "schema": {"const": 7}, "strict": True}
    answer = await ask(server, text={"format": form}, temperature=1)
    assert (answer["output"][0]["content"][0]["text"], answer["status"]) == ("7", "completed")
    assert answer["text"] == {"format": form}
    events = await events_of(server, text={"format": form, "verbosity": "medium"}, temperature=1)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "7"
    whole = await ask(server, text={"format": {"type": "json_object"}}, temperature=1, max_output_tokens=50)
    assert whole["output"][0]["content"][0]["text"].lstrip().startswith("{")


async def test_an_error_on_the_way_is_an_event(start_server):
    server = await start_server()
    server.executor.not_finite = lambda row: row.num_output == 3
    events = await events_of(server)
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "non_finite_logits")
    await server.settle()


async def test_the_official_client(server):
    def use():
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            model = server.service.model_name
            whole = client.responses.create(model=model, input="Hi", max_output_tokens=8, temperature=0)
            with client.responses.stream(model=model, input="Hi", max_output_tokens=8, temperature=0) as stream:
                streamed = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            assert whole.output_text == streamed
            assert whole.usage.output_tokens == 8

    await asyncio.to_thread(use)
