"""Structured output over HTTP: every answer has its form, whatever else the request asks for."""

import asyncio
import json
import random

import openai
import pydantic
import pytest

from tests.server.refusals import CHAT, COMPLETIONS, C, H, refused
from tests.structured.generators import fits_regex, fits_schema, random_object_schema, random_regex

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
MANY = {"max_tokens": 600, "temperature": 1}
LENGTHS = {"max_model_len": 1024, "num_pages": 2049}


async def answers(server, bodies):
    """The choices' texts of completions that run together; all must have come to their own end."""
    gate = asyncio.Semaphore(16)

    async def one(body):
        async with gate:
            answer = await server.complete(**MANY | body)
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}, (body, answer)
        return [choice["text"] for choice in answer["choices"]]

    return await asyncio.gather(*map(one, bodies))


async def test_100_random_schemas(start_server):
    server = await start_server(**LENGTHS)
    rng = random.Random(5)
    schemas = [random_object_schema(rng) for _ in range(100)]
    bodies = [{"structured_outputs": {"json": schema}, "seed": i} for i, schema in enumerate(schemas)]
    for schema, texts in zip(schemas, await answers(server, bodies), strict=True):
        fits_schema(texts[0], schema)
    await server.settle()


async def test_100_random_regexes(start_server):
    server = await start_server(**LENGTHS)
    rng = random.Random(6)
    patterns = [random_regex(rng) + "!" for _ in range(100)]
    bodies = [{"structured_outputs": {"regex": pattern}, "seed": i} for i, pattern in enumerate(patterns)]
    for pattern, texts in zip(patterns, await answers(server, bodies), strict=True):
        fits_regex(texts[0], pattern)
    await server.settle()


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"grammar": 'start: "x" /[a-c]{3}/'}}, "x[a-c]{3}"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"guided_grammar": 'root ::= "x" [a-c]'}, "x[a-c]"),
        ({"guided_json": {"const": 7}}, "7"),
        ({"guided_json": '{"const": 7}'}, "7"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}, "7"),
    ],
    ids=str,
)
async def test_every_form_on_both_paths_streamed_or_not(server, fields, pattern):
    fields = fields | {"max_tokens": 40, "temperature": 1, "seed": 3}
    whole = (await server.complete(**fields))["choices"][0]
    fits_regex(whole["text"], pattern)
    assert whole["finish_reason"] == "stop"
    events = await server.events(COMPLETIONS, C | fields)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    chat = (await server.chat(**fields))["choices"][0]
    fits_regex(chat["message"]["content"], pattern)
    events = await server.events(CHAT, H | fields)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == chat["message"]["content"]


async def test_json_object(start_server):
    server = await start_server(**LENGTHS)
    bodies = [{"response_format": {"type": "json_object"}, "seed": seed, "n": 2} for seed in range(4)]
    bodies += [{"structured_outputs": {"json_object": True}, "seed": 5}]
    gate = [await server.complete(**MANY | body) for body in bodies]
    for answer in gate:
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["text"]), dict)
    assert any(choice["finish_reason"] == "stop" for answer in gate for choice in answer["choices"])


async def test_parse_of_the_official_client(server):
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=99)
        tags: list[bool] = pydantic.Field(max_length=2)

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Who?"}]
        completion = await client.chat.completions.parse(
            model="fake", messages=messages, response_format=Person, max_tokens=200
        )
        assert isinstance(completion.choices[0].message.parsed, Person)
        async with client.chat.completions.stream(
            model="fake", messages=messages, response_format=Person, max_tokens=200
        ) as stream:
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Person)


async def test_choices_logprobs_and_min_tokens(server):
    fields = {"structured_outputs": {"regex": "[0-9]{2,9}"}, "n": 4, "temperature": 1, "seed": 1, "max_tokens": 20}
    answer = await server.complete(**fields, logprobs=2, min_tokens=6)
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(6 <= len(text) <= 9 for text in texts)
    assert len(set(texts)) > 1
    for choice in answer["choices"]:
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    again = await server.complete(**fields, logprobs=2, min_tokens=6)
    assert [choice["text"] for choice in again["choices"]] == texts


async def test_the_grammar_ends_an_answer_before_min_tokens(server):
    answer = await server.complete(structured_outputs={"choice": ["no"]}, min_tokens=6, max_tokens=20)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("no", "stop")


