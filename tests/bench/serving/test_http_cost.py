"""The price of HTTP: the same load both ways, against the scripted engine and the scripted server."""

import pytest

from jcb.bench.serving import http_cost
from jcb.engine.llm import LLM
from tests.fake_model import fake_engine


async def test_tokens_a_second_through_the_server(server):
    speed = await http_cost.through_http(server.url, "fake", [[100, 101, 102]] * 3, 5)
    assert speed > 0


async def test_a_failed_request_is_told(server):
    with pytest.raises(RuntimeError, match="1 of 1 requests failed, the first with status 400"):
        await http_cost.through_http(server.url, "fake", [[10**6]], 5)


def test_rounds_are_interleaved_and_the_first_does_not_count(monkeypatch):
    speeds, said = iter([1.0, 50.0, 80.0]), []

    async def served(*_):
        return next(speeds)

    monkeypatch.setattr(http_cost, "through_http", served)
    monkeypatch.setattr(http_cost, "model_id", lambda url: "fake")
    monkeypatch.setattr(
        http_cost, "throughput", lambda llm, requests: {"total_output_tokens": 100, "elapsed_time": 1.0}
    )
    llm = LLM.from_engine(fake_engine())
    result = http_cost.measure(
        llm, "url", vocab_size=200, streams=2, input_len=3, output_len=2, rounds=2, say=said.append
    )
    assert result["cost_percent"] == pytest.approx([35.0, 20.0, 50.0])
    assert result["http"] == [65.0, 50.0, 80.0]
    assert len(said) == 3
