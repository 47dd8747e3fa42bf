"""Log-probabilities in the forms that clients read."""

import math

import pytest


async def test_b071_chat_form(server):
    answer = await server.chat(logprobs=True, top_logprobs=5, max_tokens=6)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 5
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0]  # greedy takes the likeliest, and it is the same number
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    entries = (await server.chat(logprobs=True, max_tokens=3))["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert (await server.chat())["choices"][0]["logprobs"] is None


async def test_completion_form(server):
    choice = (await server.complete(logprobs=3, max_tokens=6, ignore_eos=True))["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {6}
    assert "".join(logprobs["tokens"]) == choice["text"]
    for logprob, tops in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(tops) == 3
        assert logprob == max(tops.values())
    choice = (await server.complete(logprobs=0, max_tokens=2))["choices"][0]
    assert [len(tops) for tops in choice["logprobs"]["top_logprobs"]] == [1, 1]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_b077_echo_with_logprobs(server, as_ids, max_tokens):
    text = "\n1. A has 20"
    prompt = server.engine.tokenizer.encode(text) if as_ids else text
    answer = await server.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, ignore_eos=True)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(text)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    count = answer["usage"]["prompt_tokens"] + max_tokens
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert {len(values) for values in logprobs.values()} == {count}
    offsets, position = [], 0
    for token in logprobs["tokens"]:
        offsets.append(position)
        position += len(token)
    assert logprobs["text_offset"] == offsets


async def test_b077_echo_without_logprobs(server):
    choice = (await server.complete(prompt=[72, 105], echo=True, max_tokens=2, ignore_eos=True))["choices"][0]
    assert choice["text"].startswith(server.engine.tokenizer.decode([72, 105]))
    assert choice["logprobs"] is None


async def test_the_batch_form_of_a_likelihood_harness(server):
    """One request with token-id prompts, echo and one token more; the first entry of each is null."""
    prompts = [list(b"The cat"), list(b"A")]
    answer = await server.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        values, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(values) == len(tops) == len(prompt) + 1
        assert all(value in top.values() for value, top in zip(values[1:], tops[1:], strict=True))


async def test_prompt_logprobs_have_the_shape_of_vllm(server):
    prompt = list(b"Hello")
    for answer in (
        (await server.complete(prompt=prompt, prompt_logprobs=2))["choices"][0],
        await server.chat(prompt_logprobs=2, return_token_ids=True),
    ):
        rows, ids = answer["prompt_logprobs"], answer.get("prompt_token_ids", prompt)
        assert rows[0] is None
        assert len(rows) == len(ids)
        for token, row in zip(ids[1:], rows[1:], strict=True):
            assert set(row[str(token)]) == {"logprob", "rank", "decoded_token"}
            assert len(row) in (2, 3)
    status, answer = await server.post("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


async def test_return_token_ids(server):
    prompt = list(b"Hello")
    choice = (await server.complete(prompt=prompt, return_token_ids=True, max_tokens=4, ignore_eos=True))["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert server.engine.tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert "token_ids" not in (await server.complete())["choices"][0]


async def test_a_stream_gives_the_prompt_ids_of_each_choice_once(server):
    body = {"prompt": "hi", "n": 2, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    events = await server.events("/v1/completions", body)
    choices = [event["choices"][0] for event in events]
    assert [choice.get("prompt_token_ids") for choice in choices if choice["index"] == 1] == [[104, 105]] + [None] * 3
    assert sum("prompt_token_ids" in choice for choice in choices) == 2
