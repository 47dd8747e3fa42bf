"""Sampling fields from the body to the engine, ids, batches and labels."""

import asyncio

import pytest

from jcb.types import SamplingParams


@pytest.fixture
def seen(start_server, monkeypatch):
    """Starts a server and notes the params of what it submits."""

    async def start(**options):
        server = await start_server(**options)
        noted = []
        submit = server.async_engine.submit

        async def note(prompts, params, **kwargs):
            noted.append((prompts, params, kwargs))
            return await submit(prompts, params, **kwargs)

        monkeypatch.setattr(server.async_engine, "submit", note)
        return server, noted

    return start


async def test_every_field_reaches_the_engine(seen):
    server, noted = await seen(policy="priority")
    fields = {
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 3,
        "stop": ["zz"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logit_bias": {"97": 1.5},
        "allowed_token_ids": [97, 98],
        "logprobs": 2,
        "prompt_logprobs": 3,
    }
    await server.complete(**fields, priority=4, cache_salt="salt")
    params = SamplingParams(
        **fields | {"stop": ("zz",), "stop_token_ids": (5,), "logit_bias": {97: 1.5}, "allowed_token_ids": (97, 98)}
    )
    _, got, kwargs = noted[0]
    assert got == params
    assert kwargs == {"priority": 4, "namespace": "/salt"}
    await server.chat(**fields | {"logprobs": True, "top_logprobs": 2})
    assert noted[1][1] == params


async def test_defaults_are_those_of_openai(seen):
    server, noted = await seen()
    await server.post("/v1/completions", {"prompt": "x"})
    await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert noted[0][1] == SamplingParams(max_tokens=16)
    assert noted[1][1] == SamplingParams(max_tokens=None)


async def test_b097_the_models_defaults_come_behind_the_request(start_server, monkeypatch):
    server = await start_server()
    served = server.service.served
    object.__setattr__(served, "defaults", {"temperature": 0.25, "top_p": 0.5, "max_tokens": 3})
    got = []
    submit = server.async_engine.submit
    monkeypatch.setattr(
        server.async_engine, "submit", lambda p, params, **kw: got.append(params) or submit(p, params, **kw)
    )
    await server.post("/v1/completions", {"prompt": "x", "top_p": 0.75})
    assert (got[0].temperature, got[0].top_p, got[0].max_tokens) == (0.25, 0.75, 16)


@pytest.mark.parametrize("top_k", [-1, 0, 1, 2**31, 2**63, 9999999])
async def test_b081_any_top_k_above_the_vocabulary_is_the_vocabulary(server, top_k):
    greedy = server.complete(temperature=0)
    sampled = server.complete(temperature=1, top_k=top_k, seed=1)
    answers = await asyncio.gather(greedy, sampled)
    assert all(a["choices"][0]["text"] for a in answers)
    vocab = server.engine.info.vocab_size
    for exact in (vocab - 1, vocab, vocab + 1):
        assert (await server.complete(temperature=1, top_k=exact))["choices"]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-7, 1e-5, 9e-5])
async def test_b085_tiny_temperatures_are_greedy(server, temperature):
    greedy = await server.complete(temperature=0)
    assert (await server.complete(temperature=temperature))["choices"][0]["text"] == greedy["choices"][0]["text"]


async def test_b089_no_seed_is_fresh_entropy_and_a_seed_is_not(server):
    async def texts(**fields):
        answers = await asyncio.gather(*[server.complete(temperature=1, max_tokens=12, **fields) for _ in range(20)])
        return {a["choices"][0]["text"] for a in answers}

    assert len(await texts()) >= 15
    assert len(await texts(seed=7)) == 1
    assert await texts(seed=7) != await texts(seed=8)


async def test_b099_choices_of_one_seed_differ_and_come_again(server):
    first = await server.complete(n=4, seed=1, temperature=1, max_tokens=12)
    again = await server.complete(n=4, seed=1, temperature=1, max_tokens=12)
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 4
    assert texts == [choice["text"] for choice in again["choices"]]
    alone = await server.complete(n=1, seed=1, temperature=1, max_tokens=12)
    assert alone["choices"][0]["text"] == texts[0]


async def test_choices_end_one_by_one(server):
    """When one choice is done the others' chunks go on."""
    body = {"prompt": "x", "n": 8, "temperature": 1, "stop": ["e", "t", "a"], "max_tokens": 40, "seed": 3}
    events = await server.events("/v1/completions", body)
    ends = {e["choices"][0]["index"]: i for i, e in enumerate(events) if e["choices"][0]["finish_reason"]}
    assert set(ends) == set(range(8))
    for index, position in ends.items():
        assert all(e["choices"][0]["index"] != index for e in events[position + 1 :])


