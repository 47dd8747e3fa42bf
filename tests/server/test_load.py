"""The load script finds what it looks for."""

import asyncio

import pytest

from jcb.bench.load import Caller, OverloadResult, Phase, Sample, _quantile, _replay, run_overload, run_streams
from jcb.bench.plain_http import PlainClient
from jcb.config import ServerConfig

pytestmark = pytest.mark.usefixtures("scripted")


async def test_streams_of_a_sound_server_are_all_right(start_server):
    server = await start_server(server=ServerConfig(port=0, max_connections_per_peer=1000), max_model_len=512)
    caller = Caller(server.url, "fake", server.session)
    result = await run_streams(caller, streams=20, seconds=0.5)
    assert result.finished > 20
    assert result.tokens > 100
    assert (result.lost, result.wrong, result.tied) == ([], 0, 0)
    assert result.replayed >= 1
    await server.settle()


async def test_lost_and_wrong_answers_are_seen(start_server):
    server = await start_server(max_model_len=512)
    caller = Caller(server.url, "fake", server.session)
    body = caller.body()
    tokens = await caller.stream(body)
    assert await _replay(caller, Sample(body, tokens)) == "same"
    assert await _replay(caller, Sample(body, [tokens[0] + 1, *tokens[1:]])) == "wrong"
    server.executor.not_finite = lambda row: row.num_output == 2
    result = await run_streams(caller, streams=2, seconds=0.2)
    assert set(result.lost) == {"error non_finite_logits"}
    await server.settle()


async def test_overload_is_refused_and_the_rest_answered(start_server):
    server = await start_server(
        server=ServerConfig(port=0, max_connections_per_peer=1000), max_model_len=512, max_num_seqs=4, max_queued=8
    )
    server.executor.step_seconds = 0.01
    result = await run_overload(Caller(server.url, "fake", server.session), slots=4, seconds=2.0)
    assert result.refused > result.answered > 0
    assert result.failed == 0
    assert result.goodput > 0.5 * result.peak_rate  # a loose bound: the machine is shared
    await server.settle()


def test_what_counts_as_good():
    good = OverloadResult(100.0, 95.0, 10, 90, 0, 0.01, 0.04)
    assert good.is_good
    for bad in ({"goodput": 80.0}, {"refusal_p99": 0.06}, {"failed": 1}):
        assert not OverloadResult(**{**vars(good), **bad}).is_good
    assert [_quantile([1.0, 2.0, 3.0, 4.0], part) for part in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]
    assert _quantile([], 0.5) == 0.0


async def test_rates_leave_out_the_start_and_the_end(server):
    async with PlainClient(server.url) as client:
        phase = Phase(client, Caller(server.url, "fake", server.session), seconds=0.4)
        server.async_engine.metrics.generation_tokens.inc(500)
        counting = asyncio.create_task(phase.rate())
        await asyncio.sleep(0.25)
        server.async_engine.metrics.generation_tokens.inc(30)
        await counting
    assert 30 < phase.tokens_a_second < 200  # the 500 from before would be at least 1,000
    phase._began, phase._seconds = 10.0, 4.0
    phase.answers = [9.0, 10.5, 11.0, 13.9, 14.1]
    assert phase.answers_a_second() == 2 / 3


def test_phases_draw_the_same_bodies():
    caller = Caller("http://127.0.0.1:1", "fake", None, seed=3)
    first = [caller.body(32) for _ in range(5)]
    again = caller.again()
    assert [again.body(32) for _ in range(5)] == first
    assert len({body["prompt"] for body in first}) == 5
