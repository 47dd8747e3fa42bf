"""`jcb bench serve` against the scripted server and against servers that fail."""

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp import web

from jcb import cli
from jcb.bench.serving.arrivals import Arrivals
from jcb.bench.serving.client import send
from jcb.bench.serving.datasets import Dataset
from jcb.bench.serving.figures import DETAILS, Wanted
from jcb.bench.serving.run import Load, Saving, Target, benchmark

SHORT = Dataset(input_len=20, output_len=6)
CHUNK = {"choices": [{"text": "a", "index": 0}]}
OUT_OF_PAGES = {"error": {"message": "out of  pages"}}
USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}}


def event(data):
    return f"data: {json.dumps(data)}\n\n".encode()


@pytest.fixture
async def serve_app():
    """Starts apps whose /v1/completions is a function of the request; returns their URL."""
    runners = []

    async def start(handler):
        async def call(request):
            return await handler(request)

        app = web.Application()
        app.router.add_post("/v1/completions", call)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def run(url, *, dataset=SHORT, arrivals=None, wanted=None, saving=None, target=None, said=None, **load):
    target = Target(base_url=url, fields={"ignore_eos": True}, **(target or {}))
    load = Load(**({"num_prompts": 12} | load))
    return await benchmark(
        target, dataset, arrivals or Arrivals(), load, wanted or Wanted(), saving or Saving(),
        say=(said if said is not None else []).append,
    )  # fmt: skip


# ---- the scripted server ----


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_counts_are_the_servers(server, backend):
    result = await run(server.url, target={"backend": backend})
    metrics = server.async_engine.metrics
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_output_tokens"] == metrics.generation_tokens.value == 12 * 6
    assert result["total_input_tokens"] == metrics.prompt_tokens.value
    assert result["output_lens"] == [6] * 12
    assert [len(gaps) for gaps in result["itls"]] == [5] * 12
    if backend == "openai":
        assert result["input_lens"] == [20] * 12
    else:
        assert min(result["input_lens"]) > 20  # the template's own
    for ttft, gaps, latency in zip(result["ttfts"], result["itls"], result["latencies"], strict=True):
        assert ttft + sum(gaps) == pytest.approx(latency)


async def test_lengths_vary_and_prompts_share_their_beginning(server):
    dataset = Dataset(input_len=30, output_len=10, range_ratio=0.5, prefix_len=9)
    result = await run(server.url, dataset=dataset)
    assert min(result["input_lens"]) >= 9 + 15
    assert max(result["input_lens"]) <= 9 + 45
    assert len(set(result["input_lens"])) > 3
    assert 5 <= min(result["output_lens"]) < max(result["output_lens"]) <= 15


async def test_the_request_rate_is_honoured(server):
    began = time.perf_counter()
    result = await run(server.url, arrivals=Arrivals(30.0), num_prompts=24)
    assert time.perf_counter() - began >= 24 / 30
    starts = result["start_times"]
    due = Arrivals(30.0).offsets(24, 0)
    late = [start - starts[0] - (when - due[0]) for start, when in zip(starts, due, strict=True)]
    assert sorted(map(abs, late))[12] < 0.1  # a busy machine may hold up some
    assert max(map(abs, late)) < 0.5


async def test_concurrency_is_limited_and_waiting_is_told_apart(server):
    server.slow_down(0.01)
    wanted = Wanted(("e2el", "client_queue_time"))
    result = await run(server.url, wanted=wanted, max_concurrency=3)
    assert result["max_concurrent_requests"] == 3
    assert result["p99_client_queue_time_ms"] > result["p99_e2el_ms"] > 0
    assert result["p99_client_queue_time_ms"] < 1000 * result["duration"]


async def test_the_model_is_asked_for_and_ids_are_sent(server, tmp_path):
    saving = Saving(is_wanted=True, folder=str(tmp_path), details=True, metadata={"note": "x=y"})
    said = []
    await run(server.url, saving=saving, num_warmups=1, request_id_prefix="bench-", num_prompts=2, said=said)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-infqps-fake-")
    saved = json.loads(path.read_text())
    assert (saved["model_id"], saved["request_rate"], saved["note"], saved["num_prompts"]) == ("fake", "inf", "x=y", 2)
    assert set(DETAILS) <= saved.keys()
    assert server.async_engine.metrics.generation_tokens.value == 3 * 6  # the warm-up is not in the figures
    assert saved["total_output_tokens"] == 12
    assert f"wrote {path}" in said


async def test_a_result_is_appended_without_details(server, tmp_path):
    saving = Saving(is_wanted=True, append=True, filename=str(tmp_path / "all.jsonl"))
    for _ in range(2):
        await run(server.url, saving=saving, num_prompts=2)
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert not set(DETAILS) & lines[0].keys()


