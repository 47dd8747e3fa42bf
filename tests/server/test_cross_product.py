"""Each field with each kind of value, streaming and not, against a table of what must come of it."""

import asyncio
import json

import pytest

from jcb.server.capabilities import BODIES, fields_of
from jcb.server.fields import LABELS
from tests.server.refusals import check_error

# By JSON text, since some are no JSON at all.
VALUES = {
    "null": "null",
    "true": "true",
    "false": "false",
    "NaN": "NaN",
    "inf": "Infinity",
    "-inf": "-Infinity",
    "1e999": "1e999",
    "0": "0",
    "1": "1",
    "-1": "-1",
    "0.5": "0.5",
    "2^31": str(2**31),
    "2^63": str(2**63),
    "empty text": '""',
    "text": '"x"',
    "huge text": json.dumps("x" * 100_000),
    "empty list": "[]",
    "list": "[1]",
    "huge list": "[" + ",".join(["1"] * 50_000) + "]",
    "empty object": "{}",
    "object": '{"a": 1}',
}
NO_JSON = {"NaN", "inf", "-inf", "1e999"}

BOOL = {"true", "false"}
# Values that give 200; every other one but null gives 400 (or 404: a model that is not there).
GOOD = {
    "model": set(),
    **dict.fromkeys(
        ("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "return_token_ids", "echo",
         "return_tokens_as_token_ids", "add_special_tokens", "add_generation_prompt", "parallel_tool_calls"), BOOL
    ),
    "continue_final_message": {"false"},
    "stream_options": {"empty object", "object"},
    "n": {"1"},
    "seed": {"0", "1", "-1", "2^31"},
    "temperature": {"0", "1", "0.5"},
    "top_p": {"1", "0.5"},
    "top_k": {"0", "1", "-1", "2^31", "2^63"},
    "min_p": {"0", "1", "0.5"},
    "presence_penalty": {"0", "1", "-1", "0.5"},
    "frequency_penalty": {"0", "1", "-1", "0.5"},
    "repetition_penalty": {"1", "0.5"},
    "min_tokens": {"0", "1"},
    "stop": {"text", "empty list"},
    "stop_token_ids": {"list", "empty list"},
    "bad_words": {"empty list"},
    "logit_bias": {"empty object"},
    "allowed_token_ids": {"list"},
    "prompt_logprobs": {"0", "1"},
    "truncate_prompt_tokens": {"1", "-1"},
    "stream_interval": {"1"},
    "priority": {"0"},
    "cache_salt": {"text"},
    "request_id": {"text"},
    "max_tokens": {"1"},
    "max_completion_tokens": {"1"},
    "max_output_tokens": {"1"},
    "top_logprobs": {"0"},
    "chat_template_kwargs": {"empty object"},
    "prompt": {"empty text", "text", "list"},
    "input": {"empty text", "text"},
    "instructions": {"empty text", "text"},
    "messages": set(),
    "metadata": {"empty object"},
    "response_format": {"empty object"},
    "text": {"empty object"},
    "structured_outputs": {"empty object"},
    "guided_json": {"empty object", "object", "empty text", "empty list"},  # empty ones ask for nothing
    "guided_regex": {"text", "empty text"},
    "guided_choice": {"empty list"},
    "guided_grammar": {"empty text"},
    "guided_decoding_backend": set(),
    "tools": {"empty list"},
    "tool_choice": set(),
}  # fmt: skip
OWN = {  # path, field → good values where they differ
    ("/v1/completions", "logprobs"): {"0", "1"},
    ("/v1/completions", "max_tokens"): {"0", "1"},
    ("/v1/chat/completions", "logprobs"): BOOL,
    ("/v1/chat/completions", "top_logprobs"): set(),  # not without logprobs
}
STREAMED_ONLY = {"stream_options"}
WHOLE_ONLY = {"prompt_logprobs"}
TOO_LONG = {"huge text"}  # as a prompt it is longer than the model allows

BASE = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4, "temperature": 0},
}
REQUIRED = {"prompt", "messages", "input"}


def good_values(path, field):
    """Values of `field` that must be answered."""
    capability = fields_of(BODIES[path])[field]
    if field in LABELS - {"metadata"}:
        return {"text", "empty text"}
    if field == "metadata" and path != "/v1/responses":
        return set(VALUES) - NO_JSON
    if capability["status"] != "honoured" and field != "metadata":
        neutral = [json.dumps(value) for value in capability.get("neutral", [])]
        return {name for name, text in VALUES.items() if text in neutral}
    return OWN[path, field] if (path, field) in OWN else GOOD[field]


def expected(path, field, value, stream):
    """The status that the table wants."""
    if value in NO_JSON:
        return 400
    if value == "null":
        return 400 if field in REQUIRED and field in BODIES[path].model_fields else 200
    if field == "model":
        return 404 if "text" in value else 400
    if (field in STREAMED_ONLY and not stream) or (field in WHOLE_ONLY and stream):
        return 400
    return 200 if value in good_values(path, field) else 400


async def wrong(server, path, field, value, stream):
    """What is wrong with the answer to one request, or None."""
    fields = {k: json.dumps(v) for k, v in BASE[path].items()} | {"stream": json.dumps(stream)}
    if field == "max_completion_tokens":
        del fields["max_tokens"]
    fields[field] = VALUES[value]
    raw = "{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in fields.items()) + "}"
    async with server.session.post(server.url + path, data=raw.encode()) as response:
        text = await response.text()
        status = expected(path, field, value, stream)
        streams = value == "true" if field == "stream" else stream
        kind = "text/event-stream" if streams and status == 200 else "application/json"
        if response.status != status or response.content_type != kind or (status == 200 and '"error":{' in text):
            return field, value, stream, response.status, status, text[:200]
        if status != 200:
            check_error(json.loads(text))
        return None


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("path", sorted(BASE))
async def test_every_field_with_every_kind_of_value(server, path):
    before = await server.complete()
    found = []
    for field in fields_of(BODIES[path]):
        asked = [wrong(server, path, field, value, stream) for value in VALUES for stream in (False, True)]
        found += [each for each in await asyncio.gather(*asked) if each is not None]
    assert not found, "\n".join(map(str, found))
    await server.settle()
    assert (await server.complete())["choices"] == before["choices"]
