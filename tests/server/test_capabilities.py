"""/v1/capabilities tells the truth: every field called honoured moves the answer, with a real (tiny) model."""

import asyncio
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jcb.config import ServeConfig
from jcb.config_file import override
from jcb.server.capabilities import BODIES, fields_of
from tests.checkpoint.tiny_model import EOS, write_tiny_hf

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking %}think\n{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
}
SETTINGS = {
    "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "num_pages": 65, "page_size": 16,
    "policy": "priority", "compile_cache": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from jcb.engine.build import load_engine

    folder = write_tiny_hf(tmp_path_factory.mktemp("tiny"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 0.05  # or one token is so likely that no rule of sampling moves anything
    save_file(tensors, folder / "model.safetensors")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": BEGIN}))
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    return load_engine(override(ServeConfig(model=str(folder), chat_template=str(template)), SETTINGS))


SAMPLED = {"temperature": 1.0, "seed": 11, "max_tokens": 24, "ignore_eos": True}
ENDS = {"logit_bias": {str(EOS): 100}, "max_tokens": 6}  # the first token ends it
COMMON = {  # field → (what else the requests hold, its value in the second)
    "temperature": ({"temperature": 0.0}, 1.5),
    "top_k": ({}, 1),
    "top_p": ({}, 0.01),
    "min_p": ({}, 0.9),
    "seed": ({}, 12),
    "presence_penalty": ({"temperature": 0.0}, 2.0),
    "frequency_penalty": ({"temperature": 0.0}, 2.0),
    "repetition_penalty": ({"temperature": 0.0}, 9.0),
    "logit_bias": ({}, {"70": 100}),
    "allowed_token_ids": ({}, [70, 71]),
    "bad_words": ({"logit_bias": {"70": 100}}, lambda text, ids: [text[:1]]),
    "stop": ({}, lambda text, ids: text[3:5]),
    "stop_token_ids": ({}, lambda text, ids: [ids[4]]),
    "include_stop_str_in_output": ({"stop": lambda text, ids: text[3:5]}, True),
    "n": ({}, 2),
    "max_tokens": ({}, 3),
    "min_tokens": (ENDS | {"ignore_eos": False}, 3),
    "ignore_eos": (ENDS | {"ignore_eos": False}, True),
    "skip_special_tokens": (ENDS, False),
    "return_token_ids": ({"return_token_ids": False}, True),
    "truncate_prompt_tokens": ({}, 2),
}
OWN = {
    COMPLETIONS: {
        "prompt": ({}, "other"),
        "add_special_tokens": ({}, False),
        "echo": ({}, True),
        "logprobs": ({}, 2),
        "return_tokens_as_token_ids": ({"logprobs": 1}, True),
        "prompt_logprobs": ({}, 1),
        **COMMON,
    },
    CHAT: {
        "messages": ({}, [{"role": "user", "content": "other"}]),
        "add_special_tokens": ({}, True),
        "add_generation_prompt": ({}, False),
        "continue_final_message": ({"add_generation_prompt": False}, True),
        "chat_template_kwargs": ({}, {"enable_thinking": True}),
        "logprobs": ({}, True),
        "top_logprobs": ({"logprobs": True}, 3),
        "return_tokens_as_token_ids": ({"logprobs": True}, True),
        "prompt_logprobs": ({}, 1),
        "max_completion_tokens": ({"max_tokens": None}, 3),
        **COMMON,
    },
    RESPONSES: {
        "input": ({}, "other"),
        "instructions": ({}, "be brief"),
        "max_output_tokens": ({}, 3),
        "temperature": ({"temperature": 0.0}, 1.5),
        "top_p": ({"temperature": 10.0}, 1e-6),
        "text": ({}, {"format": {"type": "json_schema", "name": "seven", "schema": {"const": 7}}}),
    },
}
BASE = {
    COMPLETIONS: {"prompt": "Hello world", "return_token_ids": True, **SAMPLED},
    CHAT: {"messages": [{"role": "user", "content": "Hello world"}], "return_token_ids": True, **SAMPLED},
    RESPONSES: {"input": "Hello world", "max_output_tokens": 12},
}
TESTED_BELOW = {"model", "stream", "stream_options", "stream_interval", "request_id", "cache_salt", "priority"}
TESTED_ELSEWHERE = {
    "test_structured.py": {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                           "guided_grammar", "guided_decoding_backend"},
    "test_tools.py": {"tools", "tool_choice", "parallel_tool_calls"},
}  # fmt: skip


def seen(path, body):
    """What of an answer can move: all but ids, times and the cache's hits."""
    if path == RESPONSES:
        return [item["content"] for item in body["output"]], body["usage"]["input_tokens"]
    body.pop("id"), body.pop("created"), body["usage"].pop("prompt_tokens_details")
    return body


def first(path, body):
    """Text and token ids of the first choice."""
    if path == RESPONSES:
        return body["output"][0]["content"][0]["text"], []
    choice = body["choices"][0]
    return choice.get("text", choice.get("message", {}).get("content")), choice.get("token_ids")


async def ask(server, path, body):
    status, answer = await server.post(path, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("path", sorted(OWN))
async def test_every_honoured_field_is_in_a_table(path):
    honoured = {name for name, found in fields_of(BODIES[path]).items() if found["status"] == "honoured"}
    elsewhere = set().union(*TESTED_ELSEWHERE.values())
    assert honoured - TESTED_BELOW - elsewhere == OWN[path].keys()
    for name, fields in TESTED_ELSEWHERE.items():
        text = (Path(__file__).parent / name).read_text()
        assert all(field in text for field in fields & honoured), name


@pytest.mark.parametrize("path", sorted(OWN))
async def test_every_honoured_field_moves_the_answer(start_server, engine, path):
    server = await start_server(engine=engine)
    plain = first(path, await ask(server, path, BASE[path]))
    for field, (extra, value) in OWN[path].items():
        body = BASE[path] | {k: v(*plain) if callable(v) else v for k, v in extra.items()}
        before = await ask(server, path, body)
        value = value(*first(path, before)) if callable(value) else value
        after = await ask(server, path, body | {field: value})
        again = await ask(server, path, body | {field: value})
        after, again = seen(path, after), seen(path, again)
        assert seen(path, before) != after, f"{field} changes nothing"
        if "temperature" not in field and path != RESPONSES:
            assert after == again, f"{field} is not reproducible"
    await server.settle()


async def test_fields_that_move_something_else(start_server, engine):
    server = await start_server(engine=engine)
    for path in (COMPLETIONS, CHAT):
        body = BASE[path] | {"max_tokens": 8}
        assert (await server.post(path, body | {"model": "other"}))[0] == 404
        events = await server.events(path, body)
        usage = await server.events(path, body | {"stream_options": {"include_usage": True}})
        assert len(usage) == len(events) + 1
        assert len(await server.events(path, body | {"stream_interval": 4})) < len(events)
        async with server.session.post(server.url + path, json=body | {"request_id": "mine"}) as response:
            assert response.headers["X-Request-Id"] == "mine"
        prompt = {"prompt": [70] * 40} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "z" * 50}]}
        hits = []
        for salt in ("one", "one", "two"):
            answer = await ask(server, path, body | prompt | {"cache_salt": salt})
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert hits[0] == hits[2] == 0 < hits[1]
    async with server.session.post(server.url + RESPONSES, json=BASE[RESPONSES] | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        await response.read()
    assert (await server.post(RESPONSES, BASE[RESPONSES] | {"model": "other"}))[0] == 404
    await server.settle()


async def test_priority_decides_who_goes_first(start_server, engine):
    server = await start_server(engine=engine)
    ended = []

    async def one(name, priority, tokens):
        body = {"prompt": [70, 71], "max_tokens": tokens, "ignore_eos": True, "priority": priority}
        await ask(server, COMPLETIONS, body)
        ended.append(name)

    for path in (COMPLETIONS, CHAT):
        assert fields_of(BODIES[path])["priority"]["status"] == "honoured"
    running = [asyncio.create_task(one(f"running {i}", -1, 100)) for i in range(2)]
    await server.until_tokens(2)
    late = asyncio.create_task(one("late", 5, 4))
    await asyncio.sleep(0.01)
    urgent = asyncio.create_task(one("urgent", 0, 4))
    await asyncio.gather(late, urgent, *running)
    assert ended.index("urgent") < ended.index("late")


async def test_the_table_is_served(server):
    status, text = await server.get("/v1/capabilities")
    found = json.loads(text)
    assert status == 200
    assert found["fields"] == {path: fields_of(model) for path, model in BODIES.items()}
    completion, chat = found["fields"][COMPLETIONS], found["fields"][CHAT]
    assert completion["suffix"] == {"status": "neutral value accepted", "neutral": [""]}
    assert completion["user"] == {"status": "label"}
    assert chat["prediction"] == {"status": "refused"}
    for name in OPENAI_CHAT:
        assert name in chat, name
    for name in OPENAI_COMPLETIONS:
        assert name in completion, name
    for name in VLLM:
        assert name in chat, name
        assert name in completion or name in CHAT_ONLY, name


OPENAI_CHAT = """messages model frequency_penalty logit_bias logprobs top_logprobs max_completion_tokens max_tokens n
presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
parallel_tool_calls user reasoning_effort verbosity service_tier store metadata prompt_cache_key safety_identifier
prediction modalities audio web_search_options moderation functions function_call""".split()  # noqa: SIM905
OPENAI_COMPLETIONS = """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty
seed stop stream stream_options suffix temperature top_p user""".split()  # noqa: SIM905
VLLM = """top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output
skip_special_tokens spaces_between_special_tokens add_special_tokens truncate_prompt_tokens prompt_logprobs
allowed_token_ids bad_words logprob_token_ids return_token_ids return_tokens_as_token_ids chat_template
chat_template_kwargs add_generation_prompt continue_final_message structured_outputs priority request_id session_id
cache_salt stream_interval kv_transfer_params""".split()  # noqa: SIM905
CHAT_ONLY = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
