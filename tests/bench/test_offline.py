"""`jcb bench throughput` and `latency` over a scripted engine: counts, keys, lines."""

import json
import random
from types import SimpleNamespace

import pytest

from jcb import cli, cli_bench
from jcb.bench import offline
from jcb.bench.serving.datasets import Dataset
from jcb.engine.choice import Choice
from jcb.engine.llm import LLM
from jcb.types import RequestError
from tests.fake_model import fake_engine


@pytest.fixture
def llm():
    return LLM.from_engine(fake_engine())


async def test_throughput_counts_what_was_generated(llm):
    dataset = Dataset(input_len=12, output_len=5, prefix_len=4)
    requests = await offline.throughput_requests(dataset, 6, 1, 256, "")
    assert requests == await offline.throughput_requests(dataset, 6, 1, 256, "")
    assert len({tuple(prompt[:4]) for prompt, _ in requests}) == 1
    result = offline.throughput(llm, requests, n=2)
    assert set(result) == {
        "elapsed_time", "num_requests", "total_num_tokens", "total_output_tokens", "requests_per_second",
        "tokens_per_second",
    }  # fmt: skip
    assert (result["num_requests"], result["total_output_tokens"]) == (6, 6 * 5 * 2)
    assert result["total_num_tokens"] == 6 * 16 + 60
    assert result["requests_per_second"] * result["elapsed_time"] == pytest.approx(6)


def test_throughput_lines():
    result = {
        "elapsed_time": 2.0, "num_requests": 5, "total_num_tokens": 300, "total_output_tokens": 100,
        "requests_per_second": 2.5, "tokens_per_second": 150.0,
    }  # fmt: skip
    assert offline.throughput_lines(result) == [
        "Throughput: 2.50 requests/s, 150.00 total tokens/s, 50.00 output tokens/s",
        "Total num prompt tokens:  200",
        "Total num output tokens:  100",
    ]


def test_latency_counts_iterations_after_the_warm_ups(llm):
    prompts = [offline.random_prompt(random.Random(0), 8, 256) for _ in range(3)]
    shown = []
    result = offline.latency(
        llm, prompts, output_len=4, n=1, warmups=2, iterations=5, show=lambda *state: shown.append(state)
    )
    assert len(result["latencies"]) == 5
    assert shown[-1] == ("iterations", 7, 7)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 5)
    assert offline.latency_lines(result)[3] == f"50% percentile latency: {result['percentiles']['50']} seconds"


def test_a_failed_request_is_no_figure():
    error = RequestError("too long", param="prompt", code="x")
    failing = SimpleNamespace(
        generate=lambda prompts, params, progress=False: [SimpleNamespace(outputs=[Choice(index=0, error=error)])]
    )
    with pytest.raises(RequestError, match="too long"):
        offline.throughput(failing, [([1], 1)])


def test_a_report_is_printed_and_written(tmp_path):
    said = []
    offline.report({"a": 1}, ["one", "two"], tmp_path / "r.json", said.append)
    assert said == ["one", "two", f"wrote {tmp_path / 'r.json'}"]
    assert (tmp_path / "r.json").read_text() == '{\n    "a": 1\n}\n'


def test_both_commands(tmp_path, capsys, monkeypatch, llm):
    """Flags as scripts for vLLM give them, settings of the engine among them."""
    asked = []
    monkeypatch.setattr(cli_bench, "_llm", lambda options: asked.append(options.serve_config()) or llm)
    model = ["--model", "m.gguf", "--max-num-seqs", "3", "--seed", "7"]
    output = tmp_path / "result.json"
    command = ["bench", "throughput", "--input-len", "10", "--output-len", "4", "--num-prompts", "3", "--n", "2"]
    assert cli.main([*command, *model, "--output-json", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "Total num prompt tokens:  30\nTotal num output tokens:  24\n" in printed
    assert json.loads(output.read_text())["num_requests"] == 3
    command = ["bench", "latency", "--input-len", "8", "--output-len", "3", "--batch-size", "2", "--num-iters", "2"]
    assert cli.main([*command, *model, "--num-iters-warmup", "1", "--output-json", str(output)]) == 0
    assert capsys.readouterr().out.startswith("Avg latency: ")
    assert len(json.loads(output.read_text())["latencies"]) == 2
    assert [(c.model, c.scheduler.max_num_seqs, c.engine.seed) for c in asked] == [("m.gguf", 3, 7)] * 2
    assert cli.main([*command, *model, "--n", "0"]) == 2