async def test_b023_priorities_with_many_choices(start_server):
    server = await start_server(policy="priority", max_num_seqs=4)
    bodies = [{"n": 3, "temperature": 1, "priority": i % 5 - 2, "max_tokens": 6} for i in range(20)]
    answers = await asyncio.gather(*[server.complete(**body) for body in bodies])
    assert all(len(answer["choices"]) == 3 for answer in answers)
    await server.settle()


async def test_choices_are_in_the_order_of_the_prompts(server):
    prompts = [list(b"one"), list(b"two"), list(b"three")]
    temperature = 1 if server.is_exact else 0
    together = await server.complete(prompt=prompts, n=2, temperature=temperature, seed=4)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = await server.complete(prompt=prompt, n=2, temperature=temperature, seed=4)
        assert [c["text"] for c in alone["choices"]] == [c["text"] for c in together["choices"][2 * i : 2 * i + 2]]
    assert together["usage"]["prompt_tokens"] == 3 + 3 + 5
    error = await server.post("/v1/completions", {"prompt": prompts * 10, "n": 5})
    assert (error[0], error[1]["error"]["param"]) == (400, "n")


async def test_all_or_none_of_a_batch_is_admitted(start_server):
    server = await start_server(max_num_seqs=1, max_queued=3)
    server.executor.step_seconds = 0.01
    running = asyncio.create_task(server.complete(max_tokens=30, ignore_eos=True))
    await asyncio.sleep(0.1)
    behind = asyncio.create_task(server.complete(max_tokens=1))
    await asyncio.sleep(0.05)
    status, answer = await server.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert server.engine.core.scheduler.num_waiting == 1
    await asyncio.gather(running, behind)
    await server.settle()


async def test_b125_the_same_label_on_many_requests(server):
    async def ask(i):
        body = {"prompt": f"{i}", "max_tokens": 5, "request_id": "same", "temperature": 0, "ignore_eos": True}
        headers = {"X-Request-Id": "same"}
        async with server.session.post(server.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "same"
            return await response.json()

    answers = await asyncio.gather(*[ask(i) for i in range(50)])
    assert len({answer["id"] for answer in answers}) == 50
    for i in (0, 7, 49):
        alone = await server.complete(prompt=f"{i}", max_tokens=5, ignore_eos=True)
        assert alone["choices"][0]["text"] == answers[i]["choices"][0]["text"]
    for bad in ("a b", "x" * 129, "é"):
        async with server.session.get(server.url + "/health", headers={"X-Request-Id": bad}) as response:
            assert response.status == 200
            assert "X-Request-Id" not in response.headers


async def test_b111_b113_short_and_empty_messages(server):
    assert (await server.chat(messages=[{"role": "user", "content": "h"}]))["choices"]
    for empty in ("", None, []):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": empty}]
        assert (await server.chat(messages=[*turns, {"role": "user", "content": "b"}]))["choices"]
    assert (await server.chat(messages=[{"role": "user", "content": ""}]))["choices"]
    parts = [{"type": "text", "text": "Hi"}]
    as_parts = await server.chat(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": parts}])
    as_text = await server.chat(messages=[{"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}])
    assert as_parts["choices"] == as_text["choices"]
    assert (await server.complete(prompt=""))["usage"]["prompt_tokens"] == 1


async def test_a_long_prompt_is_encoded_off_the_loop(start_server):
    server = await start_server(max_model_len=8192, num_pages=4096, max_num_batched_tokens=1024)
    answer = await server.complete(prompt="ab" * 3000, max_tokens=2, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == 6000


async def test_tokenize_and_back(server):
    status, answer = await server.post("/tokenize", {"prompt": "brown fox", "return_token_strs": True, "model": None})
    assert status == 200
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]) == "brown fox"
    status, back = await server.post("/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": "brown fox"})
    messages = [{"role": "user", "content": "Hi"}]
    _, answer = await server.post("/tokenize", {"messages": messages})
    chat = await server.chat(messages=messages)
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": messages}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_b095_bad_words_hold_for_every_choice(server):
    fields = {"n": 3, "temperature": 1, "max_tokens": 60, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    free = await server.complete(**fields)
    encode = server.engine.tokenizer.encode
    words = sorted({letter for choice in free["choices"] for letter in choice["text"] if letter.isalpha()})[:6]
    banned = {encode(word)[0] for word in words if len(encode(word)) == 1}
    assert banned
    held = await server.complete(**fields, bad_words=words)
    for choice in held["choices"]:
        assert not banned & set(choice["token_ids"])
    assert any(banned & set(choice["token_ids"]) for choice in free["choices"])
    assert (await server.complete(**fields))["choices"] == free["choices"]
