"""Bodies that are not what they should be."""

import json

import pytest
from pydantic import ValidationError

from jcb.server.schema import ChatBody, CompletionBody
from tests.server.refusals import CHAT, COMPLETIONS, C, H, check_error, refused

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
    assert (await refused(server, COMPLETIONS, C | {"stop": ["a", 1, 2]}))["param"] == "stop[1]"


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