async def test_a_file_of_prompts(server, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "output_tokens": 3}\n\n{"prompt": "fox", "output_tokens": 5}\n')
    result = await run(server.url, dataset=Dataset(name="custom", path=str(path), shuffle=False), num_prompts=3)
    assert result["output_lens"] == [3, 5, 3]
    assert result["input_lens"] == [5, 2, 5]  # "ox" is one token


async def test_conversations(server, tmp_path):
    turns = [("way too short", "a"), ("Hello there", "a fine answer"), ("x" * 2000, "long"), ("one turn only", None)]
    entries = [
        {"conversations": [{"from": "human", "value": asked}, *([{"from": "gpt", "value": said}] if said else [])]}
        for asked, said in turns
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    result = await run(server.url, dataset=Dataset(name="sharegpt", path=str(path)), num_prompts=2)
    assert result["output_lens"] == [len("a fine answer") - 1] * 2  # " f" is one token


def test_the_command_line(tmp_path, capsys):
    """Flags as scripts for vLLM give them, a server that is not there."""
    status = cli.main([
        "bench", "serve", "--backend", "openai-chat", "--host", "127.0.0.1", "--port", "9",
        "--endpoint", "/v1/chat/completions", "--model", "m", "--tokenizer", "default", "--dataset-name", "random",
        "--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "2", "--request-rate", "inf",
        "--burstiness", "1.0", "--max-concurrency", "2", "--seed", "1", "--ignore-eos",
        "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,99", "--goodput", "ttft:100", "tpot:50", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "r.json",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 1
    assert "Failed requests:                         2" in printed
    assert "2 failed: ClientConnectorError: Cannot connect" in printed
    assert json.loads((tmp_path / "r.json").read_text())["failed"] == 2


# ---- servers that fail ----


async def stream(request, *events):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for data in events:
        await response.write(data)
    return response


async def outcome_of(url):
    async with aiohttp.ClientSession() as session:
        return await send(session, f"{url}/v1/completions", {}, prompt_tokens=7)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((event(CHUNK), event(OUT_OF_PAGES), b"data: [DONE]\n\n"), "in the stream: out of pages"),
        ((event(CHUNK), event(USAGE)), "the stream broke off"),
        ((b"data: [DONE]\n\n",), "the stream brought no token"),
        ((b"data: {nonsense\n\n",), "JSONDecodeError"),
    ],
)  # fmt: skip
async def test_a_broken_stream_is_a_named_failure(serve_app, events, error):
    outcome = await outcome_of(await serve_app(lambda request: stream(request, *events)))
    assert not outcome.is_success
    assert outcome.error.startswith(error)


async def test_streams_in_any_framing_are_read(serve_app):
    """CRLF, comments, cuts anywhere, a chunk that brings the role only."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    text = b": hello\n\n" + event(role) + event(CHUNK) + event(CHUNK).replace(b"\n", b"\r\n") + event(USAGE)
    text += b"data: [DONE]\n\n"

    async def handler(request):
        return await stream(request, *[text[i : i + 7] for i in range(0, len(text), 7)])

    outcome = await outcome_of(await serve_app(handler))
    assert (outcome.error, outcome.text, len(outcome.itls)) == ("", "aa", 1)
    assert (outcome.prompt_tokens, outcome.output_tokens) == (11, 2)


async def test_without_usage_events_are_counted_and_it_is_said(serve_app, tmp_path):
    url = await serve_app(lambda request: stream(request, event(CHUNK), event(CHUNK), b"data: [DONE]\n\n"))
    said = []
    result = await run(url, target={"model": "m", "tokenizer": "default"}, num_prompts=3, said=said)
    assert (result["total_output_tokens"], result["total_input_tokens"]) == (6, 60)
    assert "the server sent no usage" in said[-1]


async def test_failures_are_counted_by_name_and_in_nothing_else(serve_app):
    seen = 0

    async def handler(request):
        nonlocal seen
        seen += 1
        if seen % 3 == 0:
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        await asyncio.sleep(0.01)
        return await stream(request, event(CHUNK), event(USAGE), b"data: [DONE]\n\n")

    said = []
    url = await serve_app(handler)
    result = await run(url, target={"model": "m", "tokenizer": "default"}, num_prompts=9, max_concurrency=1, said=said)
    assert (result["completed"], result["failed"]) == (6, 3)
    assert result["total_output_tokens"] == 12
    assert result["mean_ttft_ms"] >= 10
    assert said[-1] == "3 failed: status 429: queue full"


async def test_a_server_without_tokenize_needs_a_tokenizer(serve_app):
    url = await serve_app(stream)
    with pytest.raises(ValueError, match=r"/tokenize answers 404, .* give --tokenizer"):
        await run(url, target={"model": "m"})


async def test_no_server_at_all():
    with pytest.raises(ValueError, match="is the server running"):
        await run("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="no answer within --ready-check-timeout-sec"):
        await run("http://127.0.0.1:9", target={"model": "m", "tokenizer": "default", "ready_seconds": 0.05})
