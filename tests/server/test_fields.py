"""Every field of a request: its bad values, its neutral ones, and the unknown ones."""

import io
import json
import time

import pytest

from jcb.config import ServerConfig
from jcb.server.schema import CompletionBody
from jcb.types import RequestError
from tests.server.refusals import CHAT, COMPLETIONS, C, H, check_error, refused

HUGE = 99999999999999999999
BAD_COMPLETION_FIELDS = [
    ("priority", HUGE),
    ("priority", 1),  # the policy is first come, first served
    ("user", 7),
    ("user", "x" * 129),
    ("user", "a\nb"),
    ("safety_identifier", "x" * 129),
    ("prompt_cache_key", ["x"]),
    ("stream_interval", 0),
    ("stream_interval", 1025),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 10**6),
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
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [1]),
    ("bad_words", ["a" * 257]),
    ("bad_words", ["a"] * 65),
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


@pytest.mark.parametrize(
    ("path", "field", "bad", "neutral"),
    [
        (CHAT, "tool_choice", "required", "auto"),
        (CHAT, "echo", True, False),
        (CHAT, "prompt", "x", None),
        (CHAT, "functions", [{"name": "f"}], []),
        (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}], []),
        (COMPLETIONS, "logprob_token_ids", [1], []),
        (CHAT, "modalities", ["audio"], ["text"]),
        (COMPLETIONS, "best_of", 2, 1),
        (COMPLETIONS, "suffix", "end", ""),
        (COMPLETIONS, "logits_processors", ["x"], []),
        (COMPLETIONS, "kv_transfer_params", {"a": 1}, {}),
    ],
)
async def test_known_fields_are_honoured_or_refused(server, path, field, bad, neutral):
    base = C if path == COMPLETIONS else H
    error = await refused(server, path, base | {field: bad})
    assert error["param"] == field
    status, _ = await server.post(path, base | {field: neutral})
    assert status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
async def test_b029_b189_an_adapter_is_refused_not_answered_without_it(server, path):
    body = {"input": "x"} if path == "/v1/responses" else C if path == COMPLETIONS else H
    for field, value in (
        ("lora_request", {"lora_name": "a", "lora_int_id": 1}),
        ("lora_path", "a"),
        ("lora", [{"id": 0, "scale": 1.0}]),
        ("adapter_id", "a"),
        ("adapters", "a"),
    ):
        error = await refused(server, path, body | {field: value})
        assert (error["param"], error["code"]) == (field, "unsupported_field")
    for name in ("fake-adapter", "fake:adapter", "fake/adapter"):
        error = await refused(server, path, body | {"model": name}, 404)
        assert error["code"] == "model_not_found"
    assert (await server.post(path, body | {"lora": [], "lora_path": ""}))[0] == 200


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


@pytest.mark.parametrize("user", ["auth0|5f7c8ec7c33c6c004bbafe82", "name@example.org", "Ünï cödé", "{urn:x}#1", ""])
async def test_the_names_that_clients_give_their_users_pass(server, user):
    for field in ("user", "safety_identifier", "prompt_cache_key", "session_id"):
        assert (await server.complete(**{field: user}))["choices"]


async def test_a_large_bias_map_is_refused_at_once(server):
    """The event loop serves everybody: 200,000 bad entries may not hold it up."""
    body = C | {"logit_bias": {f"x{i}": "y" for i in range(200_000)}}
    began = time.perf_counter()
    with pytest.raises(RequestError):
        CompletionBody.parse(body)
    assert time.perf_counter() - began < 0.05
    async with server.session.post(server.url + COMPLETIONS, data=io.BytesIO(json.dumps(body).encode())) as response:
        assert check_error(await response.json())["param"] == "logit_bias"


async def test_two_keys_for_one_token_are_refused(server):
    error = await refused(server, COMPLETIONS, C | {"logit_bias": {"97": 1, "097": -1}})
    assert (error["param"], error["code"]) == ("logit_bias", "invalid_value")


