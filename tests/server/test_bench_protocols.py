"""Benchmark clients as they send and read: vLLM's `bench serve` (backends openai and openai-chat) and guidellm.

Their rules are written down here from their sources, since the programs are too large to install for a test.
"""

import json
import time

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]
COMMON = {"max_tokens": 12, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
VLLM = {
    COMPLETIONS: {"prompt": "Hello there", "repetition_penalty": 1.0, "logprobs": None, **COMMON},
    CHAT: {"messages": PARTS, "max_completion_tokens": 12, **COMMON},
}
GUIDELLM = {
    COMPLETIONS: {"prompt": "Hello there", "stop": None, **COMMON},
    CHAT: {"messages": PARTS, "max_completion_tokens": 12, "stop": None, **COMMON},
}


async def lines(server, path, body):
    """The events' data as a client sees them, chunk by chunk of what the socket gives."""
    headers = {"Authorization": "Bearer ", "x-request-id": "bench-1"}
    async with server.session.post(server.url + path, json=body, headers=headers) as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"] == "bench-1"
        buffer = ""
        async for piece in response.content.iter_any():
            buffer += piece.decode()
            while "\n\n" in buffer:
                event, buffer = buffer.split("\n\n", 1)
                yield event.removeprefix("data: ")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_vllm_bench_serve(server, path):
    """A chunk with choices is a token unless it brings the role; usage counts only on a chunk without choices."""
    async with server.session.get(server.url + "/v1/models") as response:
        model = (await response.json())["data"][0]
    assert model["root"]
    body = {k: v for k, v in VLLM[path].items() if not (path == CHAT and k == "max_tokens")}
    text, tokens, usage, extra, times = "", 0, None, None, []
    async for data in lines(server, path, body | {"model": model["id"]}):
        if data == "[DONE]":
            break
        event = json.loads(data)
        if choices := event.get("choices"):
            delta = choices[0] if path == COMPLETIONS else choices[0]["delta"]
            content = delta.get("text" if path == COMPLETIONS else "content")
            if content is not None and not delta.get("role"):
                times.append(time.perf_counter())
                text += content
                tokens += 1
        elif event.get("usage"):
            usage, extra = event["usage"], event.get("metrics")
    assert tokens == usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] > 0
    assert text
    assert times == sorted(times)
    assert 0 <= extra["queue_time_ms"] <= extra["time_to_first_token_ms"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_guidellm(server, path):
    """It asks for counts on every chunk, takes the last, and treats a chunk with `error` as a failure."""
    assert (await server.get("/health"))[0] == 200
    body = {k: v for k, v in GUIDELLM[path].items() if not (path == CHAT and k == "max_tokens")}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counts = []
    async for data in lines(server, path, body):
        if data == "[DONE]":
            break
        event = json.loads(data)
        assert "error" not in event
        counts.append(event["usage"]["completion_tokens"])
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_the_lengths_a_benchmark_cuts_prompts_to(server):
    """vLLM's bench aligns random prompts with /tokenize and /detokenize."""
    status, cut = await server.post("/tokenize", {"model": None, "prompt": "Hello there", "add_special_tokens": False})
    assert status == 200
    status, back = await server.post("/detokenize", {"model": None, "tokens": cut["tokens"][:5]})
    assert (status, back["prompt"]) == (200, "Hello")


async def test_what_an_evaluation_harness_needs_of_the_tokenizer(server):
    """lm-eval's remote tokenizer."""
    status, text = await server.get("/tokenizer_info")
    info = json.loads(text)
    assert status == 200
    assert info["eos_token"] == server.engine.tokenizer.eos_token
    assert {"bos_token", "pad_token", "chat_template"} <= set(info)
