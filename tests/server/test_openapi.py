"""The document says what the code does: ranges, required fields, answers."""

import json

import pytest

from jcb.config import ServerConfig
from jcb.server import answers
from jcb.server.app import create_app
from jcb.server.openapi import DOCUMENT
from jcb.server.service import Service

BODIES = {
    "/v1/completions": ("CompletionBody", {"prompt": "Hi", "max_tokens": 4, "temperature": 0}),
    "/v1/chat/completions": ("ChatBody", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
    "/v1/responses": ("ResponsesBody", {"input": "Hi", "max_output_tokens": 4}),
}
LARGEST_NEEDS_MORE = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "priority",
                      "truncate_prompt_tokens", "top_logprobs"}  # fmt: skip
"""Fields whose largest value also depends on the model, on other fields or on settings."""


def document(**settings):
    return json.loads(create_app(Service(config=ServerConfig(**settings)))[DOCUMENT])


def ranges(schema):
    """Field → its branch with bounds."""

    def bounded(branch):
        return [branch] if "maximum" in branch else [b for each in branch.get("anyOf", ()) for b in bounded(each)]

    return {name: bounded(field)[0] for name, field in schema["properties"].items() if bounded(field)}


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_ranges_are_those_of_admission(server, path):
    name, base = BODIES[path]
    schema = document()["components"]["schemas"][name]
    found = ranges(schema)
    assert len(found) >= 3
    for field, branch in found.items():
        least = branch.get("minimum", branch.get("exclusiveMinimum"))
        step = 1 if branch["type"] == "integer" else 0.001
        for value in (least - step, branch["maximum"] + step, *([least] if "exclusiveMinimum" in branch else [])):
            status, answer = await server.post(path, base | {field: value})
            assert status == 400, (field, value)
            assert answer["error"]["param"] in (field, "prompt", "max_tokens"), (field, answer)
        good = [least] if "minimum" in branch else []
        good += [] if field in LARGEST_NEEDS_MORE else [branch["maximum"]]
        for value in good if field not in ("priority", "truncate_prompt_tokens", "top_logprobs") else []:
            body = base | ({"max_tokens": None} if field == "max_completion_tokens" else {})
            status, answer = await server.post(path, body | {field: value})
            assert status == 200, (field, value, answer)


async def test_required_fields_are_required(server):
    schemas = document()["components"]["schemas"]
    for path, (name, base) in BODIES.items():
        for field in schemas[name]["required"]:
            status, answer = await server.post(path, {k: v for k, v in base.items() if k != field})
            assert (status, answer["error"]["param"]) == (400, field)


async def test_answers_hold_what_the_document_names_and_nothing_else(server):
    for path, model, body in (
        (
            "/v1/completions",
            answers.Completion,
            {"prompt": "Hi", "logprobs": 1, "echo": True, "return_token_ids": True},
        ),
        ("/v1/completions", answers.Completion, {"prompt": "Hi", "prompt_logprobs": 1}),
        ("/v1/chat/completions", answers.ChatCompletion, BODIES["/v1/chat/completions"][1] | {"logprobs": True}),
        ("/tokenize", answers.Tokens, {"prompt": "Hi", "return_token_strs": True}),
        ("/detokenize", answers.Text, {"tokens": [65]}),
    ):
        status, answer = await server.post(path, body)
        assert status == 200
        check(model, answer)
    for path, model in (("/v1/models", answers.ModelList), ("/version", answers.Version), ("/ready", answers.Ready)):
        check(model, json.loads((await server.get(path))[1]))


def check(model, answer):
    """Valid, and without fields that the model does not have, at every level."""

    def compare(given, known, where):
        if isinstance(given, dict) and isinstance(known, dict):
            assert given.keys() <= known.keys() or not known, f"{where}: {given.keys() - known.keys()}"
            for key in given.keys() & known.keys():
                compare(given[key], known[key], f"{where}.{key}")
        elif isinstance(given, list) and isinstance(known, list):
            for index, (one, other) in enumerate(zip(given, known, strict=True)):
                compare(one, other, f"{where}[{index}]")

    compare(answer, model.model_validate(answer).model_dump(), model.__name__)


def test_keys_are_asked_for_where_they_are_needed(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    with_keys = document(api_key_file=str(keys), profile_folder=str(tmp_path))
    for path, operations in with_keys["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in ("/live", "/ready", "/health", "/", "/playground/{name}"))
    assert "/start_profile" in with_keys["paths"]
    without = document()
    assert not any("security" in op for operations in without["paths"].values() for op in operations.values())
    assert "/start_profile" not in without["paths"]