async def test_truncate_prompt_tokens_keeps_the_end(server):
    prompt = list(range(97, 117))
    for most in (5, 20, 100):
        cut = await server.complete(prompt=prompt, truncate_prompt_tokens=most, return_token_ids=True, echo=True)
        assert cut["choices"][0]["prompt_token_ids"] == prompt[-most:]
        assert cut["choices"][0]["text"].startswith(bytes(prompt[-most:]).decode())
        assert (
            cut["choices"][0]
            == (await server.complete(prompt=prompt[-most:], return_token_ids=True, echo=True))["choices"][0]
        )
    chat = await server.chat(truncate_prompt_tokens=7, return_token_ids=True)
    assert len(chat["prompt_token_ids"]) == 7


@pytest.mark.usefixtures("scripted")
async def test_b103_too_long_a_prompt_is_never_a_200(server):
    """Text, token ids, a conversation, and one of several prompts; streamed or not; nothing of it runs."""
    limit = server.engine.info.max_model_len
    long = "ab" * limit
    before = server.async_engine.metrics.generation_tokens.value
    for path, body in (
        (COMPLETIONS, {"prompt": long}),
        (COMPLETIONS, {"prompt": [7] * (limit + 1)}),
        (COMPLETIONS, {"prompt": ["Hi", long, "Ho"]}),
        (COMPLETIONS, {"prompt": [[7], [7] * (limit + 1)]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"input": long}),
    ):
        for stream in (False, True):
            status, answer = await server.post(path, body | {"stream": stream})
            assert status == 400, (path, stream)
            assert answer["error"]["code"] == "context_length_exceeded"
            assert f"{limit:,}" in answer["error"]["message"] or str(limit) in answer["error"]["message"]
    await server.settle()
    assert server.async_engine.metrics.generation_tokens.value == before


async def test_b107_the_room_is_what_truncation_leaves(server):
    limit = server.engine.info.max_model_len
    for most, max_tokens in ((10, None), (-1, 20), (-1, None)):
        answer = await server.complete(
            prompt="ab" * limit, truncate_prompt_tokens=most, max_tokens=max_tokens, ignore_eos=True
        )
        usage = answer["usage"]
        assert usage["completion_tokens"] == (max_tokens or (16 if most > 0 else 1))
        assert usage["prompt_tokens"] == (most if most > 0 else limit - usage["completion_tokens"])


async def test_stream_interval_gathers_tokens(server):
    body = C | {"max_tokens": 20, "ignore_eos": True, "logprobs": 1, "n": 2, "return_token_ids": True}
    whole = await server.complete(**body)
    events = await server.events(COMPLETIONS, body | {"stream_interval": 6})
    for index in (0, 1):
        chunks = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [len(chunk["token_ids"]) for chunk in chunks] == [1, 6, 6, 6, 1]
        assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][index]["text"]
        joined = [token for chunk in chunks for token in chunk["logprobs"]["tokens"]]
        assert joined == whole["choices"][index]["logprobs"]["tokens"]


async def test_tokens_as_ids(server):
    answer = await server.complete(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = answer["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    answer = await server.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    assert all(entry["token"].startswith("token_id:") for entry in answer["choices"][0]["logprobs"]["content"])


async def test_continue_final_message(server):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is "}]
    fields = {"messages": turns, "add_generation_prompt": False, "return_token_ids": True}
    prompt = (await server.chat(**fields, continue_final_message=True))["prompt_token_ids"]
    text = server.engine.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.endswith("The answer is ")
    assert (await refused(server, CHAT, H | {"continue_final_message": True}))["param"] == "continue_final_message"
    empty = [{"role": "user", "content": ""}]
    body = H | {"messages": empty, "continue_final_message": True, "add_generation_prompt": False}
    assert (await refused(server, CHAT, body))["param"] == "continue_final_message"


async def test_template_variables_are_an_allow_list(server):
    assert (await server.chat(chat_template_kwargs={"enable_thinking": False}))["choices"]
    for name in ("messages", "loop", "__class__", "add_generation_prompt"):
        error = await refused(server, CHAT, H | {"chat_template_kwargs": {name: 1}})
        assert error["param"] == "chat_template_kwargs"