async def test_b133_nothing_cuts_a_grammar_short_but_max_tokens(server):
    """B133: a stop token was allowed before the grammar was complete: truncated JSON with "stop"."""
    for extra in ({"stop": ["}", '"', "a"]}, {"stop_token_ids": [ord(c) for c in '{}":,0123456789']}):
        answer = await server.complete(structured_outputs={"json": SCHEMA}, max_tokens=200, temperature=1, **extra)
        fits_schema(answer["choices"][0]["text"], SCHEMA)
        assert answer["choices"][0]["finish_reason"] == "stop"
    cut = (await server.complete(structured_outputs={"json": SCHEMA}, max_tokens=3))["choices"][0]
    assert cut["finish_reason"] == "length"


async def test_a_stop_string_ends_an_answer_that_could_end_there(server):
    fields = {"structured_outputs": {"regex": "(ab)*c*"}, "temperature": 1, "max_tokens": 100}
    for seed in range(12):
        choice = (await server.complete(**fields, stop=["cc"], seed=seed))["choices"][0]
        fits_regex(choice["text"], "(ab)*c*")
        assert "cc" not in choice["text"]


async def test_ignore_eos_goes_on_as_long_as_the_grammar_can(server):
    fields = {"structured_outputs": {"regex": "[a-c]*"}, "temperature": 1, "ignore_eos": True}
    choice = (await server.complete(**fields, max_tokens=30))["choices"][0]
    assert len(choice["text"]) == 30
    assert choice["finish_reason"] == "length"
    fields["structured_outputs"] = {"regex": "[a-c]{0,5}"}
    choice = (await server.complete(**fields, max_tokens=30))["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (5, "stop")


async def test_b131_free_rows_among_guided_ones_are_what_they_are_alone(server):
    """B131: in mixed batches one row's grammar was applied to another."""
    prompts = [f"prompt {i}" for i in range(8)]
    alone = [(await server.complete(prompt=p, temperature=1, seed=i, max_tokens=30)) for i, p in enumerate(prompts)]

    async def one(index, guided):
        await asyncio.sleep(0.002 * (index * 7 % 5))
        extra = {"structured_outputs": {"regex": f"{index}[0-9]{{{index + 3}}}"}} if guided else {}
        body = {"prompt": prompts[index], "temperature": 1, "seed": index, "max_tokens": 30}
        return (await server.complete(**body, **extra))["choices"][0]["text"]

    for _ in range(3):
        mixed = await asyncio.gather(*[one(i, guided) for i in range(8) for guided in (False, True)])
        assert mixed[::2] == [answer["choices"][0]["text"] for answer in alone]
        for index, text in enumerate(mixed[1::2]):
            fits_regex(text, f"{index}[0-9]{{{index + 3}}}")


async def test_a_hostile_schema_keeps_nobody_waiting(server):
    pattern = {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]}
    hostile = asyncio.create_task(refused(server, COMPLETIONS, C | {"structured_outputs": {"json": pattern}}))
    loop, waits = asyncio.get_running_loop(), []
    while not hostile.done():
        begin = loop.time()
        await server.complete()
        fits_regex((await server.complete(guided_regex=f"x{len(waits)}"))["choices"][0]["text"], f"x{len(waits)}")
        waits.append(loop.time() - begin)
    assert (await hostile)["code"] == "grammar_too_complex"
    assert len(waits) > 3
    assert sorted(waits)[len(waits) // 2] < 0.5  # the longest holds the start of the second worker


async def test_a_client_that_leaves_while_its_grammar_is_compiled(server):
    task = asyncio.create_task(server.complete(structured_outputs={"regex": "[a-d]{3}[x-z]"}))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await server.complete())["choices"]


REFUSED = [
    ({"response_format": {}}, None),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "foo": 1}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": ["x"]}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": "json_object"}, "response_format"),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"disable_any_whitespace": False, "regex": None}}, None),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": True}, "guided_json"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_json": None, "guided_regex": "", "guided_choice": [], "guided_grammar": ""}, None),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [97]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
async def test_a_bad_request_names_its_field(server, fields, param):
    for path, body in ((COMPLETIONS, C), (CHAT, H)):
        if param is None:
            status, answer = await server.post(path, body | fields)
            assert status == 200, answer
        else:
            assert (await refused(server, path, body | fields))["param"] == param
