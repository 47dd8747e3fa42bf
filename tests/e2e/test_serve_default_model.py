"""`serve.py` as a user starts it, with the default model: ready, OpenAI's own client, exact answers, a clean end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from jcb.bench.server_process import metric

pytestmark = [pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "tests" / "data" / "smollm2_greedy.json").read_text())["cases"]
CHATS = [case for case in CASES if case["kind"] == "chat"]
PLAIN = [case for case in CASES if case["kind"] == "plain"]
FLAGS = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "512", "--dtype", "float32"]


def start(cache: Path) -> tuple[subprocess.Popen, str, float]:
    """A server that has just become ready: the process, its URL, and the seconds it took."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION")}
    command = [sys.executable, "serve.py", "--port", "0", *FLAGS, "--set", f"engine.compile_cache={cache}"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        if found := re.search(r"jcb is ready: (http://\S+)", line):
            return process, found[1], time.perf_counter() - begin
    raise AssertionError("the server ended before it was ready")


def stop(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    return process.returncode


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def server(cache):
    process, url, seconds = start(cache)
    yield url, seconds
    assert stop(process) == 0, "SIGTERM ends a server with status 0"


def text_of(case: dict) -> str:
    return case["output_text"].removesuffix("<|im_end|>")


def test_the_official_client_gets_the_reference_answers(server):
    url, _ = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    for case in CHATS[:3]:
        arguments = {"model": model, "messages": case["messages"], "temperature": 0, "max_tokens": 48}
        whole = client.chat.completions.create(**arguments)
        assert whole.choices[0].message.content == text_of(case)
        assert whole.choices[0].finish_reason == ("stop" if case["output_ids"][-1] == 2 else "length")
        assert whole.usage.prompt_tokens == len(case["prompt_ids"])
        assert whole.usage.completion_tokens == len(case["output_ids"])
        chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(case)
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    for case in PLAIN[:3]:
        answer = client.completions.create(model=model, prompt=case["prompt"], temperature=0, max_tokens=48, logprobs=1)
        assert answer.choices[0].text == text_of(case)
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(case["logprobs"], abs=2e-3)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt="Hi", temperature=-1)


async def test_the_asynchronous_client_in_parallel(server):
    import asyncio

    url, _ = server
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def ask(case: dict) -> str:
            stream = await client.completions.create(
                model=model, prompt=case["prompt_ids"], temperature=0, max_tokens=48, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        answers = await asyncio.gather(*[ask(case) for case in PLAIN])
    assert answers == [text_of(case) for case in PLAIN]


def test_nothing_compiled_and_nothing_is_left(server):
    url, _ = server
    assert metric(url, "jcb:compiles_after_ready_total") == 0
    assert metric(url, "jcb:num_requests_running") == metric(url, "jcb:num_requests_waiting") == 0
    assert metric(url, "jcb:kv_cache_usage_perc") == 0
    assert metric(url, "jcb:generation_tokens_total") > 500
    with urllib.request.urlopen(f"{url}/health") as answer:
        assert answer.status == 200


def test_the_second_start_reads_its_programs(server, cache, capsys):
    """The persistent compile cache: same programs, no compiling. `make bench-start` times the default settings."""
    _, cold = server
    entries = {path.name for path in cache.iterdir() if path.name.endswith("-cache")}
    process, url, warm = start(cache)
    try:
        assert metric(url, "jcb:compiles_after_ready_total") == 0
        assert {path.name for path in cache.iterdir() if path.name.endswith("-cache")} == entries
    finally:
        assert stop(process) == 0
    with capsys.disabled():
        print(f"\nready after {cold:.1f} s with an empty compile cache, {warm:.1f} s with a full one")
    assert warm < cold
